"""The conversion: base shards pass through untouched, one shard of hyper-connections is added."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import hf_hyperconn
from hf_hyperconn.errors import ConversionError, VerificationError

from .base_card import README, read_base_card
from .checkpoint import INDEX
from .files import replace_file
from .plan import RECORD, ConversionPlan, HyperConnectionFields, plan_conversion, workspace
from .source import CONFIG, Source
from .transfer import bring, compare
from .verify import MODES, VerificationReport, verify_checkpoint

if TYPE_CHECKING:
    from .card import WrittenCard

PLAN = "plan.json"


@dataclass(frozen=True)
class ConversionResult:
    """A finished conversion: where it is, what was planned, what verification found (None when it was off)."""

    path: Path
    plan: ConversionPlan
    verification: VerificationReport | None


def convert_checkpoint(
    model: str,
    out: str | os.PathLike | None = None,
    *,
    hc_mult: int = 4,
    connection: str = "dhc",
    hc_tanh: bool = True,
    revision: str | None = None,
    link: str = "copy",
    force: bool = False,
    verify: str = "auto",
    layers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ConversionResult:
    """Convert a Pre-Norm checkpoint into one with `hc_mult` residual streams that computes exactly the same.

    model: local folder or Hub id.
    out: folder to make, by default `<model's name>-HCx<n>` here. It exists only once it is complete and verified; what
        is interrupted stays in `.<out>.incomplete` beside it, and the same call goes on from there.
    connection, hc_mult, hc_tanh: see `HyperConnectionConfig`.
    revision: branch, tag or commit of a Hub repo.
    link: "copy", "hard" or "symlink": how base shards reach `out`.
    force: replace an `out` that is a converted checkpoint.
    verify: "auto", "full", "structure" or "off"; see `hf_hyperconn.conversion.verify.verify_checkpoint`.
    layers: how many layers a numeric verification runs; by default all that fit in memory.
    say: called with a line for each step done.

    Raises `UnsupportedCheckpointError` before any work for what can't be converted, `ConversionError` when writing
    fails and `VerificationError` when the result differs from its base.
    """
    fields = HyperConnectionFields(hc_mult, connection, hc_tanh)
    plan = plan_conversion(model, out, fields=fields, revision=revision, link=link, force=force)
    return carry_out(plan, verify=verify, layers=layers, say=say)


def carry_out(
    plan: ConversionPlan,
    *,
    verify: str = "auto",
    layers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ConversionResult:
    """Do what `plan` says; arguments and errors as for `convert_checkpoint`."""
    if verify not in (*MODES, "off"):
        raise ConversionError(
            f"verify={verify!r} was asked for; accepted are {', '.join(map(repr, MODES))} and 'off'."
        )
    with _open_workspace(plan) as work:
        with _file_errors(work.parent):
            _write_weights(plan, work)
            say(f"base weights  {len(plan.shards)} file(s), passed through")
            say(f"hc weights    {plan.hc_parameters:,} parameters, n={plan.fields.hc_mult}, {plan.fields.connection}")
            _write_companions(plan, work)
            digests = _compare_shards(plan, work) if verify in ("auto", "full") else {}
            record = _record(plan, work, digests)
            _write_json(work / RECORD, record)
        report = None
        if verify != "off":
            report = verify_checkpoint(work, plan.source, mode=verify, layers=layers, fresh=True)
            for line in report.lines():
                say(line)
            if not report.passed:
                raise VerificationError(f"verification failed: {report.failure}. The result is kept in '{work}'.")
        with _file_errors(work.parent):
            _write_json(work / RECORD, {**record, "verification": report and report.as_dict()})
            for warning in _write_card(plan, work).warnings:
                say(f"warning       {warning}")
            (work / PLAN).unlink()
            _put_in_place(work, plan.out)
    return ConversionResult(plan.out, plan, report)


@contextmanager
def _open_workspace(plan: ConversionPlan) -> Iterator[Path]:
    """The folder to work in, ours alone: an interrupted conversion's if it had the same plan, else an empty one.

    Raises `ConversionError` when another conversion is at work in it.
    """
    work = workspace(plan.out.absolute())
    with _file_errors(work.parent):
        if plan.out.exists():
            shutil.rmtree(_aside(plan.out), ignore_errors=True)  # of a replacement that was cut off at its end
        work.mkdir(exist_ok=True)
        lock = _lock(work)
    try:
        with _file_errors(work.parent):
            try:
                same = json.loads((work / PLAN).read_text(encoding="utf-8")) == plan.fingerprint()
            except (OSError, ValueError):
                same = False
            if not same:
                for path in work.iterdir():
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                _write_json(work / PLAN, plan.fingerprint())
        yield work
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Hold a folder for this process, where the system can; it lets go by itself when the process ends."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # not a Unix
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConversionError(
            f"another conversion is at work in '{folder}'. Wait for it, or choose another OUT."
        ) from error
    return descriptor


def _write_weights(plan: ConversionPlan, work: Path) -> None:
    """Bring the base shards, and meanwhile write the hyper-connection shard and the index."""

    def bring_shard(name: str, progress: Callable[[int], None]) -> None:
        bring(plan.source.path(name), work / plan.shards[name], plan.link, progress)

    _for_each_shard(plan, "Base weights", bring_shard, meanwhile=lambda: _write_hyper_connections(plan, work))


def _compare_shards(plan: ConversionPlan, work: Path) -> dict[str, str]:
    """Read the shards back beside the base's. Returns the SHA-256 of each by its name in the base."""

    def compare_shard(name: str, progress: Callable[[int], None]) -> str:
        digest = compare(plan.source.path(name), work / plan.shards[name], progress)
        if plan.source.sha256.get(name, digest) != digest:
            raise VerificationError(
                f"'{plan.source.path(name)}' is not the file that the Hub holds. Download it again."
            )
        return digest

    return _for_each_shard(plan, "Comparing", compare_shard)


