"""Kinds that norm the residual stream itself: models with them are trained from scratch."""

from .kind import NORM, Joined, Kind, Readout, sub_layers


class Keel(Kind):
    """`KeelConnection`; around sub-layer 0 there is no norm, around the first two no scale."""

    name, title, paper = "keel", "Keel's connections", "2601.19895"
    has_matrices = extends_hyper_connections = False
    readout = Joined()

    def shapes(self, config, norm):
        return {f"norm.{name}": (config["hidden_size"],) for name in norm}

    def parameters(self, config, norm):
        return (sub_layers(config) - 1) * len(self.shapes(config, norm)) * config["hidden_size"]

    def flops(self, config):
        k = sub_layers(config)
        return (k + (k - 2) + NORM * (k - 1)) * config["hidden_size"]

    def kept(self, config):
        # differentiated by autograd, in float32
        return 0, (sub_layers(config) - 1) * (2 * config["hidden_size"] + 1)


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
        return sub_layers(config) * (NORM + 2) * config["hidden_size"]

    def kept(self, config):
        # differentiated by autograd, in float32
        return 0, sub_layers(config) * (3 * config["hidden_size"] + 1)
