"""Whether a command kept its promises, whatever it was given."""

import json
import os
import re
import unicodedata
from hashlib import sha256
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_hyperconn.conversion.checkpoint.model_code import code_of_this_release
from hf_hyperconn.conversion.checkpoint.readme import README, with_repo_name
from hf_hyperconn.conversion.files.reading import read_json
from hf_hyperconn.conversion.files.writing import file_digest
from hf_hyperconn.families.family import usual_names

from ..reliability import FAILED, OK, REFUSED, UNVERIFIED
from .cases import Case
from .children import MEMORY, Ended, run
from .mutations.record import RECORD
from .mutations.values import PRECIOUS, PRIVATE, SECRET
from .snapshot import differences, holding, snapshot
from .starts import ids

OUT_OF_MEMORY = re.compile(r"MemoryError|not enough memory|[Cc]annot allocate memory|can't allocate memory")
BIDIRECTIONAL = {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
# exit codes of a process that compares models, and what the wrong ones mean
EQUAL, BASE_UNLOADED, UNLOADED, INCOMPLETE, DIFFERENT = range(10, 15)
FOUND = {
    UNLOADED: "Transformers does not load it, though it loads the base",
    INCOMPLETE: "the base lacks tensors, or has others",
    DIFFERENT: "its logits are not the base's",
}
SIZES = ("size mismatch", "mismatched", "ran out of", "allocate", "MemoryError")  # words of errors about sizes


class Broken(Exception):
    """A promise that was not kept."""


def judge(case: Case, before: dict, ended: Ended, repos: dict | None) -> tuple[str, str]:
    """Return the outcome of a case, and why, for people.

    before: `look(case)` before the command ran. repos: of the Hub, after a push.
    """
    try:
        check_end(ended)
        check_printed(ended, case.out or "")
        _check_changes(case, before, ended)
        if repos is not None:
            _check_hub(case, ended, repos)
        if ended.code == 0:
            _check_result(case, before, ended)
    except Broken as broken:
        return FAILED, str(broken)
    return {0: OK, 3: UNVERIFIED}.get(ended.code, REFUSED), _last_line(ended.stderr)


def look(case: Case) -> dict:
    """Return a snapshot of the case's folders."""
    return snapshot(case.place, "home", "tmp", "hub", "log.out", "log.err")


def check_end(ended: Ended) -> None:
    """Raise `Broken` for a command that did not end in time, within its memory, and with one of our exit codes."""
    if ended.timed_out:
        raise Broken(f"killed after {ended.seconds:.0f} seconds")
    if ended.code < 0:
        raise Broken(f"ended by signal {-ended.code}")
    if ended.peak > MEMORY or OUT_OF_MEMORY.search(ended.stderr):
        raise Broken(f"too much memory: {_last_line(ended.stderr)}")
    if "Traceback" in ended.stderr:
        raise Broken(f"traceback: {_last_line(ended.stderr)}")
    if ended.code not in (0, 1, 2, 3):
        raise Broken(f"exit code {ended.code}")


def check_printed(ended: Ended, out: str = "") -> None:
    """Raise `Broken` unless one line says what is wrong when something is, foreseen and fit for a terminal.

    out: OUT as it was given, which goes to a stdout that is no terminal as it is.
    """
    if "(unexpected" in ended.stderr:
        raise Broken(f"unexpected: {_last_line(ended.stderr)}")
    for character in ended.stdout.removesuffix(f"{out}\n") + ended.stderr:
        if character != "\n" and (unicodedata.category(character) == "Cc" or character in BIDIRECTIONAL):
            raise Broken(f"prints the control character {character!r}")
    errors = [line for line in ended.stderr.splitlines() if re.match(r"(hf-hyperconn.*)?error: ", line)]
    if len(errors) != (ended.code != 0):
        raise Broken(f"exit code {ended.code}, and {len(errors)} lines of error: {_last_line(ended.stderr)}")


def _check_changes(case: Case, before: dict, ended: Ended) -> None:
    """Refuse changes outside of the files that the command writes, and an OUT that is not whole."""
    for path, change in differences(before, look(case)).items():
        if not _may_change(case, Path(path), ended):
            raise Broken(f"{path!r} {change} (exit code {ended.code})")
    precious = sha256(PRECIOUS).digest()
    if any(content == precious for _, content in before.values()) and not holding(case.place, (PRECIOUS,)):
        raise Broken(f"a file of the user's is gone (exit code {ended.code})")


def _may_change(case: Case, path: Path, ended: Ended) -> bool:
    conversion = Path("work", "hc")
    match case.driver:
        case "convert" if "--dry-run" not in case.arguments:
            places = [_work(out) for out in _outs(case)]
            if ended.code == 0:
                places += _outs(case)
                places += [
                    here for here in (path, *path.parents) if any(_is_renamed(here, out) for out in _outs(case))
                ]
            return any(path.is_relative_to(place) for place in places)
        case "verify":
            return path == conversion / RECORD and ended.code == 0
        case "card":
            names = ("README.md", "Notice")
            return path in [conversion / name for name in names]
    return False


def _outs(case: Case) -> list[Path]:
    """Return OUT, and its target if it is a link."""
    place, out = os.path.realpath(case.place), case.work / case.out
    return [Path(os.path.normpath(Path("work", case.out))), Path(os.path.relpath(os.path.realpath(out), place))]


def _work(out: Path) -> Path:
    """Return the folder of a conversion until OUT is whole."""
    return out.with_name(f".{out.name}.incomplete") if out.name else out


def _is_renamed(path: Path, out: Path) -> bool:
    """Return whether a path is the name that `--force` gives to an old OUT."""
    return path.parent == out.parent and path.name.startswith(f"{out.name}.replaced-")


def _check_hub(case: Case, ended: Ended, repos: dict[str, dict[str, Path]]) -> None:
    """Refuse a part of the folder on the Hub, and a file there that is not the folder's."""
    for branch, folder in repos.get("me/case", {}).items():
        held = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".gitattributes")
        if not held:
            continue
        if ended.code != 0 or "--dry-run" in case.arguments:
            raise Broken(f"exit code {ended.code}, and {branch} holds {held[0].relative_to(folder)}")
        for path, mark in holding(folder, (SECRET, PRIVATE)):
            raise Broken(f"published {os.fsdecode(path)!r}, which is {mark.decode()}")
        for path in held:
            ours = case.work / "hc" / path.relative_to(folder)
            if not ours.is_file() or path.read_bytes() != _as_pushed(ours):
                raise Broken(f"the Hub's {ours.name} is not the folder's")
        _check_announced(case, [str(path.relative_to(folder)) for path in held], "published", "")


