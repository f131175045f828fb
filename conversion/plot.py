"""`hf-hyperconn plot`: pictures of what a model's connections do."""

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.families.reading.classes import FamilyName
from hf_hyperconn.kinds import kind_of

from .checkpoint.checkpoint import open_conversion
from .checkpoint.source import CONFIG, LocalSource
from .files.writing import leads_out, replace_file
from .inspection import inspect_checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("connections", "similarity", "streams", "coefficients")
SHEET = "sheet"
SUFFIXES = (".png", ".pdf", ".svg")
CHARACTERS = 2**20  # of a text, more than are studied


def draw(
    folder: str,
    kind: str = "all",
    *,
    text: str | None = None,
    against: str | None = None,
    out: str | None = None,
    stack: str | None = None,
) -> list[Path]:
    """Draw a checkpoint's connections; one file for each kind of picture, or one sheet with all of them.

    folder: a converted checkpoint.
    kind: one of `KINDS`, or "all".
    text: a text file that the model runs over; without one, the static weights alone are unfolded.
    against: its base, a folder or Hub id, whose similarity is drawn beside.
    out: a file, for all kinds also a folder; by default `figures` inside `folder`.
    stack: of an encoder-decoder "encoder" or "decoder"; None for the decoder.

    Returns the files that were written; what had their names is replaced.

    Raises `HyperConnError` when the checkpoint can't be read or has no streams, the text or the base does not fit,
    nothing can be written to `out`, or matplotlib is missing.
    """
    if not os.path.isdir(folder) or CONFIG not in LocalSource(Path(folder)).files:
        raise HyperConnError(f"'{folder}' is not a checkpoint: it has no {CONFIG}. Give the folder of a conversion.")
    if text is None and kind not in ("connections", "all"):
        raise HyperConnError(f"a picture of {kind} needs a model that runs over text. Give --text FILE.")
    kinds = (kind,) if kind != "all" else KINDS if text else ("connections",)
    files = _files(Path(folder), kinds, kind == "all", out)
    if against is not None and "similarity" not in kinds:
        raise HyperConnError(
            f"--against {against} is only used for the picture of similarity, which was not asked for. "
            f"Give --text FILE, and --kind similarity or all."
        )
    for path in files.values():
        _check_place(path)
    written = None if text is None else read_text(text)
    found = inspect_checkpoint(folder)
    if not kind_of(found.fields).has_matrices:
        raise HyperConnError(
            f"'{folder}' has connection {found.connection!r}, where no matrices read and mix streams: nothing to draw."
        )
    try:
        import matplotlib
    except ImportError as error:
        raise HyperConnError(
            "matplotlib, which draws the pictures, is not installed. Run: pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figures = _static_figures(folder, stack) if written is None else _figures(folder, written, against, stack)
    for name, path in files.items():
        figure = figures[name]()
        picture = BytesIO()
        figure.savefig(picture, format=path.suffix[1:], dpi=150)
        plt.close(figure)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, picture.getvalue())
        except OSError as error:
            raise HyperConnError(f"can't write '{path}': {error.strerror}. Fix that, or give another -o.") from error
    return list(files.values())


def read_text(file: str) -> str:
    """The beginning of a text file, as much as could be studied.

    Raises `HyperConnError` when there is none, or it holds no text.
    """
    try:
        if not Path(file).is_file():
            raise HyperConnError(f"there is no text file '{file}'.")
        with open(file, encoding="utf-8") as opened:
            text = opened.read(CHARACTERS)
    except UnicodeDecodeError as error:
        raise HyperConnError(f"'{file}' is not UTF-8 text ({error.reason}). Give a text file.") from error
    except OSError as error:
        raise HyperConnError(f"can't read the text '{file}': {error.strerror}.") from error
    if not text.strip():
        raise HyperConnError(f"the text file '{file}' is empty. Give one with a few sentences.")
    return text


