"""Watching hyper-connections during training."""

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from .analysis.streams import pair_cosine
from .errors import HyperConnError
from .observation import Inputs, Observation, in_evaluation_mode, observe, run


class HCMonitorCallback(TrainerCallback):
    """Adds to the logs of a Trainer what the hyper-connections do to one and the same text, at every log step.

    Means over sub-layers and tokens, which every integration (TensorBoard, wandb, trackio...) receives with the loss:

    - `hc/stream_cosine`: of pairs of streams that the last sub-layer reads; 1 while all streams are equal.
    - `hc/read_dominance`: share of the most read stream in what a branch reads; 1 when it reads a single one.
    - `hc/write_norm`: norm of b over that of ones.
    - `hc/mix_offdiag`: norm of what A_r moves from one stream to another, over that of the identity.
    - `hc/gain_max`: the largest absolute row or column sum of the product of all A_r (the gain of the mHC paper).
    - `hc/dynamic_scale`: absolute value of the scales of the predicted part.
    - `hc/dynamic_spread`: standard deviation of A and b over tokens.

    tokens: length of the text, the beginning of the first training example.
    per_layer: whether those of a single sub-layer are logged for each k too, as `hc_layers/<name>/<k>`.
    """

    def __init__(self, tokens: int = 64, per_layer: bool = False):
        self.tokens, self.per_layer = tokens, per_layer
        self.trainer: Trainer | None = None
        self.input_ids: torch.Tensor | None = None

    def attach(self, trainer: Trainer) -> "HCMonitorCallback":
        """Add the callback to a trainer, before those that hand the logs on.

        Raises `HyperConnError` when the training examples hold no `input_ids`, or the model no connections to watch.
        """
        example: dict = next(iter(trainer.train_dataset or ()), {})
        if "input_ids" not in example:
            raise HyperConnError(
                f"the first training example holds {', '.join(example) or 'nothing'}, and no input_ids to watch the "
                "connections on. Tokenise the dataset before it is given to the Trainer."
            )
        self.input_ids = torch.as_tensor(example["input_ids"]).flatten()[None, : self.tokens]
        model: Any = trainer.model
        with observe(model, lambda seen: None):
            self.trainer = trainer
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and "loss" in logs:
            figures = self.measure()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def measure(self) -> dict[str, float]:
        """The figures for the model as it is now."""
        trainer: Any = self.trainer
        ids: Any = self.input_ids
        with trainer.compute_loss_context_manager():
            return hc_figures(trainer.model, ids.to(trainer.args.device), self.per_layer)


@torch.no_grad()
def hc_figures(model: nn.Module, inputs: Inputs, per_layer: bool = False) -> dict[str, float]:
    """The figures of `HCMonitorCallback`, for a training loop of one's own.

    model: a hyper-connection model, also inside a wrapper.
    inputs: a text, `[B, S]` token ids, or what else the model takes, by name, as `{"pixel_values": images}`.
    per_layer: as for `HCMonitorCallback`.

    Raises `HyperConnError` for a model without streams.
    """
    meter = _Meter()
    with in_evaluation_mode(model), observe(model, meter.see):
        run(model, inputs)
    return meter.figures(per_layer)


class _Meter:
    """Sums up the observations of one forward."""

    def __init__(self):
        self.layers: list[dict[str, torch.Tensor]] = []
        self.product: torch.Tensor | None = None
        self.cosine: torch.Tensor | None = None

    def see(self, seen: Observation) -> None:
        n, reads, mixes = seen.beta.shape[-1], seen.reads.abs(), seen.mixes
        identity = torch.eye(n, dtype=mixes.dtype, device=mixes.device)
        scales = [p.abs().mean() for name, p in seen.connection.named_parameters() if name.endswith("scale")]
        tokens = torch.cat([seen.alpha, seen.beta.unsqueeze(-1)], dim=-1).flatten(0, -3)
        self.layers.append(
            {
                "read_dominance": (reads.amax(-2) / reads.sum(-2)).mean(),
                "write_norm": seen.beta.norm(dim=-1).mean() / n**0.5,
                "mix_offdiag": (mixes * (1 - identity)).norm(dim=(-2, -1)).mean() / n**0.5,
                "dynamic_spread": tokens.std(0).mean(),
                **({"dynamic_scale": torch.stack(scales).mean()} if scales else {}),
            }
        )
        step = mixes.transpose(-1, -2)
        self.product = step if self.product is None else step @ self.product
        if n > 1:
            self.cosine = pair_cosine(seen.streams).mean()

    def figures(self, per_layer: bool) -> dict[str, float]:
        product: Any = self.product
        sums = product.abs().sum(-1).amax(-1), product.abs().sum(-2).amax(-1)
        values = {f"hc/{name}": torch.stack([layer[name] for layer in self.layers]).mean() for name in self.layers[0]}
        values["hc/gain_max"] = torch.maximum(*sums).mean()
        if self.cosine is not None:
            values["hc/stream_cosine"] = self.cosine
        if per_layer:
            values |= {f"hc_layers/{name}/{k}": v for k, layer in enumerate(self.layers) for name, v in layer.items()}
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