def _for_each_shard(plan: ConversionPlan, title: str, work, meanwhile=lambda: None) -> dict:
    """Run `work(name, progress)` for every base shard, two at a time, with one bar of bytes; results by name.

    meanwhile: called on this thread. An error or Ctrl-C stops all of it.
    """
    from huggingface_hub.utils import tqdm

    stop = Event()
    with (
        tqdm(total=plan.base_bytes, unit="B", unit_scale=True, desc=title, disable=None) as bar,
        ThreadPoolExecutor(2) as pool,
    ):

        def advance(count: int) -> None:
            bar.update(count)
            if stop.is_set():
                raise InterruptedError("stopped")

        pending = {name: pool.submit(work, name, advance) for name in plan.shards}
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

    from .equivalent import hyper_connection_tensors

    tensors = hyper_connection_tensors(plan.config, plan.family, plan.weights.prefix)
    replace_file(work / plan.hc_shard, save(tensors, metadata={"format": "pt"}))
    weight_map = {name: plan.shards[tensor.file] for name, tensor in plan.weights.tensors.items()}
    weight_map.update(dict.fromkeys(tensors, plan.hc_shard))
    metadata = {
        "total_parameters": plan.weights.parameters + sum(tensor.size for tensor in tensors.values()),
        "total_size": plan.weights.nbytes + sum(tensor.nbytes for tensor in tensors.values()),
    }
    _write_json(work / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _write_companions(plan: ConversionPlan, work: Path) -> None:
    for name in plan.companions:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.source.path(name), work / name)
    code = Path(hf_hyperconn.__file__).parent / "models"
    for name in plan.family.code:
        shutil.copyfile(code / name, work / name)
    _write_json(work / CONFIG, plan.config)


def _record(plan: ConversionPlan, work: Path, digests: dict[str, str]) -> dict:
    """What hyperconn_conversion.json says of where the checkpoint comes from.

    The SHA-256 of a base shard is null where neither the Hub told it nor a verification read the shard.
    """
    from importlib.metadata import version

    known = {**plan.source.sha256, **digests}
    shards = [
        {"file": target, "source": name, "size": plan.source.files[name], "sha256": known.get(name)}
        for name, target in plan.shards.items()
    ]
    return {
        "base": {"model": _public_name(plan.source), "commit": plan.source.commit},
        "base_card": read_base_card(plan.source),
        "arguments": {**vars(plan.fields), "link": plan.link},
        "versions": {
            "hf_hyperconn": hf_hyperconn.__version__,
            **{name: version(name) for name in ("safetensors", "torch", "transformers")},
        },
        "base_shards": shards,
        "hyper_connection_shard": plan.hc_shard,
        "hyper_connection_sha256": compare(work / plan.hc_shard, work / plan.hc_shard),
    }


def _public_name(source: Source) -> str:
    """A Hub id; of a folder its name alone, as the record is published and where it lies is nobody's business."""
    return source.name if source.commit else Path(os.path.abspath(source.name)).name


def _write_card(plan: ConversionPlan, work: Path) -> "WrittenCard":
    from .card import write_card

    (work / README).unlink(missing_ok=True)  # of an attempt that was cut off at its end
    return write_card(work, name=plan.out.absolute().name)


def _put_in_place(work: Path, out: Path) -> None:
    previous = _aside(out)
    if out.exists():
        shutil.rmtree(previous, ignore_errors=True)
        out.rename(previous)
    work.rename(out)
    shutil.rmtree(previous, ignore_errors=True)


def _aside(out: Path) -> Path:
    return out.parent / f".{out.name}.previous"


def _write_json(path: Path, content) -> None:
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


@contextmanager
def _file_errors(folder: Path):
    try:
        yield
    except OSError as error:
        raise ConversionError(
            f"writing in '{folder}' failed: {error.strerror or error}. Mend that and run the same command again; "
            f"it goes on where it stopped."
        ) from error
