"""Places for OUT, most of them bad, relative to the folder that holds `base` and `hc`, a conversion of it."""

import os
import random
import shutil
from pathlib import Path

from .values import PRECIOUS


def new(work: Path, pick: random.Random) -> str:
    return "out"


def by_default(work: Path, pick: random.Random) -> None:
    return None


def earlier(work: Path, pick: random.Random) -> str:
    return "hc"


def earlier_with_files_of_the_user(work: Path, pick: random.Random) -> str:
    name = pick.choice(["thesis.txt", "figures/plot.png", "trained.safetensors", ".notes"])
    (work / "hc" / name).parent.mkdir(exist_ok=True)
    (work / "hc" / name).write_bytes(PRECIOUS)
    return "hc"


def a_folder(work: Path, pick: random.Random) -> str:
    (work / "out").mkdir()
    if pick.random() < 0.7:
        (work / "out" / "thesis.txt").write_bytes(PRECIOUS)
    return "out"


def a_file(work: Path, pick: random.Random) -> str:
    (work / "out").write_bytes(PRECIOUS)
    return "out"


def a_link(work: Path, pick: random.Random) -> str:
    (work / "out").symlink_to(
        pick.choice(["hc", "nowhere", "out", "base", "results.json", str(work / "hc"), "../outside"])
    )
    return "out"


def around_the_source(work: Path, pick: random.Random) -> str:
    """OUT is a conversion, and the base lies in it."""
    (work / "base").rename(work / "hc" / "base")
    (work / "base").symlink_to("hc/base")
    return "hc"


def within_the_source(work: Path, pick: random.Random) -> str:
    return pick.choice(["base/out", "base/assets/out", "base/../base/out"])


def odd(work: Path, pick: random.Random) -> str:
    return pick.choice(
        [".", "..", "base", "./base/.", "", "/", "nowhere/out", "results.json/out", "out/", "-out", "/dev/null/x"]
        + ["o" * 245, "o" * 240, "o" * 255, "é" * 120, "a\nb", "\x1b[31mred", "\udcff\udcfe", " ", "²", "~", "a\\b"]
        + [".hidden", ".out.incomplete", "out.incomplete", "*"]
    )


def beside_leftovers(work: Path, pick: random.Random) -> str:
    """What an interrupted conversion left, or something in its place."""
    name = pick.choice([".out.incomplete", "out.replaced-20260101-000000"])
    left = work / name
    match pick.randrange(6):
        case 0:
            left.write_bytes(PRECIOUS)
        case 1:
            left.symlink_to("../outside")
        case 2:
            shutil.copytree(work / "hc", left, symlinks=True)
        case 3:
            left.mkdir()
            (left / "plan.json").write_text(pick.choice(["[", "[]", "{}", "null"]))
            (left / "model-00001-of-00002.safetensors").write_bytes(b"x" * 100)
        case 4:
            left.mkdir()
            os.mkfifo(left / "plan.json")
        case 5:
            left.mkdir()
            (left / "config.json").symlink_to("../../outside/secret.txt")
    return "out"


BAD = (
    *(by_default, earlier, earlier, earlier_with_files_of_the_user, a_folder, a_file, a_link, around_the_source),
    *(within_the_source, odd, odd, beside_leftovers, beside_leftovers),
)
