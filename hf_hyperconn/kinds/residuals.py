"""Kinds without matrices: attention residuals, skips from the embedding, Keel and ResiDual.

Keel and ResiDual norm the residual stream itself, so models with them are trained from scratch.
"""

import numpy as np

from .kind import NORM, Joined, Kind, Readout, count_sub_layers, field_value, float32, largest_change, sub_layers_of

READ = 6  # operations on each value of a token that is read: its mean square, its score, its share


class AttentionReadout(Readout):
    """`AttentionReadout`: the last values, read as by a sub-layer."""

    def shapes(self, config, norm):
        return {"query": (config["hidden_size"],)}

    def values(self, config, norm):
        return float32(query=np.zeros(config["hidden_size"]))

    def flops(self, config):
        values = 1 + -(-count_sub_layers(config) // field_value(config, "hc_block"))
        return (READ * values + 1) * config["hidden_size"]


class AttentionResidual(Kind):
    """`AttentionResidual`; the number of values grows with the depth, by one with each block of sub-layers."""

    name, title, paper = "attnres", "attention residuals", "2603.15031"
    has_matrices = extends_hyper_connections = False
    readout = AttentionReadout()

    def suffix(self, n):
        return "AttnRes"

    def streams(self, config):
        block = field_value(config, "hc_block")
        apart = "every sub-layer before it" if block == 1 else f"blocks of {block} sub-layers before it"
        return f"each sub-layer reads the residual stream and, by a softmax, the outputs of {apart}"

    def between_layers(self, config):
        return "the outputs of earlier sub-layers"

    def rows_between_layers(self, config):
        return None

    def settings(self, config):
        block = field_value(config, "hc_block")
        return ["full" if block == 1 else f"blocks of {block} sub-layers"]

    def shapes(self, config, norm):
        return {"query": (config["hidden_size"],)}

    def values(self, config, norm, k):
        return float32(query=np.zeros(config["hidden_size"]))

    def drift(self, stored, initial, config):
        """Return, as `dynamic`, the largest score of a value of mean square 1."""
        return 0.0, 0.0, float(np.linalg.norm(stored["query"]))

    def flops(self, config):
        # beside the reads, a sub-layer adds its output to the residual stream and to its block
        connections = count_sub_layers(config)
        values = connections + _opened(connections - 1, 1, field_value(config, "hc_block"))
        return (READ * values + 3 * connections) * config["hidden_size"]

    def kept_for_backward(self, config):
        # the residual stream and the values between layers, and one more value within each; the readout's, too
        layers, of_layer = config["num_hidden_layers"], len(sub_layers_of(config))
        return 1 + (1 + of_layer) * layers + _opened(layers, of_layer, field_value(config, "hc_block")), 0


class Keel(Kind):
    """`KeelConnection`; around sub-layer 0 there is no norm, around the first two no scale."""

    name, title, paper = "keel", "Keel's connections", "2601.19895"
    has_matrices = extends_hyper_connections = False
    readout = Joined()

    def shapes(self, config, norm):
        return {f"norm.{name}": (config["hidden_size"],) for name in norm}

    def parameters(self, config, norm):
        return (count_sub_layers(config) - 1) * len(self.shapes(config, norm)) * config["hidden_size"]

    def flops(self, config):
        k = count_sub_layers(config)
        return (k + (k - 2) + NORM * (k - 1)) * config["hidden_size"]

    def kept_for_backward(self, config):
        # differentiated by autograd, in float32
        return 0, (count_sub_layers(config) - 1) * (2 * config["hidden_size"] + 1)


class NormedReadout(Readout):
    """`DualReadout`: one stream and the other, normed."""

    def shapes(self, config, norm):
        return {f"norm.{name}": (config["hidden_size"],) for name in norm}

    def flops(self, config):
        return (NORM + 1) * config["hidden_size"]


class Dual(Kind):
    """`DualResidual`."""

    name, title, paper = "dual", "ResiDual's connections", "2304.14802"
    has_matrices = extends_hyper_connections = False
    readout = NormedReadout()

    def shapes(self, config, norm):
        return {f"norm.{name}": (config["hidden_size"],) for name in norm}

    def flops(self, config):
        # two additions and a norm
        return count_sub_layers(config) * (NORM + 2) * config["hidden_size"]

    def kept_for_backward(self, config):
        # differentiated by autograd, in float32
        return 0, count_sub_layers(config) * (3 * config["hidden_size"] + 1)


class Skip(Kind):
    """`EmbeddingSkip`, which no paper describes."""

    name, title = "skip", "skips from the embedding"
    link = "https://github.com/KellerJordan/modded-nanogpt"
    has_matrices = extends_hyper_connections = False
    readout = Joined()

    def suffix(self, n):
        return "Skip"

    def streams(self, config):
        return "before each layer the residual stream is scaled, and adds a multiple of the normed embedding"

    def between_layers(self, config):
        return "the residual stream and the normed embedding"

    def settings(self, config):
        return ["of the normed embedding"]

    def has_parameters(self, config, k):
        return k % len(sub_layers_of(config)) == 0

    def shapes(self, config, norm):
        return {"factors": (2,)}

    def values(self, config, norm, k):
        return float32(factors=(1, 0)) if self.has_parameters(config, k) else {}

    def parameters(self, config, norm):
        return 2 * config["num_hidden_layers"]

    def drift(self, stored, initial, config):
        return largest_change(stored, initial, "factors"), 0.0, 0.0

    def flops(self, config):
        # two products and an addition a layer, an addition a sub-layer, and the norm of the embedding
        layers = config["num_hidden_layers"]
        return (3 * layers + count_sub_layers(config) + NORM - 1) * config["hidden_size"]

    def kept_for_backward(self, config):
        # both streams between layers, and the norm in float32
        return 2 * config["num_hidden_layers"], config["hidden_size"] + 1


def _opened(count: int, step: int, block: int) -> int:
    """Return the sum of ceil(i step / block) over i = 1 .. count: blocks opened after i times `step` sub-layers."""

    def within(steps: int) -> int:
        return steps + max(0, steps - block // step)

    periods, rest = divmod(count, block)
    before = step * (block * periods * (periods - 1) // 2 + periods * rest)
    return before + periods * within(block) + within(rest)