def _files(folder: Path, kinds: tuple[str, ...], may_be_folder: bool, out: str | None) -> dict[str, Path]:
    """The files to write, by the kind of picture; several kinds in one file are `SHEET`."""
    if out is not None and Path(out).suffix in SUFFIXES:
        return {kinds[0] if len(kinds) == 1 else SHEET: Path(out)}
    place = folder / "figures" if out is None else Path(out)
    if out is not None and not may_be_folder:
        raise HyperConnError(f"'{out}' should end with one of {', '.join(SUFFIXES)}.")
    if out is None and leads_out(folder, place):
        raise HyperConnError(
            f"'{place}' is a link to '{os.path.realpath(place)}', outside the checkpoint's folder. Remove it, or say "
            f"with -o where the pictures should go."
        )
    if os.path.isfile(place):
        raise HyperConnError(
            f"'{place}' is a file, and no picture. Give a folder, or a file that ends with one of "
            f"{', '.join(SUFFIXES)}, which gets all kinds on one sheet."
        )
    return {name: place / f"{name}.png" for name in kinds}


def _check_place(path: Path) -> None:
    """Raises `HyperConnError` when no file can be written to `path`; its folders are made later."""
    if os.path.isdir(path):
        raise HyperConnError(f"'{path}' is a folder, where a picture should go. Choose another file with -o.")
    place = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if not os.path.isdir(place):
        raise HyperConnError(f"'{place}' is a file, not a folder. Choose another place with -o.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise HyperConnError(f"no permission to write in '{place}'. Choose another place with -o.")


def _static_figures(folder: str, stack: str | None) -> "dict[str, Callable[[], Figure]]":
    from hf_hyperconn.analysis import plots
    from hf_hyperconn.analysis.unfolding import unfold_static

    from .plot_models import load_connections

    matrices = unfold_static(load_connections(LocalSource(Path(folder))), stack)
    return {"connections": lambda: plots.connections_figure(matrices)}


def _figures(folder: str, text: str, against: str | None, stack: str | None) -> "dict[str, Callable[[], Figure]]":
    from hf_hyperconn import convert_model
    from hf_hyperconn.analysis import plots
    from hf_hyperconn.analysis.study import LENGTH, study

    from .plot_models import load_model, load_tokenizer, open_base, tokens_of

    checkpoint = open_conversion(folder)
    source, family = checkpoint.source, checkpoint.family
    base = None if against is None else open_base(against, checkpoint)
    tokenizer, model = load_tokenizer(source), load_model(source)
    if (taken := family.observed(model).main_input_name) != "input_ids":
        raise HyperConnError(
            f"the model in '{folder}' takes {taken}, not text. Draw its static weights, without --text, or run it on "
            f"what it takes by hf_hyperconn.analysis.study (docs/analysis.md)."
        )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LENGTH
    batches = tokens_of(text, source, tokenizer, min(LENGTH, longest))
    embeddings: Any = model.get_input_embeddings()
    tokens, largest = embeddings.num_embeddings, max((int(ids.max()) for ids in batches), default=0)
    if largest >= tokens:
        raise HyperConnError(
            f"the tokenizer in '{folder}' gives a token {largest}, and the model has {tokens} from 0. Copy the "
            f"tokenizer's files from its base."
        )
    decoded = ("input_ids", "decoder_input_ids") if model.config.is_encoder_decoder else ("input_ids",)
    inputs = [dict.fromkeys(decoded, ids) for ids in batches]
    found = study(model, inputs, stack)
    del model
    similarity = {_label(Path(os.path.realpath(folder)).name): found.similarity}
    if base is not None and against is not None:
        one_stream = convert_model(
            load_model(base), hc_mult=1, connection="shc", stack=FamilyName.of(family.model_type).stack
        )
        name = _label(Path(os.path.realpath(against)).name)
        similarity[_label(against) if name in similarity else name] = study(one_stream, inputs, stack).similarity
    return {
        "connections": lambda: plots.connections_figure(found.matrices),
        "similarity": lambda: plots.similarity_figure(similarity),
        "streams": lambda: plots.streams_figure(found.streams),
        "coefficients": lambda: plots.coefficients_figure(found.coefficients),
        SHEET: lambda: plots.sheet_figure(found, similarity),
    }


def _label(name: str) -> str:
    """A name as matplotlib shows it as it is, not as a formula."""
    return name.replace("$", r"\$")
