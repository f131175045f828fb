"""The metadata that the card of a conversion inherits from the card of its base."""

import json
from itertools import islice
from pathlib import Path

from hf_hyperconn.errors import CardError

from .readme import LARGEST_CARD, read_card
from .source import Source, fetch

README = "README.md"
# fields of the base's metadata: of its terms, and others that are inherited
LICENCE_FIELDS = ("license", "license_name", "license_link")
GATED = "extra_gated_"
INHERITED = ("language", "tags")
LARGEST_INHERITED = 100_000  # values, written out; those of YAML can stand for more of themselves

# tags of the base's files, what runs them and where they come from, which are not true of a conversion
NOT_INHERITED = {
    *("pytorch", "tf", "jax", "flax", "rust", "safetensors", "onnx", "gguf", "mlx", "openvino", "transformers"),
    *("text-generation-inference", "endpoints_compatible", "autotrain_compatible", "vllm", "nemo", "unsloth"),
    *("generated_from_trainer", "merge", "mergekit", "facebook", "meta"),
}


def is_term(field: str) -> bool:
    """Tell whether a field of a card's metadata is of its licence, or of the form for access."""
    return field in LICENCE_FIELDS or field.startswith(GATED)


def read_base_card(source: Source) -> dict:
    """Return the metadata that a conversion of `source` inherits; empty when no metadata can be read.

    Raises `UnsupportedCheckpointError` when the Hub can't be reached for it.
    """
    return _inherited(source.path(README)) if 0 < source.files.get(README, 0) <= LARGEST_CARD else {}


def fetch_base_card(model: str, commit: str | None) -> dict:
    """Return the metadata that a conversion of a model on the Hub inherits.

    Raises `UnsupportedCheckpointError` when the Hub refuses or can't be reached, and the card is not in the cache.
    """
    path = fetch(model, README, commit)
    return {} if path is None else _inherited(path)


def licence_fields(metadata: dict) -> dict:
    """Return the fields of the licence in a card's metadata that are text."""
    return {name: value for name, value in metadata.items() if name in LICENCE_FIELDS and _is_text(value)}


def inheritable(metadata: dict) -> dict:
    """Return the part of a base's metadata that its conversion inherits; nothing when JSON can't hold it."""
    kept = {name: value for name, value in metadata.items() if name in INHERITED or name.startswith(GATED)}
    kept |= licence_fields(metadata)
    if isinstance(kept.get("tags"), list):
        kept["tags"] = [tag for tag in kept["tags"] if isinstance(tag, str) and tag.lower() not in NOT_INHERITED]
    else:
        kept.pop("tags", None)
    encoder = json.JSONEncoder(default=str, skipkeys=True)  # YAML knows dates, JSON does not
    try:
        return json.loads("".join(islice(encoder.iterencode(kept), LARGEST_INHERITED)))
    except (ValueError, RecursionError):  # a mapping that holds itself, or so much that it is cut off
        return {}


def _inherited(path: Path) -> dict:
    try:
        return inheritable(read_card(path, lenient=True).data.to_dict())
    except CardError:
        return {}


def _is_text(value) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
