"""The sizes in a config.json, held against the headers of the weights before anything is made of them."""

from hf_hyperconn.analysis.costs import LAYER
from hf_hyperconn.families import Family

from .checkpoint import Weights

LARGEST = 2**31  # size that a model has


def is_size(value: object) -> bool:
    """Whether a field of a config holds a size that a model can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < LARGEST


def fault_of_sizes(config: dict, weights: Weights, family: Family) -> str | None:
    """How the weights differ from the number of layers, the hidden size and the vocabulary in the config.

    config: with `hidden_size` and `num_hidden_layers`, which are sizes.

    Models with a language model in them often have other names on disk, so what they lack shows when they are loaded.
    """
    prefix, layers, hidden = weights.prefix, config["num_hidden_layers"], config["hidden_size"]
    vocabulary = config.get("vocab_size")
    if vocabulary is not None and not is_size(vocabulary):
        return f"vocab_size is {vocabulary!r:.20}"
    names = [name for name in weights.tensors if name.startswith(weights.stack or "layers.")]
    of_layers = {name: LAYER.match(name[len(prefix) :]) for name in names}
    if unknown := next((name for name, match in of_layers.items() if match is None), None):
        return f"the tensor {unknown!r:.80} is of no layer"
    found = {int(match[1]) for match in of_layers.values() if match}
    absent = next((index for index in range(layers) if index not in found), None)
    if absent is not None:
        return f"num_hidden_layers is {layers}, and there is no layer {absent} (they count from 0)"
    beyond = len(found) - layers
    if beyond not in (0, config.get("num_nextn_predict_layers", 0)):  # these predict further tokens, in training
        return f"num_hidden_layers is {layers}, and there are {len(found)}"
    if "embed_tokens" in family.source.modules and (fault := _of_embedding(config, weights, family)):
        return fault
    for parameter in family.norm if "norm" in family.source.modules else ():
        norm = weights.tensors.get(name := f"{prefix}norm.{parameter}")
        if norm is None and family.of_layers is None:
            return f"the tensor {name} is missing"
        if norm is not None and norm.shape != (hidden,):
            return f"hidden_size is {hidden}, and {name} is {list(norm.shape)}"
    return None


def _of_embedding(config: dict, weights: Weights, family: Family) -> str | None:
    prefix, hidden, vocabulary = weights.prefix, config["hidden_size"], config.get("vocab_size")
    embedding = weights.tensors.get(f"{prefix}embed_tokens.weight")
    if embedding is None:
        return None if family.of_layers else f"the tensor {prefix}embed_tokens.weight is missing"
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        return f"hidden_size is {hidden}, and {prefix}embed_tokens.weight is {list(embedding.shape)}"
    if vocabulary is not None and embedding.shape[0] != vocabulary:
        return f"vocab_size is {vocabulary}, and {prefix}embed_tokens.weight is {list(embedding.shape)}"
    return None
