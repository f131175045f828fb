"""What the card of a conversion takes over from the card of its base."""

import json
from itertools import islice
from pathlib import Path

from hf_hyperconn.errors import CardError

from .readme import LARGEST_CARD, read_card
from .source import Source, fetch

README = "README.md"
# of the base's metadata: its terms, and what is inherited besides
LICENCE_FIELDS = ("license", "license_name", "license_link")
GATED = "extra_gated_"
INHERITED = ("language", "tags")
LARGEST = 100_000  # values, written out; those of YAML can stand for more of themselves

# tags that say what the base's files are and what runs them, or where they come from, which is not so of a conversion
NOT_INHERITED = {
    *("pytorch", "tf", "jax", "flax", "rust", "safetensors", "onnx", "gguf", "mlx", "openvino", "transformers"),
    *("text-generation-inference", "endpoints_compatible", "autotrain_compatible", "vllm", "nemo", "unsloth"),
    *("generated_from_trainer", "merge", "mergekit", "facebook", "meta"),
}


def is_term(field: str) -> bool:
    """Whether a field of a card's metadata is of its licence, or of what is asked for before access is given."""
    return field in LICENCE_FIELDS or field.startswith(GATED)


def read_base_card(source: Source) -> dict:
    """The metadata that a conversion of `source` inherits; empty when its card has none, or none that can be read.

    Raises `UnsupportedCheckpointError` when the Hub can't be reached for it.
    """
    if not 0 < source.files.get(README, 0) <= LARGEST_CARD:
        return {}
    return _inherited(source.path(README))


def fetch_base_card(model: str, commit: str | None) -> dict:
    """The same for a base on the Hub that may not be there in full.

    Raises `UnsupportedCheckpointError` when the Hub refuses or can't be reached, and the card is not in the cache.
    """
    path = fetch(model, README, commit)
    return {} if path is None else _inherited(path)


def licence_fields(metadata: dict) -> dict:
    """What the metadata of a card says of the licence, where that is text."""
    return {name: value for name, value in metadata.items() if name in LICENCE_FIELDS and _is_text(value)}


def inheritable(metadata: dict) -> dict:
    """What of the metadata of a base's card its conversion inherits; nothing when JSON can't hold that."""
    kept = {name: value for name, value in metadata.items() if name in INHERITED or name.startswith(GATED)}
    kept |= licence_fields(metadata)
    if isinstance(kept.get("tags"), list):
        kept["tags"] = [tag for tag in kept["tags"] if isinstance(tag, str) and tag.lower() not in NOT_INHERITED]
    else:
        kept.pop("tags", None)
    encoder = json.JSONEncoder(default=str, skipkeys=True)  # YAML knows dates, JSON does not
    try:
        return json.loads("".join(islice(encoder.iterencode(kept), LARGEST)))
    except (ValueError, RecursionError):  # a mapping that holds itself, or so much that it is cut off
        return {}


def _inherited(path: Path) -> dict:
    try:
        return inheritable(read_card(path, lenient=True).data.to_dict())
    except CardError:
        return {}


def _is_text(value) -> bool:
    """Whether a value is text, or a list of texts."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
