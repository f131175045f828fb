"""`hf-hyperconn plot`: pictures of what a model's connections do."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.errors import HyperConnError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("connections", "similarity", "streams", "coefficients")
SUFFIXES = (".png", ".pdf", ".svg")


def draw(
    folder: str, kind: str = "all", *, text: str | None = None, against: str | None = None, out: str | None = None
) -> list[Path]:
    """Draw a checkpoint's connections; one file for each kind of picture.

    folder: a converted checkpoint.
    kind: one of `KINDS`, or "all".
    text: a text file that the model runs over; without one, the static weights alone are unfolded.
    against: its base, a folder or Hub id, whose similarity is drawn beside.
    out: for one kind a file, for all a folder; by default `figures` inside `folder`.

    Returns the files that were written.

    Raises `HyperConnError` when the checkpoint has no hyper-connections, there is no text for a kind that needs one,
    `out` does not fit, or matplotlib is missing.
    """
    if not (Path(folder) / "config.json").is_file():
        raise HyperConnError(f"'{folder}' is no checkpoint: it has no config.json. Give the folder of a conversion.")
    if text is not None and not Path(text).is_file():
        raise HyperConnError(f"there is no text file '{text}'.")
    if text is None and kind not in ("connections", "all"):
        raise HyperConnError(f"a picture of {kind} needs a model that runs over text. Give --text FILE.")
    files = _files(Path(folder), kind if text or kind != "all" else "connections", kind == "all", out)
    try:
        import matplotlib
    except ImportError as error:
        raise HyperConnError(
            "pictures are drawn by matplotlib, which is missing. Run: pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figures = _figures(folder, text, against if "similarity" in files else None)
    for name, path in files.items():
        figure = figures[name]()
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.incomplete{path.suffix}")
        try:
            figure.savefig(beside, dpi=150)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        plt.close(figure)
    return list(files.values())


def _files(folder: Path, kind: str, is_folder: bool, out: str | None) -> dict[str, Path]:
    kinds = KINDS if kind == "all" else (kind,)
    if out is None or is_folder:
        place = folder / "figures" if out is None else Path(out)
        if place.suffix in SUFFIXES or place.is_file():
            raise HyperConnError(f"'{out}' is a file; all kinds go to a folder. Give one, or a single --kind.")
        return {name: place / f"{name}.png" for name in kinds}
    if Path(out).suffix not in SUFFIXES:
        raise HyperConnError(f"'{out}' should end with one of {', '.join(SUFFIXES)}.")
    return {kind: Path(out)}


def _figures(folder: str, text: str | None, against: str | None) -> "dict[str, Callable[[], Figure]]":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_hyperconn import convert_model
    from hf_hyperconn.analysis import plots
    from hf_hyperconn.analysis.study import batches_of, study
    from hf_hyperconn.analysis.unfolding import unfold_static
    from hf_hyperconn.registration import register_auto_classes

    register_auto_classes()
    model = AutoModelForCausalLM.from_pretrained(folder)
    if text is None:
        return {"connections": lambda: plots.connections_figure(unfold_static(model))}
    batches = batches_of(Path(text).read_text(encoding="utf-8"), AutoTokenizer.from_pretrained(folder))
    found = study(model, batches)
    similarity = {Path(folder).name: found.similarity}
    if against is not None:
        base = AutoModelForCausalLM.from_pretrained(against)
        similarity[Path(against).name] = study(convert_model(base, hc_mult=1, connection="shc"), batches).similarity
    return {
        "connections": lambda: plots.connections_figure(found.matrices),
        "similarity": lambda: plots.similarity_figure(similarity),
        "streams": lambda: plots.streams_figure(found.streams),
        "coefficients": lambda: plots.coefficients_figure(found.coefficients),
    }
