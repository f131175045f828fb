"""The files of a checkpoint: its config, its index, the headers and tensors of its weights."""

from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hf_hyperconn.analysis.costs import LANGUAGE_MODEL, LAYER, TOWER, weights_of_tower
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import Family, InnerModel

from ..files import reading
from ..files.reading import TensorInfo
from ..files.writing import leads_out
from .source import CONFIG, LocalSource, Source

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SAVE = "save it with save_pretrained, and convert the result."
# weights in their place, by pattern, and the remedy
OTHER_FORMATS = {
    "*.gguf": f"Load it with Transformers (gguf_file=...), {SAVE}",
    "*.h5": f"Load it with Transformers 4 (from_tf=True), {SAVE}",
    "*.msgpack": f"Load it with Transformers 4 (from_flax=True), {SAVE}",
    "consolidated*.safetensors": "Transformers doesn't read that format: give a checkpoint in its own.",
    "model.*.safetensors*": f"Load it with Transformers (variant=...), {SAVE}",
}


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint: its files, in order, and their tensors by name."""

    files: tuple[str, ...]
    tensors: dict[str, TensorInfo]

    @property
    def parameters(self) -> int:
        """Count the stored elements."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Count the bytes of all stored elements."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def has_layers(self) -> bool:
        """Tell whether there is a layer 0."""
        return bool(self._lists)

    def stack_prefixes(self, family: Family) -> tuple[str, ...]:
        """Return the part of the tensors' names before a layer's index, for each list of layers of a family.

        In a model with towers, these are the layers of its language model, unless others have the connections.
        A list without a layer 0 gets the name that it has in a base model.
        """
        if (tower := family.source.tower) is not None:
            return (self._of_tower(tower),)

        def how_unlike(stack: str) -> tuple:
            *kind, name = _how_unlike_the_decoder(stack)
            return *kind, not name.startswith(f"{family.source.in_heads}."), name

        stacks, lists = [], self._lists
        for place in family.source.places:
            named = [name for name in lists if f".{name}".endswith(f".{place}.")]
            named = named or [name for name in lists if name.endswith(f"_{place}.")]  # as ..._decoder.layers
            if not named and not family.source.inner:
                named = [*lists]
            stacks.append(min(named, key=how_unlike, default=f"{place}."))
        return tuple(stacks)

    def _of_tower(self, tower: InnerModel) -> str:
        """Return the beginning of the tensors' names in a tower's list of layers, by its name on disk."""
        place, lists = f"{tower.source.stack}.", self._lists
        named = filter(weights_of_tower(tower, lists), lists)
        return min(named, key=lambda name: (not name.endswith(place), name), default=f"{tower.attribute}.{place}")

    @property
    def _lists(self) -> set[str]:
        """Return the part of the tensors' names before a layer's index, for every list with a layer 0."""
        return {name[: match.start(1)] for name in self.tensors if (match := LAYER.search(name)) and match[1] == "0"}

    @property
    def dtype(self) -> str:
        """Return the dtype of most elements, as safetensors spells it."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
        return max(sizes, key=sizes.__getitem__)


def read_weights(source: Source) -> Weights:
    """Find and check the weights of a checkpoint. Of a Hub repo only headers are fetched.

    Raises `UnsupportedCheckpointError` when there are no safetensors weights, or they are incomplete or corrupt.
    """
    if WEIGHTS in source.files:  # Transformers, too, prefers the single file
        return Weights((WEIGHTS,), source.header(WEIGHTS))
    if INDEX not in source.files:
        raise UnsupportedCheckpointError(_no_weights(source))
    weight_map = read_weight_map(source)
    files = tuple(sorted(set(weight_map.values())))
    for name in files:
        fault = None
        if Path(name).name != name or name in ("", ".", ".."):
            fault = f"{name!r}, which is not a file beside it. Do not trust this checkpoint."
        elif not name.endswith(".safetensors"):
            fault = f"{name!r}, and only files in .safetensors are read. Do not trust this checkpoint."
        elif name not in source.files:
            fault = f"{name}, which is missing. Copy or download the checkpoint again."
        if fault:
            raise UnsupportedCheckpointError(f"{INDEX} of {source.name!r} names {fault}")
    tensors = {}
    for name in files:
        header = source.header(name)
        absent = [tensor for tensor, file in weight_map.items() if file == name and tensor not in header]
        if absent:
            raise UnsupportedCheckpointError(
                f"{INDEX} of {source.name!r} places {absent[0]} in {name}, which does not hold it. "
                f"Copy or download the checkpoint again."
            )
        tensors.update(header)
    return Weights(files, tensors)


@contextmanager
def open_tensors(source: Source, weights: Weights, framework: str) -> Iterator[Callable[[str], Any]]:
    """Yield a function that reads one tensor by its name, for "torch" or "numpy"; each file is opened once."""
    from safetensors import safe_open

    with ExitStack() as stack:
        opened = {}

        def read(name: str) -> Any:
            file = weights.tensors[name].file
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(source.path(file), framework=framework))
            return opened[file].get_tensor(name)

        yield read


def read_raw_config(source: Source) -> dict:
    """Return the checkpoint's config.json as it is written.

    Raises `UnsupportedCheckpointError` when there is none, or it is not a JSON object.
    """
    if CONFIG not in source.files:
        if "adapter_config.json" in source.files:
            raise UnsupportedCheckpointError(_adapter(source))
        if "model_index.json" in source.files:
            raise UnsupportedCheckpointError(_of_diffusers(source))
        raise UnsupportedCheckpointError(
            f"{source.name!r} has no {CONFIG}; give a checkpoint in the format of Transformers."
        )
    config = read_json_object(source, CONFIG)
    with reading.open_regular(source.path(CONFIG)) as file:
        if file.read(len(BOM_UTF8)) == BOM_UTF8:
            raise UnsupportedCheckpointError(
                f"{CONFIG} of {source.name!r} begins with a byte-order mark, and Transformers can't read it. Save it "
                f"as UTF-8 without one."
            )
    if "_diffusers_version" in config:
        raise UnsupportedCheckpointError(_of_diffusers(source))
    return config


def _of_diffusers(source: Source) -> str:
    return (
        f"{source.name!r} is a model or a pipeline of diffusers, not of Transformers. Load it with diffusers, and "
        f"give its transformer to hf_hyperconn.convert_model."
    )


def refuse_other_weights(source: Source, config: dict) -> None:
    """Refuse a checkpoint from which Transformers loads weights besides `WEIGHTS` or `INDEX`.

    Raises `UnsupportedCheckpointError`.
    """
    if "adapter_config.json" in source.files:
        raise UnsupportedCheckpointError(
            f"{source.name!r} holds an adapter (adapter_config.json) beside its weights, and Transformers loads both. "
            f"Merge it into them (merge_and_unload), or remove adapter_config.json."
        )
    if (named := config.get("transformers_weights")) is not None:
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {source.name!r} names a weight file of its own (transformers_weights={named!r:.40}). Save "
            f"it again with Transformers, and remove that."
        )


def read_weight_map(source: Source) -> dict[str, str]:
    """Return the file of each tensor by its name, from the index.

    Raises `UnsupportedCheckpointError` for an index without a map of them.
    """
    weight_map = read_json_object(source, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UnsupportedCheckpointError(f"{INDEX} of {source.name!r} has no weight_map. Download it again.")
    return weight_map


def refuse_links_out(source: Source, names: Iterable[str]) -> None:
    """Raise `UnsupportedCheckpointError` when one of these files is a link out of its folder.

    In a snapshot of the Hub's cache, links to files of the cache are allowed.
    """
    if not isinstance(source, LocalSource):
        return
    folder = source.folder([])
    for name in names:
        if name in source.files and leads_out(folder, folder / name):
            raise UnsupportedCheckpointError(
                f"'{folder / name}' is a link to '{source.path(name)}', outside the folder. Put a file in its place, "
                f"or remove it."
            )


def read_json_object(source: Source, name: str) -> dict:
    """Return the object in a JSON file of the checkpoint.

    Raises `UnsupportedCheckpointError` when it holds no JSON object, or is a link out of the folder.
    """
    content = read_json_value(source, name)
    if not isinstance(content, dict):
        raise UnsupportedCheckpointError(f"{name} of {source.name!r} is not a JSON object. Download it again.")
    return content


def read_json_value(source: Source, name: str) -> Any:
    """Return the value in a JSON file of the checkpoint.

    Raises `UnsupportedCheckpointError` when it is not JSON, or is a link out of the folder.
    """
    refuse_links_out(source, [name])
    if source.files[name] > reading.LARGEST_JSON:  # and isn't downloaded
        raise UnsupportedCheckpointError(
            f"{name} of {source.name!r} holds {source.files[name]:,} bytes, and up to {reading.LARGEST_JSON:,} are "
            f"read. Do not trust this checkpoint."
        )
    path = source.path(name)
    try:
        return reading.read_json(path)
    except OSError as error:
        raise UnsupportedCheckpointError(
            f"can't read {name} of {source.name!r}: {error.strerror}. Fix that, or give another checkpoint."
        ) from error
    except ValueError as error:
        raise UnsupportedCheckpointError(
            f"{name} of {source.name!r} is not JSON ({error}). Download it again."
        ) from error


def _how_unlike_the_decoder(stack: str) -> tuple:
    """Order stacks by name: the language model first, towers last."""
    return bool(TOWER.search(stack)), not LANGUAGE_MODEL.search(stack), not stack.endswith("layers."), stack


def _no_weights(source: Source) -> str:
    if "adapter_config.json" in source.files:
        return _adapter(source)
    if pickles := [name for name in source.files if name.endswith(PICKLES)]:
        return (
            f"{source.name!r} has no safetensors weights, only {min(pickles)}, and pickles are not read. "
            f"Save it again with Transformers (save_pretrained writes safetensors) and convert that."
        )
    for pattern, remedy in OTHER_FORMATS.items():
        if names := [name for name in source.files if fnmatch(name, pattern)]:
            return f"{source.name!r} has no {WEIGHTS} or {INDEX}, only {min(names)}. {remedy}"
    return f"{source.name!r} has no weights: neither {WEIGHTS} nor {INDEX}. Give a complete checkpoint."


def _adapter(source: Source) -> str:
    return (
        f"{source.name!r} is an adapter (adapter_config.json), not a model. "
        f"Merge it into its base (merge_and_unload), save that and convert it."
    )
