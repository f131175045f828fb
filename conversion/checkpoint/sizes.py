"""The sizes in a config.json, held against the headers of the weights before anything is made of them."""

import re

from hf_hyperconn.analysis.costs import LAYER
from hf_hyperconn.families.family import configs_of_stacks

from ..files.reading import is_size
from .checkpoint import Checkpoint
from .checkpoint_files import Weights

A_ROW_A_TOKEN = re.compile(r"[\w.]+\(config\.vocab_size,")  # how most models make their embeddings


def fault_of_sizes(checkpoint: Checkpoint) -> str | None:
    """How the weights differ from the number of layers, the hidden size and the vocabulary in the config.

    The config's `hidden_size` and `num_hidden_layers` must be sizes.

    Models with a language model in them often have other names on disk, so what they lack shows when they are loaded.
    """
    config, family, weights, stacks = checkpoint.config, checkpoint.family, checkpoint.weights, checkpoint.stacks
    vocabulary = config.get("vocab_size")
    if vocabulary is not None and not is_size(vocabulary):
        return f"vocab_size is {vocabulary!r:.20}"
    for each, of_stack, stack in zip(configs_of_stacks(config), family.stacks, stacks, strict=True):
        if found := _of_layers(each, weights, of_stack.source.count, stack):
            return found
    if family.source.inner:  # whose embeddings and norms have names of their own
        return None
    prefix, hidden = _before_the_list(stacks[0]), config["hidden_size"]
    embedding = family.source.modules.get("embed_tokens", "")
    if A_ROW_A_TOKEN.match(embedding) and (found := _of_embedding(checkpoint, prefix)):
        return found
    for parameter in family.norm if "norm" in family.source.modules else ():
        norm = weights.tensors.get(name := f"{prefix}norm.{parameter}")
        if norm is None and family.part is None and not _has_outside(weights, (hidden,)):
            return f"the tensor {name} is missing"
        if norm is not None and norm.shape != (hidden,):
            return f"hidden_size is {hidden}, and {name} is {list(norm.shape)}"
    return None


def more_than_layers(checkpoint: Checkpoint) -> str | None:
    """What the weights hold in their lists of layers besides the config's; Transformers may know better what it is."""
    configs, families = configs_of_stacks(checkpoint.config), checkpoint.family.stacks
    for each, of_stack, stack in zip(configs, families, checkpoint.stacks, strict=True):
        layers, others = _indices(checkpoint.weights, stack)
        if others:
            return f"the tensor {others[0]!r:.80} belongs to no layer"
        if len(layers) > each["num_hidden_layers"]:
            return f"{of_stack.source.count} is {each['num_hidden_layers']}, and there are {len(layers)}"
    return None


def _before_the_list(stack: str) -> str:
    return re.sub(r"[^.]*\.$", "", stack)


def _of_layers(config: dict, weights: Weights, count: str, stack: str) -> str | None:
    layers, (found, _) = config["num_hidden_layers"], _indices(weights, stack)
    absent = next((index for index in range(layers) if index not in found), None)
    return None if absent is None else f"{count} is {layers}, and there is no layer {absent} (they count from 0)"


def _indices(weights: Weights, stack: str) -> tuple[set[int], list[str]]:
    """Which layers there are in a list, and the names in it that are of none."""
    layers, others, prefix = set(), [], _before_the_list(stack)
    for name in weights.tensors:
        if name.startswith(stack):
            match = LAYER.match(name[len(prefix) :])
            layers.add(int(match[1])) if match else others.append(name)
    return layers, others


def _of_embedding(checkpoint: Checkpoint, prefix: str) -> str | None:
    weights, family = checkpoint.weights, checkpoint.family
    hidden, vocabulary = checkpoint.config["hidden_size"], checkpoint.config.get("vocab_size")
    embedding = weights.tensors.get(f"{prefix}embed_tokens.weight")
    if embedding is None:
        shape = (vocabulary, hidden)
        is_elsewhere = family.part or _has_outside(weights, shape) or _is_tied(checkpoint, shape)
        return None if is_elsewhere else f"the tensor {prefix}embed_tokens.weight is missing"
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        return f"hidden_size is {hidden}, and {prefix}embed_tokens.weight is {list(embedding.shape)}"
    if vocabulary is not None and embedding.shape[0] != vocabulary:
        return f"vocab_size is {vocabulary}, and {prefix}embed_tokens.weight is {list(embedding.shape)}"
    return None


def _is_tied(checkpoint: Checkpoint, shape: tuple) -> bool:
    """Whether what reads out is stored for the embeddings, too, in a shape."""
    head = checkpoint.weights.tensors.get("lm_head.weight")
    tied = checkpoint.config.get("tie_word_embeddings", checkpoint.family.source.tied)
    return tied is True and head is not None and head.shape == shape


def _has_outside(weights: Weights, shape: tuple) -> bool:
    """Whether a tensor outside of the layers, and of what reads out, has a shape: on disk it may have another name."""
    return any(
        tensor.shape == shape and LAYER.search(name) is None and not name.startswith("lm_head.")
        for name, tensor in weights.tensors.items()
    )
