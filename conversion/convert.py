"""The command `convert`: base shards stay unchanged, and one shard of hyper-connections is added."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import hf_hyperconn
from hf_hyperconn.errors import ConversionError, VerificationError
from hf_hyperconn.models.connection_fields import GivenFields

from .card import write_card
from .checkpoint.checkpoint_files import INDEX, refuse_links_out
from .checkpoint.connection_options import describe
from .checkpoint.readme import README, read_base_card
from .checkpoint.source import CONFIG, RECORD
from .files.reading import read_json
from .files.writing import (
    Progress,
    as_json,
    compare,
    copy_anew,
    copy_or_link,
    file_digest,
    is_part,
    is_regular,
    lock,
    make_folder,
    remove_parts,
    replace_file,
)
from .interrupts import holding_interrupts
from .planning.base_refusals import refuse_unfit
from .planning.companions import MODULES, modules_left_behind
from .planning.plan import ConversionPlan, plan_conversion
from .terminal import MOST_NAMED, name_some
from .verify import MODES, VerificationReport, fault_of_mode, verify_checkpoint

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")

PLAN = ".hyperconn_plan.json"  # hidden, as no file that comes along with a base is


@dataclass(frozen=True)
class ConversionResult:
    """A finished conversion.

    path: its folder.
    verification: the report of the verification; None when it was off.
    renamed: the new name of an old folder in its place; None without one.
    """

    path: Path
    plan: ConversionPlan
    verification: VerificationReport | None
    renamed: Path | None = None


def convert_checkpoint(
    model: str,
    out: str | os.PathLike | None = None,
    *,
    stack: str | None = None,
    revision: str | None = None,
    link: str = "copy",
    force: bool = False,
    verify: str = "auto",
    layers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    **fields: "Unpack[GivenFields]",
) -> ConversionResult:
    """Convert a Pre-Norm checkpoint into one with `hc_mult` residual streams and the same outputs, bit for bit.

    model: local folder or Hub id.
    out: folder to make, by default `<model's name>-HCx<n>` here, `-AttnRes` for attention residuals. It appears only
        when it is complete and verified. An interrupted conversion stays in `.<out>.incomplete` beside it. The same
        call continues it. A link stands for its target.
    stack: the inner model that gets connections, by its attribute, as in `convert_model`; None for the usual ones.
    revision: branch, tag or commit of a Hub repo.
    link: "copy", "hard" or "symlink": how base shards reach `out`.
    force: rename an existing `out`; its new name contains the time.
    verify: "auto", "full", "structure" or "off"; see `hf_hyperconn.conversion.verify.verify_checkpoint`.
    layers: how many layers a numeric verification runs; by default all that fit in memory.
    say: called with a line for each step done.
    fields: `connection`, `hc_mult` and others of `HyperConnectionConfig`. By default there are 4 streams, 1 for
        attention residuals, and the readout is the one that keeps the model exact.

    Raises `UnsupportedCheckpointError` before any work for a model that can't be converted. Raises `ConversionError`
    when writing fails and for impossible arguments, and `VerificationError` when the result differs from its base.
    """
    plan = plan_conversion(model, out, fields=fields, stack=stack, revision=revision, link=link, force=force)
    return carry_out(plan, verify=verify, layers=layers, say=say)


def carry_out(
    plan: ConversionPlan,
    *,
    verify: str = "auto",
    layers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ConversionResult:
    """Carry out a plan; arguments and errors as for `convert_checkpoint`."""
    if fault := fault_of_mode(verify, layers, (*MODES, "off")):
        raise ConversionError(fault)
    if verify != "off":
        refuse_unfit(plan.base)
    for warning in plan.warnings:
        say(f"warning       {warning}")
    with _open_workspace(plan) as work:
        with _file_errors(work.parent):
            _bring_shards(plan, work, meanwhile=lambda: _write_hyper_connections(plan, work))
            say(f"base weights  {len(plan.shards)} file(s), passed through")
            say(f"hc weights    {plan.hc_parameters:,} parameters, {describe(plan.fields)}")
            _write_companions(plan, work)
            _say_left_behind(plan, say)
            record = _record(plan, work, _shard_digests(plan, work, verify))
            replace_file(work / RECORD, as_json(record))
        report = None
        if verify != "off":
            subject = {"mode": verify, "layers": layers, "record": record}
            report = _earlier_report(work, subject) or verify_checkpoint(
                work, plan.base.source, mode=verify, layers=layers, fresh=True
            )
            for line in report.lines():
                say(line)
            if not report.passed:
                raise VerificationError(f"verification failed: {report.failure}. The result is kept in '{work}'.")
            with _file_errors(work.parent):
                _update_plan(work, verified={**subject, "report": report.as_dict()})
        with _file_errors(work.parent):
            record["verification"] = report and report.as_dict()
            replace_file(work / RECORD, as_json(record))
            (work / README).unlink(missing_ok=True)  # of an attempt that was cut off at its end
            card = write_card(work, name=plan.out.absolute().name)
            for warning in card.warnings:
                say(f"warning       {warning}")
            replace_file(
                work / RECORD, as_json({**record, "card": {path.name: file_digest(path) for path in card.files}})
            )
            if (renamed := _publish(plan, work)) is not None:
                say(f"renamed       the old '{plan.out}' to '{renamed.name}'")
    return ConversionResult(plan.out, plan, report, renamed)


@contextmanager
def _open_workspace(plan: ConversionPlan) -> Iterator[Path]:
    """Yield the workspace, locked: of an interrupted conversion with the same plan, else an empty folder.

    Raises `ConversionError` when another conversion works in it, when it is not a conversion's, and when OUT has
    appeared since the plan was made.
    """
    work = plan.output.work
    with _file_errors(work.parent):
        holding = _hold_workspace(plan, work)
    with holding:
        with _file_errors(work.parent):
            plan.output.refuse_newcomer()
            if not (is_regular(work / PLAN) or all(map(is_part, os.listdir(work)))):
                raise _not_ours(work)
            remove_parts(work)
            earlier = _read_plan(work)
            if earlier.get("plan") != plan.fingerprint():
                if earlier.get("finished"):
                    raise ConversionError(
                        f"'{work}' holds a finished conversion of another base or with other arguments, which could "
                        f"not be given its name. Run the command that made it again, or remove that folder."
                    )
                for path in work.iterdir():
                    if path.name != PLAN:  # by which the folder is known for a conversion's
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                replace_file(work / PLAN, as_json({"plan": plan.fingerprint()}))
        yield work


def _hold_workspace(plan: ConversionPlan, work: Path) -> ExitStack:
    """Make the workspace if it is missing, and lock it."""
    while True:
        with suppress(FileExistsError):
            make_folder(work, plan.base.source.folder([CONFIG]), plan.base.source.path(CONFIG))
        try:
            return lock(work)
        except FileNotFoundError:  # the conversion that was there has been given its name
            continue
        except NotADirectoryError as error:
            raise _not_ours(work) from error


def _not_ours(work: Path) -> ConversionError:
    return ConversionError(
        f"'{work}', where the conversion works, exists and was not made by a conversion. Rename it, or choose "
        f"another OUT."
    )


def _read_plan(work: Path) -> dict:
    """Return the notes of an earlier attempt; empty without one."""
    try:
        notes = read_json(work / PLAN)
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _update_plan(work: Path, **facts) -> None:
    replace_file(work / PLAN, as_json({**_read_plan(work), **facts}))


def _earlier_report(work: Path, subject: dict) -> VerificationReport | None:
    """Return the report of an earlier attempt that verified the same files in the same way."""
    verified = _read_plan(work).get("verified") or {}
    if {name: verified.get(name) for name in subject} != json.loads(json.dumps(subject)):
        return None
    return VerificationReport.from_dict(verified["report"])


def _publish(plan: ConversionPlan, work: Path) -> Path | None:
    """Give the finished conversion its name, and return the new name of an old one.

    When renaming fails, the next attempt renames it.
    """
    _update_plan(work, finished=True)
    renamed = plan.output.publish()
    (plan.output.path / PLAN).unlink(missing_ok=True)
    return renamed


def _bring_shards(plan: ConversionPlan, work: Path, meanwhile: Callable[[], None]) -> None:
    """Copy or link every shard into the folder `work`; `meanwhile` is called on this thread."""

    def bring_shard(name: str, progress: Progress) -> None:
        copy_or_link(plan.base.source.path(name), work / plan.shards[name], plan.link, progress)

    _for_each_shard(plan, "Base weights", bring_shard, meanwhile)


def _shard_digests(plan: ConversionPlan, work: Path, verify: str) -> dict[str, str]:
    """Return the SHA-256 of each shard by its name in the base.

    verify: without verification, "off", only the Hub's digests are returned. With "structure", the other shards are
        read, too. With any other mode, all are compared with the base's.
    """
    source = plan.base.source

    def read_shard(name: str, progress: Progress) -> str:
        if known := source.sha256.get(name):
            progress(source.files[name])
            return known
        return file_digest(work / plan.shards[name], progress)

    def compare_shard(name: str, progress: Progress) -> str:
        sha256 = compare(source.path(name), work / plan.shards[name], progress)
        if source.sha256.get(name, sha256) != sha256:
            raise VerificationError(f"'{source.path(name)}' is not the file that the Hub holds. Download it again.")
        return sha256

    if verify == "off":
        return {name: known for name, known in source.sha256.items() if name in plan.shards}
    if verify == "structure":
        return _for_each_shard(plan, "Reading", read_shard)
    return _for_each_shard(plan, "Comparing", compare_shard)


def _for_each_shard(
    plan: ConversionPlan,
    title: str,
    act: Callable[[str, Progress], T],
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, T]:
    """Run `act(name, progress)` for every base shard, two at a time, with one bar of bytes; results by name.

    meanwhile: called on this thread. An error or Ctrl-C stops all of it.
    """
    from huggingface_hub.utils import tqdm

    stop = Event()
    with (
        holding_interrupts() as interrupted,
        tqdm(total=plan.base_bytes, unit="B", unit_scale=True, desc=title, disable=None) as bar,
        ThreadPoolExecutor(2) as pool,
    ):

        def advance(count: int) -> None:
            bar.update(count)
            if stop.is_set() or interrupted():
                raise InterruptedError("stopped")

        pending = {name: pool.submit(act, name, advance) for name in plan.shards}
        try:
            meanwhile()
            return {name: future.result() for name, future in pending.items()}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _write_hyper_connections(plan: ConversionPlan, work: Path) -> None:
    """Write the hyper-connection shard, and the index of all shards."""
    from safetensors.numpy import save

    from .verify.start import hyper_connection_tensors

    tensors = hyper_connection_tensors(plan.config, plan.base.family, plan.base.stack_prefixes)
    replace_file(work / plan.hc_shard, save(tensors, metadata={"format": "pt"}))
    weight_map = {name: plan.shards[tensor.file] for name, tensor in plan.base.weights.tensors.items()}
    weight_map.update(dict.fromkeys(tensors, plan.hc_shard))
    metadata = {
        "total_parameters": plan.base.weights.parameters + sum(tensor.size for tensor in tensors.values()),
        "total_size": plan.base.weights.nbytes + sum(tensor.nbytes for tensor in tensors.values()),
    }
    replace_file(work / INDEX, as_json({"metadata": metadata, "weight_map": weight_map}))


def _write_companions(plan: ConversionPlan, work: Path) -> None:
    refuse_links_out(plan.base.source, (CONFIG, INDEX, README))  # again: links may have been put there meanwhile
    for name in plan.companions:
        refuse_links_out(plan.base.source, (name,))
        for folder in reversed(Path(name).parents[:-1]):
            if not (work / folder).is_dir():
                make_folder(work / folder, like=plan.base.source.folder([name]) / folder)
        copy_anew(plan.base.source.path(name), work / name)
    for name, text in plan.code.items():
        replace_file(work / name, text.encode())
    replace_file(work / CONFIG, as_json(plan.config))


def _say_left_behind(plan: ConversionPlan, say: Callable[[str], None]) -> None:
    if plan.left:
        say(f"left behind   {name_some(plan.left)}" + " (--dry-run lists all)" * (len(plan.left) > MOST_NAMED))
    if missed := modules_left_behind(plan.base.source, plan.left):
        say(
            f"warning       {MODULES} names the folder of {missed[0]}, which is not copied: load the base with "
            f"sentence-transformers, save it as safetensors, and convert that."
        )


def _record(plan: ConversionPlan, work: Path, digests: dict[str, str]) -> dict:
    """Return the record of a conversion before its verification.

    digests: the SHA-256 of base shards by their names in the base; null is recorded for other shards.
    """
    from importlib.metadata import version

    source = plan.base.source
    shards = [
        {"file": target, "source": name, "size": source.files[name], "sha256": digests.get(name)}
        for name, target in plan.shards.items()
    ]
    # of a folder its name alone: the record is published, and a path is nobody's business
    public_name = source.name if source.commit else Path(os.path.abspath(source.name)).name
    return {
        "base": {"model": public_name, "commit": source.commit},
        "base_card": read_base_card(source),
        "arguments": {**plan.fields, "link": plan.link},
        "versions": {
            "hf_hyperconn": hf_hyperconn.__version__,
            **{name: version(name) for name in ("safetensors", "torch", "transformers")},
        },
        "base_shards": shards,
        "hyper_connection_shard": plan.hc_shard,
        "hyper_connection_sha256": file_digest(work / plan.hc_shard),
        "files": {name: file_digest(work / name) for name in sorted((CONFIG, INDEX, *plan.code, *plan.companions))},
    }


@contextmanager
def _file_errors(folder: Path):
    try:
        yield
    except OSError as error:
        raise ConversionError(
            f"writing in '{folder}' failed: {error.strerror or error}. Fix that and run the same command again; "
            f"it continues where it stopped."
        ) from error
