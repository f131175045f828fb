"""`hf-hyperconn plot`: pictures of a model's connections."""

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.families.reading.classes import FamilyName
from hf_hyperconn.kinds import kind_of

from ..checkpoint.checkpoint import Checkpoint, open_conversion
from ..files.writing import leads_out, replace_file

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

PICTURES = ("connections", "similarity", "streams", "coefficients")
SHEET = "sheet"
SUFFIXES = (".png", ".pdf", ".svg")
CHARACTERS = 2**20  # of a text, more than are read by a model


def draw(
    folder: str,
    kind: str = "all",
    *,
    text: str | None = None,
    against: str | None = None,
    out: str | None = None,
    stack: str | None = None,
) -> list[Path]:
    """Draw a checkpoint's connections: a file for each kind of picture, or one sheet with all.

    folder: a converted checkpoint.
    kind: one of `PICTURES`, or "all".
    text: a text file to run the model on; None to unfold the static weights alone.
    against: the base, a folder or Hub id, whose similarity is drawn beside.
    out: a file, or for all pictures a folder; by default `figures` inside `folder`.
    stack: "encoder" or "decoder" of an encoder-decoder; None for the decoder.

    Returns the written files. They replace files of the same names.

    Raises `HyperConnError` when the checkpoint can't be read or has no streams, or the text or the base does not fit.
    Raises it also when `out` can't be written, or matplotlib is missing.
    """
    if not os.path.isdir(folder):
        raise HyperConnError(f"there is no folder '{folder}'. Give the folder of a checkpoint with hyper-connections.")
    checkpoint = open_conversion(folder)
    if not kind_of(checkpoint.config).has_matrices:
        raise HyperConnError(
            f"'{folder}' has connection {checkpoint.config['connection']!r}, where no matrices read and mix streams: "
            f"nothing to draw."
        )
    if text is None and kind not in ("connections", "all"):
        raise HyperConnError(f"a picture of {kind} needs a model that runs over text. Give --text FILE.")
    pictures = (kind,) if kind != "all" else PICTURES if text else ("connections",)
    files = _files(Path(folder), pictures, kind == "all", out)
    if against is not None and "similarity" not in pictures:
        raise HyperConnError(
            f"--against {against} requires the picture of similarity. Give --text FILE, and --kind similarity or all."
        )
    for path in files.values():
        _refuse_place(path)
    beginning = None if text is None else read_beginning(text)
    try:
        import matplotlib
    except ImportError as error:
        raise HyperConnError(
            "matplotlib, which draws the pictures, is not installed. Run: pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    if beginning is None:
        figures = _static_figures(checkpoint, stack)
    else:
        figures = _figures(checkpoint, beginning, against, stack)
    for name, path in files.items():
        _write(figures[name](), path)
    return list(files.values())


def read_beginning(file: str) -> str:
    """Read the beginning of a text file, at most `CHARACTERS`.

    Raises `HyperConnError` for a missing file, and for a file without text.
    """
    try:
        if not Path(file).is_file():
            raise HyperConnError(f"there is no text file '{file}'. Give another.")
        with open(file, encoding="utf-8") as opened:
            text = opened.read(CHARACTERS)
    except UnicodeDecodeError as error:
        raise HyperConnError(f"'{file}' is not UTF-8 text ({error.reason}). Give a text file.") from error
    except OSError as error:
        raise HyperConnError(
            f"can't read the text '{file}': {error.strerror}. Allow that, or give another."
        ) from error
    if not text.strip():
        raise HyperConnError(f"the text file '{file}' is empty. Give one with a few sentences.")
    return text


def _files(folder: Path, pictures: tuple[str, ...], may_be_folder: bool, out: str | None) -> dict[str, Path]:
    """Choose the file of each picture; several pictures in one file make a `SHEET`."""
    if out is not None and Path(out).suffix in SUFFIXES:
        return {pictures[0] if len(pictures) == 1 else SHEET: Path(out)}
    place = folder / "figures" if out is None else Path(out)
    if out is not None and not may_be_folder:
        raise HyperConnError(f"out must end with one of {', '.join(SUFFIXES)} (got '{out}'). Choose another name.")
    if out is None and leads_out(folder, place):
        raise HyperConnError(
            f"'{place}' is a link to '{os.path.realpath(place)}', outside the checkpoint's folder. Remove it, or say "
            f"with -o where the pictures should go."
        )
    if os.path.isfile(place):
        raise HyperConnError(
            f"'{place}' is a file, and no picture. Give a folder, or a file that ends with one of "
            f"{', '.join(SUFFIXES)}, which gets all pictures on one sheet."
        )
    return {name: place / f"{name}.png" for name in pictures}


def _refuse_place(path: Path) -> None:
    """Refuse a path where no file can be written; its folders are made later."""
    if os.path.isdir(path):
        raise HyperConnError(f"'{path}' is a folder, where a picture should go. Choose another file with -o.")
    place = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if not os.path.isdir(place):
        raise HyperConnError(f"'{place}' is a file, not a folder. Choose another place with -o.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise HyperConnError(f"no permission to write in '{place}'. Choose another place with -o.")


def _static_figures(checkpoint: Checkpoint, stack: str | None) -> "dict[str, Callable[[], Figure]]":
    from hf_hyperconn.analysis import plots
    from hf_hyperconn.analysis.unfolding import unfold_static

    from .models import load_connections

    matrices = unfold_static(load_connections(checkpoint), stack)
    return {"connections": lambda: plots.connections_figure(matrices)}


def _figures(
    checkpoint: Checkpoint, text: str, against: str | None, stack: str | None
) -> "dict[str, Callable[[], Figure]]":
    from hf_hyperconn import convert_model
    from hf_hyperconn.analysis import plots
    from hf_hyperconn.analysis.study import study

    from .models import load_model, load_tokenizer, open_base_of

    base = None if against is None else open_base_of(against, checkpoint)
    tokenizer, model = load_tokenizer(checkpoint.source), load_model(checkpoint)
    inputs = _inputs(checkpoint, model, tokenizer, text)
    result = study(model, inputs, stack)
    del model
    similarity = {_label(Path(os.path.realpath(checkpoint.name)).name): result.similarity}
    if base is not None:
        tower = FamilyName.of(checkpoint.family.model_type).stack
        one_stream = convert_model(load_model(base), hc_mult=1, connection="shc", stack=tower)
        name = _label(Path(os.path.realpath(base.name)).name)
        label = _label(base.name) if name in similarity else name
        similarity[label] = study(one_stream, inputs, stack).similarity
    return {
        "connections": lambda: plots.connections_figure(result.matrices),
        "similarity": lambda: plots.similarity_figure(similarity),
        "streams": lambda: plots.streams_figure(result.streams),
        "coefficients": lambda: plots.coefficients_figure(result.coefficients),
        SHEET: lambda: plots.sheet_figure(result, similarity),
    }


def _inputs(
    checkpoint: Checkpoint, model: "PreTrainedModel", tokenizer: Any, text: str
) -> "list[dict[str, torch.Tensor]]":
    """Return the batches of a text; refuse a model without tokens, and a tokenizer with more tokens."""
    from hf_hyperconn.analysis.study import LENGTH

    from .models import tokens_of

    name = checkpoint.name
    if (main_input := checkpoint.family.observed(model).main_input_name) != "input_ids":
        raise HyperConnError(
            f"the model in '{name}' takes {main_input}, not text. Draw its static weights, without --text, or run it "
            f"on its own inputs by hf_hyperconn.analysis.study (docs/analysis.md)."
        )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LENGTH
    batches = tokens_of(text, checkpoint.source, tokenizer, min(LENGTH, longest))
    embeddings: Any = model.get_input_embeddings()
    tokens, largest = embeddings.num_embeddings, max((int(ids.max()) for ids in batches), default=0)
    if largest >= tokens:
        raise HyperConnError(
            f"the tokenizer in '{name}' gives a token {largest}, and the model has {tokens} from 0. Copy the "
            f"tokenizer's files from its base."
        )
    names = ("input_ids", "decoder_input_ids") if model.config.is_encoder_decoder else ("input_ids",)
    return [dict.fromkeys(names, ids) for ids in batches]


def _label(name: str) -> str:
    """Return a name that matplotlib shows as it is, not as a formula."""
    return name.replace("$", r"\$")


def _write(figure: "Figure", path: Path) -> None:
    from matplotlib import pyplot as plt

    picture = BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=150)
    plt.close(figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, picture.getvalue())
    except OSError as error:
        raise HyperConnError(f"can't write '{path}': {error.strerror}. Fix that, or give another -o.") from error
