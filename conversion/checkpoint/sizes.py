"""The sizes in a config.json, compared with the headers of the weights before a model is made."""

import re
from collections.abc import Iterator

from hf_hyperconn.analysis.costs import LAYER
from hf_hyperconn.families.family import configs_of_stacks

from ..files.reading import is_size
from .checkpoint import Checkpoint

A_ROW_A_TOKEN = re.compile(r"[\w.]+\(config\.vocab_size,")  # how most models make their embeddings


def fault_of_sizes(checkpoint: Checkpoint) -> str | None:
    """Say how the weights differ from the number of layers, the hidden size and the vocabulary in the config.

    The config's `hidden_size` and `num_hidden_layers` must be sizes. Models with an inner language model often have
    other names on disk: their missing tensors show when they are loaded.
    """
    config, family, tensors = checkpoint.config, checkpoint.family, checkpoint.weights.tensors
    vocabulary = config.get("vocab_size")
    if vocabulary is not None and not is_size(vocabulary):
        return f"vocab_size is {vocabulary!r:.20}"
    for field, layers, indices, _ in _lists_of_layers(checkpoint):
        absent = next((index for index in range(layers) if index not in indices), None)
        if absent is not None:
            return f"{field} is {layers}, and there is no layer {absent} (they count from 0)"
    if family.source.inner:  # whose embeddings and norms have names of their own
        return None
    prefix, hidden = _parent(checkpoint.stack_prefixes[0]), config["hidden_size"]
    embedding = family.source.modules.get("embed_tokens", "")
    if A_ROW_A_TOKEN.match(embedding) and (fault := _fault_of_embedding(checkpoint, f"{prefix}embed_tokens.weight")):
        return fault
    for parameter in family.norm if "norm" in family.source.modules else ():
        norm = tensors.get(name := f"{prefix}norm.{parameter}")
        if norm is None and family.part is None and not _has_outside(checkpoint, (hidden,)):
            return f"the tensor {name} is missing"
        if norm is not None and norm.shape != (hidden,):
            return f"hidden_size is {hidden}, and {name} is {list(norm.shape)}"
    return None


def more_than_layers(checkpoint: Checkpoint) -> str | None:
    """Say which tensors lists of layers contain besides the config's layers; Transformers may know them."""
    for field, layers, indices, others in _lists_of_layers(checkpoint):
        if others:
            return f"the tensor {others[0]!r:.80} belongs to no layer"
        if len(indices) > layers:
            return f"{field} is {layers}, and there are {len(indices)}"
    return None


def _lists_of_layers(checkpoint: Checkpoint) -> Iterator[tuple[str, int, set[int], list[str]]]:
    """Yield field and number of layers of each list by the config, its indices, and its tensors of no layer."""
    configs, families = configs_of_stacks(checkpoint.config), checkpoint.family.stacks
    for config, family, stack in zip(configs, families, checkpoint.stack_prefixes, strict=True):
        indices, others = set(), []
        for name in checkpoint.weights.tensors:
            if name.startswith(stack):
                match = LAYER.match(name.removeprefix(_parent(stack)))
                indices.add(int(match[1])) if match else others.append(name)
        yield family.source.count, config["num_hidden_layers"], indices, others


def _parent(stack: str) -> str:
    """Return the part of a stack's name before its list of layers."""
    return re.sub(r"[^.]*\.$", "", stack)


def _fault_of_embedding(checkpoint: Checkpoint, name: str) -> str | None:
    hidden, vocabulary = checkpoint.config["hidden_size"], checkpoint.config.get("vocab_size")
    embedding = checkpoint.weights.tensors.get(name)
    if embedding is None:
        shape = (vocabulary, hidden)
        is_elsewhere = checkpoint.family.part or _has_outside(checkpoint, shape) or _is_tied(checkpoint, shape)
        return None if is_elsewhere else f"the tensor {name} is missing"
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        return f"hidden_size is {hidden}, and {name} is {list(embedding.shape)}"
    if vocabulary is not None and embedding.shape[0] != vocabulary:
        return f"vocab_size is {vocabulary}, and {name} is {list(embedding.shape)}"
    return None


def _is_tied(checkpoint: Checkpoint, shape: tuple) -> bool:
    """Tell whether the head's weight of this shape serves as the embeddings, too."""
    head = checkpoint.weights.tensors.get("lm_head.weight")
    tied = checkpoint.config.get("tie_word_embeddings", checkpoint.family.source.tied)
    return tied is True and head is not None and head.shape == shape


def _has_outside(checkpoint: Checkpoint, shape: tuple) -> bool:
    """Tell whether a tensor outside of layers and head has this shape, whatever its name on disk."""
    return any(
        tensor.shape == shape and LAYER.search(name) is None and not name.startswith("lm_head.")
        for name, tensor in checkpoint.weights.tensors.items()
    )