def _as_pushed(ours: Path) -> bytes:
    """Return what a push makes of a file: its own bytes, but for the repo's name in the card."""
    content = ours.read_bytes()
    return with_repo_name(content.decode(), "me/case").encode() if ours.name == README else content


def _check_result(case: Case, before: dict, ended: Ended) -> None:
    match case.driver:
        case "convert" if "--dry-run" not in case.arguments:
            _check_converted(case, before)
        case "verify":
            _check_verified(case, before, ended)


def _check_converted(case: Case, before: dict) -> None:
    out, base = case.work / case.out, case.work / "base"
    left = _work(Path(os.path.normpath(Path("work", case.out))))
    if os.path.lexists(case.place / left) and os.fsencode(left) not in before:
        raise Broken(f"{left.name} is left behind")
    _check_renamed(case, before)
    try:
        config, record = (json.loads((out / name).read_bytes()) for name in ("config.json", RECORD))
        index = json.loads((out / "model.safetensors.index.json").read_bytes())
        for name in set(index["weight_map"].values()):
            if not (out / name).is_file():
                raise Broken(f"OUT lacks {name}")
        published = False
        for shard in record["base_shards"]:
            ours, theirs = out / shard["file"], base / shard["source"]
            if ours.read_bytes() != theirs.read_bytes():
                raise Broken(f"{shard['file']} is not what the base has")
            published |= not ours.is_symlink() and bool(ours.stat().st_mode & ~theirs.stat().st_mode & 0o077)
        if not config["model_type"].startswith("hc_"):
            raise Broken(f"OUT has model_type {config['model_type']}")
    except (OSError, ValueError, LookupError) as error:
        raise Broken(f"OUT is not whole: {error}") from error
    for path in out.rglob("*.py"):
        ours = code_of_this_release(path.name, usual_names(config))
        if ours is None or path.read_bytes() != ours.encode():
            raise Broken(f"OUT has code that isn't the package's: {path.name}")
    for path, _ in holding(out, (SECRET,)):
        raise Broken(f"{os.fsdecode(path)!r} holds what lies outside of the base")
    if case.looks and "off" not in case.arguments and (fault := compare_loaded(base, out, case.place)):
        raise Broken(f"converted, and {fault}")
    if published:
        raise Broken("weights of OUT can be read by more people than those of the base")


