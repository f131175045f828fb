"""How a run's model differs at its start from the usual one: its weights, its depth, and which of it is trained."""

import copy
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_hyperconn import convert_model, hc_parameters
from hf_hyperconn.models.attention_residuals import AttentionReadout, AttentionResidual, Values

OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight")
FIXED = ("reads", "mixes", "writes", "first half")


@torch.no_grad()
def divide_projections(model: nn.Module) -> None:
    """Divide the output projections, as those that the model drew itself were."""
    for module in model.modules():
        if hasattr(module, "hc_output_projection"):
            getattr(module, module.hc_output_projection).mul_(model.config.hc_mult**-0.5)


@torch.no_grad()
def keep_embedding_alone(model: nn.Module) -> None:
    """Let no sub-layer write the side streams at the start."""
    for name, parameter in model.named_parameters():
        if name.endswith("static_beta"):
            parameter[1:] = 0


def norm_embedding(model: nn.Module) -> None:
    """Let a norm follow the embedding; a tied output has none."""
    embedding = model.get_input_embeddings()
    embedding.norm = nn.RMSNorm(model.config.hidden_size, eps=model.config.rms_norm_eps)
    embedding.register_forward_hook(lambda module, args, output: module.norm(output))


def norm_side_streams(model: PreTrainedModel) -> None:
    """Let the side streams of the history start hold the embedding divided by its root mean square, without weights.

    Stream 0 holds the embedding itself, and no branch reads the others at the start, so that a conversion stays exact.
    """
    connection, eps = model.model.layers[0].sub_layers[0][0], model.config.rms_norm_eps

    def expand_streams(hidden_states: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], eps=eps)
        return torch.stack([hidden_states, *[normed] * (connection.hc_mult - 1)], dim=-2)

    connection.expand_streams = expand_streams


def skip_from_embedding(model: PreTrainedModel) -> None:
    """Let each layer read a x + b x_0, of its input and the embedding; a is 1 and b is 0 at the start.

    Source: modded-nanogpt and nanochat, which have both factors for each layer.

    Raises `ValueError` for a model with connections, whose layers read streams.
    """
    if hasattr(model.config, "hc_mult"):
        raise ValueError(f"skips must be of a plain model (got {type(model).__name__}).")
    kept = {}
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: kept.update(embedding=output))

    def skip(layer: nn.Module, args: tuple) -> tuple:
        hidden_states, *others = args
        return layer.skip[0] * hidden_states + layer.skip[1] * kept["embedding"], *others

    for layer in model.model.layers:
        layer.skip = nn.Parameter(torch.tensor([1.0, 0.0]))
        layer.register_forward_pre_hook(skip)


def fix_part(model: PreTrainedModel, part: str) -> None:
    """Keep a part of static connections at its start: reads, mixes, writes, or all of the first half of the layers."""
    half = model.config.num_hidden_layers // 2
    of_first = tuple(f"model.layers.{index}." for index in range(half))
    for name, parameter in hc_parameters(model).items():
        if (part == "first half" and name.startswith(of_first)) or (part == "writes" and name.endswith("static_beta")):
            parameter.requires_grad_(False)
        elif part in ("reads", "mixes") and name.endswith("static_alpha"):  # the first column reads
            is_fixed = torch.arange(parameter.shape[1]).eq(0) == (part == "reads")
            parameter.register_hook(lambda gradient, is_fixed=is_fixed: gradient.masked_fill(is_fixed, 0))


@torch.no_grad()
def add_copies(base: PreTrainedModel, layers: int, fields: dict | None) -> PreTrainedModel:
    """Return a base of that many layers, with the same outputs: some layers have a copy that adds nothing yet.

    fields: of the connections, which write the copies' outputs with zero. With None, the copies' output projections
        are zero (LLaMA-Pro, arXiv 2401.02415).
    """
    before, given = base.config.num_hidden_layers, base.state_dict()
    every = before // (layers - before)
    sources = sorted([*range(before), *range(every - 1, before, every)])
    config = copy.deepcopy(base.config)
    config.num_hidden_layers, config.layer_types = layers, None
    weights = {name: value for name, value in given.items() if ".layers." not in name}
    for index, source in enumerate(sources):
        layer = base.get_decoder().layers[source].state_dict()
        weights |= {f"model.layers.{index}.{name}": value for name, value in layer.items()}
    model, zero = type(base)(config), OUTPUT_PROJECTIONS
    model.load_state_dict(weights)
    if fields is not None:
        model, zero = convert_model(model, **fields), ("static_beta",)
    for layer, (source, before_it) in zip(model.model.layers[1:], pairwise(sources), strict=True):
        for name, parameter in layer.named_parameters():
            if source == before_it and name.endswith(zero):
                parameter.zero_()
    return model


class Added:
    """A read that adds a sum of earlier outputs to the residual stream: h = r + g Σ p_i v_i (arXiv 2605.18855).

    The softmax p has one more source, of zeros. The paper has no gate g. It starts at zero here, so that h equals r.
    """

    def add_gate(self) -> None:
        self.gate = nn.Parameter(torch.zeros(()))

    def read(self, streams: Values) -> torch.Tensor:
        values = torch.cat(streams.values, dim=-2)
        scores = (values @ self.query) * torch.rsqrt(values.square().mean(-1) + self.eps)
        weights = nn.functional.pad(scores, (1, 0)).softmax(-1)[..., 1:]
        return streams.residual + self.gate * (weights.unsqueeze(-2) @ values).squeeze(-2)


class AddedResidual(Added, AttentionResidual):
    def forward(self, streams: Values) -> tuple[torch.Tensor, Values]:
        return self.read(streams), Values(streams.residual, streams.values, self.opens_block)


class AddedReadout(Added, AttentionReadout):
    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        return self.read(Values.of_streams(streams))


def add_to_stream(model: PreTrainedModel) -> None:
    """Let attention residuals add to the residual stream."""
    classes = {AttentionResidual: AddedResidual, AttentionReadout: AddedReadout}
    for module in model.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
            module.add_gate()
