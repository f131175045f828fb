"""One case: a checkpoint, what was done to it, and the command that meets it; always the same for a seed."""

import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .mutations import companions, config, header, index, outs, readme, record, tree
from .mutations.values import SECRET, Target, not_json, read_json, set_somewhere, sparse, write_json
from .starts import CONVERSIONS, TRAINED, base_of

DRIVERS = {"convert": 40, "verify": 16, "card": 14, "push": 12, "inspect": 10, "load_hc": 8}
GROUPS = {
    **{"config": config.ALL, "header": header.ALL, "index": index.ALL, "companions": companions.ALL},
    **{"readme": readme.ALL, "record": record.ALL, "tree": tree.ALL, "saved": (header.hc_metadata,)},
}
# which group is mutated how often
OF_A_BASE = {"config": 28, "header": 24, "index": 10, "companions": 14, "readme": 8, "tree": 16}
OF_A_CONVERSION = {"config": 20, "header": 18, "index": 6, "companions": 12, "readme": 12, "record": 16, "tree": 16}
OF_A_FILE = {"header": 50, "saved": 40, "tree": 10}
OF_A_CARD = {**OF_A_CONVERSION, "readme": 40}
MUTATIONS = (0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 4)


@dataclass(frozen=True)
class Case:
    """A case, with its files made.

    place: its folder: `work`, where the command runs, `outside`, which is nobody's business, `home`, `tmp` and `hub`.
    said: what was done to the files. arguments: of the command line; for `load_hc` the file's name alone.
    out: OUT of a conversion, as it was given.
    start: which of the valid conversions `work/hc` was.
    looks: whether, when all goes well, the models are loaded and compared.
    """

    seed: int
    driver: str
    place: Path
    said: tuple[str, ...]
    arguments: tuple[str, ...]
    start: str
    out: str | None = None
    looks: bool = False

    @property
    def work(self) -> Path:
        return self.place / "work"


def make(seed: int, starts: Path, place: Path, driver: str | None = None) -> Case:
    """Return the case of a seed, in the empty folder `place`; `driver` asks for one command instead of any."""
    pick = random.Random(seed)
    any_driver = pick.choices(list(DRIVERS), DRIVERS.values())[0]
    driver = driver or any_driver
    start = pick.choice([*CONVERSIONS, TRAINED])
    fill(place, starts, start)
    said, arguments, out = COMMANDS[driver](place, pick)
    return Case(seed, driver, place, tuple(said), tuple(arguments), start, out, looks=pick.random() < 0.3)


def fill(place: Path, starts: Path, start: str) -> None:
    """Put a conversion, its base and all that commands need into a case's place."""
    work = place / "work"
    shutil.copytree(starts / "bases" / base_of(start), work / "base")
    shutil.copytree(starts / "conversions" / start, work / "hc")
    for name in ("results.json", "hyper_connections.safetensors"):
        shutil.copy(starts / name, work / name)
    for name in ("outside", "home", "tmp", "hub"):
        (place / name).mkdir()
    (place / "outside" / "secret.txt").write_bytes(SECRET)


def _mutate(place: Path, name: str, groups: dict[str, int], pick: random.Random) -> list[str]:
    """Mutate a checkpoint once or several times; of what doesn't apply any more nothing is said."""
    target, said = Target(place / "work" / name, place / "outside"), []
    for _ in range(pick.choice(MUTATIONS)):
        group = pick.choices(list(groups), groups.values())[0]
        mutation = pick.choice(GROUPS[group])
        try:
            said.append(f"{name}: {mutation(target, pick)}")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error):
            continue
    return said


def _convert(place: Path, pick: random.Random):
    work, said = place / "work", []
    out = "out"
    if pick.random() < 0.25:
        variant = pick.choice(outs.BAD)
        out = variant(work, pick)
        said.append(f"OUT {out!r:.60}: {variant.__name__.replace('_', ' ')}")
    if not said or pick.random() < 0.3:
        said += _mutate(place, "base", OF_A_BASE, pick)
    arguments = ["convert", "base", *([] if out is None else ["--", out] if out.startswith("-") else [out])]
    options = [
        "-n",
        pick.choice(["1", "2", "4", "3"]),
        "--connection",
        pick.choice(["dhc", "dhc", "shc", "mhc", "frac"]),
    ]
    options += ["--verify", pick.choice(["structure"] * 8 + ["full", "auto", "off"])]
    options += pick.choice([[], [], [], ["--link", "hard"], ["--link", "symlink"]])
    options += ["--force"] * (pick.random() < (0.5 if out != "out" else 0.1))
    options += ["--dry-run"] * (pick.random() < 0.05) + pick.choice([[], [], ["--json"], ["-q"]])
    return said, [arguments[0], *options, *arguments[1:]], out or f"base-HCx{options[1]}"


def _verify(place: Path, pick: random.Random):
    said = _mutate(place, "hc", OF_A_CONVERSION, pick)
    if pick.random() < 0.15:
        said += _mutate(place, "base", OF_A_BASE, pick)
    against = pick.choice([[], ["--against", "base"], ["--against", "base"]])
    mode = pick.choice(["structure"] * 4 + ["full" if against else "auto", "auto"])
    return said, ["verify", "hc", *against, "--mode", mode, *pick.choice([[], ["--json"]])], None


def _inspect(place: Path, pick: random.Random):
    name = pick.choice(["hc"] * 5 + ["base"])
    said = _mutate(place, name, OF_A_CONVERSION if name == "hc" else OF_A_BASE, pick)
    return said, ["inspect", name, *pick.choice([[], ["--json"]])], None


def _card(place: Path, pick: random.Random):
    options = ["--update"] * (pick.random() < 0.5)
    said = []
    if pick.random() < 0.3:
        options += ["--results", "results.json"]
        said += _spoil_results(place, pick)
    if not said or pick.random() < 0.5:
        said += _mutate(place, "hc", OF_A_CARD, pick)
    return said, ["card", "hc", *options, *pick.choice([[], ["--json"]])], None


def _spoil_results(place: Path, pick: random.Random) -> list[str]:
    path = place / "work" / "results.json"
    match pick.randrange(5):
        case 0:
            return [not_json(path, pick)]
        case 1:
            path.unlink()
            return [f"results.json is {tree.make_special(path, pick)}"]
        case 2:
            sparse(path)
            return ["results.json is huge"]
        case _:
            content = read_json(path)
            said = set_somewhere(content, pick)
            write_json(path, content)
            return [f"results.json: {said}"]


def _push(place: Path, pick: random.Random):
    said = _mutate(place, "hc", OF_A_CONVERSION, pick)
    options = pick.choice([[], [], ["--private"], ["--revision", "new"], ["--dry-run"], ["--json"]])
    return said, ["push", "hc", "me/case", *options], None


def _load_hc(place: Path, pick: random.Random):
    name = "hyper_connections.safetensors"
    folder = place / "work" / "connections"
    folder.mkdir()
    (place / "work" / name).rename(folder / name)
    return _mutate(place, "connections", OF_A_FILE, pick), ["connections"], None


COMMANDS: dict[str, Callable] = {
    **{"convert": _convert, "verify": _verify, "inspect": _inspect, "card": _card, "push": _push, "load_hc": _load_hc}
}