def _check_renamed(case: Case, before: dict) -> None:
    """Refuse a `--force` after which the old OUT is not whole under its new name."""
    now = look(case)
    for place in _outs(case):
        old = {path: entry for path, entry in before.items() if Path(os.fsdecode(path)).is_relative_to(place)}
        if not old or old.get(os.fsencode(place), ("l",))[0].startswith("l"):  # OUT was new, or a link that stays
            continue
        (new,) = [Path(os.fsdecode(path)) for path in now if _is_renamed(Path(os.fsdecode(path)), place)] or [place]
        moved = {os.fsencode(new / Path(os.fsdecode(path)).relative_to(place)): entry for path, entry in old.items()}
        if any(now.get(path) != entry for path, entry in moved.items()):
            raise Broken(f"--force lost or changed what was at {place}")


def _check_verified(case: Case, before: dict, ended: Ended) -> None:
    """Refuse a conversion that passes and is neither as the converter wrote it nor said to be changed or trained."""
    if "trained" in ended.stdout and "equivalent initialization" not in ended.stdout:
        return
    printed = ended.stdout + ended.stderr
    if '"trained": true' in printed:
        return
    changed = [name for name in _changed_since_recorded(case) if name.endswith(".py") or name == "config.json"]
    _check_announced(case, changed, "verified", printed)
    full = "--against" in case.arguments and "structure" not in case.arguments
    unspoilt = not any(text.startswith("base: ") for text in case.said)
    if (
        case.looks
        and unspoilt
        and full
        and (fault := compare_loaded(case.work / "base", case.work / "hc", case.place))
    ):
        raise Broken(f"verified, and {fault}")


def _check_announced(case: Case, names: list[str], done: str, printed: str) -> None:
    for name in sorted(set(names) & set(_changed_since_recorded(case))):
        if (name.endswith(".py") or name == "config.json") and name not in printed:
            raise Broken(
                f"{done}, and not a word of the change in {'a file of code' if name != 'config.json' else name}"
            )


def _changed_since_recorded(case: Case) -> list[str]:
    """Return the files that are not as the record says."""
    try:
        recorded = read_json(case.work / "hc" / RECORD)["files"]
        return [
            name
            for name, expected in recorded.items()
            if (case.work / "hc" / name).is_file() and file_digest(case.work / "hc" / name) != expected
        ]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def compare_loaded(base: Path, converted: Path, place: Path) -> str | None:
    """Return the fault of a conversion beside its base; None without one, or when the base itself does not run.

    place: a folder to log in.
    """
    ended = run(lambda: _compare(base, converted), place / "models", seconds=120)
    if ended.code == BASE_UNLOADED:
        error = ended.stderr.strip().splitlines()[-1]
        return f"the base has not the sizes of its config: {error[:100]}" if any(w in error for w in SIZES) else None
    if ended.code == EQUAL:
        return None
    return FOUND.get(ended.code) or f"comparing it ended with {ended.code}: {ended.stderr.strip()[-200:]}"


@torch.no_grad()
def _compare(base: Path, converted: Path) -> int:
    settings = {"use_safetensors": True, "output_loading_info": True, "trust_remote_code": False}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(base, **settings)
        expected = model(ids()).logits
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {' '.join(str(error).split())}\n".encode(errors="replace"))
        return BASE_UNLOADED
    if report["missing_keys"] or report["unexpected_keys"]:
        return INCOMPLETE
    try:
        logits = AutoModelForCausalLM.from_pretrained(converted, **settings)[0](ids()).logits
    except Exception as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        return UNLOADED
    same = torch.equal(logits.view(torch.uint8), expected.view(torch.uint8))
    return EQUAL if same or torch.equal(logits.nan_to_num(7), expected.nan_to_num(7)) else DIFFERENT
