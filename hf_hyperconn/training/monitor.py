"""Figures of hyper-connections during training, for the logs."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from ..analysis.observation import Inputs, Observation, in_evaluation_mode, observe, run_observed, with_layers
from ..analysis.statistics import pair_cosine
from ..errors import HyperConnError
from ..wrappers import outermost_model

IGNORED = -100  # as a label


class HCMonitorCallback(TrainerCallback):
    """Adds figures of hyper-connections on one fixed text to the logs of a Trainer, at every log step.

    Means over sub-layers and tokens, which every integration (TensorBoard, wandb, trackio...) receives with the loss:

    - `hc/stream_cosine`: cosine of pairs of streams before the last sub-layer; 1 while all streams are equal.
    - `hc/read_dominance`: share of the most read stream in a branch's reads; 1 for a single stream.
    - `hc/write_norm`: norm of b, divided by the norm of ones.
    - `hc/mix_offdiag`: norm of the off-diagonal part of A_r, divided by the norm of the identity.
    - `hc/gain_max`: the largest absolute row or column sum of the product of all A_r (the gain of the mHC paper).
    - `hc/dynamic_scale`: absolute value of the scales of the predicted part.
    - `hc/dynamic_spread`: standard deviation of A and b over tokens.

    For an encoder-decoder they are the decoder's. `attach` adds the callback to a trainer.

    tokens: number of tokens of the text, the beginning of the first training example.
    per_layer: whether to log also each sub-layer's figures, as `hc_layers/<name>/<k>`.
    """

    def __init__(self, tokens: int = 64, per_layer: bool = False):
        self.tokens, self.per_layer = tokens, per_layer
        self.trainer: Trainer | None = None
        self.inputs: dict[str, torch.Tensor] = {}

    def attach(self, trainer: Trainer) -> "HCMonitorCallback":
        """Add the callback to a trainer, before callbacks that hand the logs on.

        It reads the first example of the training data; a data set that can be read only once then lacks it. It runs
        the model on the example if the model is on its device already. Random states stay unchanged.

        Raises `HyperConnError` when the training examples contain no `input_ids`, or the model can't run on them alone
        or has no connections to observe.
        """
        model: Any = trainer.model
        self.inputs = first_example(trainer, self.tokens)
        with observe(with_layers(model), lambda seen: None):
            self.trainer = trainer
        if {parameter.device.type for parameter in model.parameters()} == {trainer.args.device.type}:
            self._try(model)
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args, state, control, **kwargs):
        if self.trainer is None:
            raise HyperConnError(
                "HCMonitorCallback was added to a trainer without what it watches. Leave it out of `callbacks` and "
                "`add_callback`, and call `HCMonitorCallback().attach(trainer)`."
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and "loss" in logs:
            figures = self.measure()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def measure(self) -> dict[str, float]:
        """Return the figures for the model as it is now."""
        trainer: Any = self.trainer
        inputs = {name: values.to(trainer.args.device) for name, values in self.inputs.items()}
        with trainer.compute_loss_context_manager():
            return hc_figures(trainer.model, inputs, self.per_layer)

    def _try(self, model: nn.Module) -> None:
        """Refuse an example that the model can't run on."""
        try:
            self.measure()
        except HyperConnError:
            raise
        except Exception as error:
            held = ", ".join(f"{name} {[*values.shape]}" for name, values in self.inputs.items())
            raise HyperConnError(
                f"{type(model).__name__} can't run on {held} of the first training example ({error}). Tokenize the "
                "dataset as for training, with labels for an encoder-decoder, or train without the monitor."
            ) from error


@torch.no_grad()
def hc_figures(
    model: nn.Module, inputs: Inputs, per_layer: bool = False, stack: str | None = None
) -> dict[str, float]:
    """Return the figures of `HCMonitorCallback`, for a training loop of one's own.

    model: a hyper-connection model, also inside a wrapper.
    inputs: a text, `[B, S]` token ids, or other arguments by name, as `{"pixel_values": images}`. Padding is left
        out, as by `study`.
    per_layer: as for `HCMonitorCallback`.
    stack: "encoder" or "decoder" of an encoder-decoder; None for the decoder.

    Raises `HyperConnError` for a model without streams, and for inputs of padding alone.
    """
    meter = _Meter()
    with in_evaluation_mode(model):
        has_run = run_observed(model, inputs, meter.see, stack)
    if not has_run:
        raise HyperConnError("the mask of the inputs leaves no token. Give at least one that it is not zero for.")
    return meter.figures(per_layer)


class _Meter:
    """Sums up the observations of one forward."""

    def __init__(self):
        self.layers: list[dict[str, torch.Tensor]] = []
        self.product: Any = None  # of the mixes so far
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
                "dynamic_spread": tokens.std(0, correction=0).mean(),
                **({"dynamic_scale": torch.stack(scales).mean()} if scales else {}),
            }
        )
        mix = mixes.transpose(-1, -2)
        self.product = mix if seen.place == 0 else mix @ self.product.to(mix.device)
        if n > 1:
            self.cosine = pair_cosine(seen.streams).mean()

    def figures(self, per_layer: bool) -> dict[str, float]:
        product: Any = self.product
        sums = product.abs().sum(-1).amax(-1), product.abs().sum(-2).amax(-1)
        layers = [{name: value.to(product.device) for name, value in layer.items()} for layer in self.layers]
        values = {f"hc/{name}": torch.stack([layer[name] for layer in layers]).mean() for name in layers[0]}
        values["hc/gain_max"] = torch.maximum(*sums).mean()
        if self.cosine is not None:
            values["hc/stream_cosine"] = self.cosine
        if per_layer:
            values |= {f"hc_layers/{name}/{k}": v for k, layer in enumerate(layers) for name, v in layer.items()}
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def first_example(trainer: Trainer, tokens: int) -> dict[str, torch.Tensor]:
    """Return the first `tokens` token ids `[1, S]` of the first training example, without padding.

    For an encoder-decoder also its `decoder_input_ids`, or labels to make them from.

    Raises `HyperConnError` when the example holds no `input_ids`.
    """
    data: Any = trainer.train_dataset
    with kept_random_state():
        example: Any = next(iter(data if data is not None else ()), {})
    if "input_ids" not in example:
        raise HyperConnError(
            f"the first training example holds {', '.join(example) or 'nothing'}, and no input_ids to watch the "
            "connections on. Tokenize the dataset before it is given to the Trainer."
        )
    model: Any = trainer.model
    names = ["input_ids"]
    if getattr(getattr(outermost_model(model), "config", None), "is_encoder_decoder", False):
        names += [name for name in ("decoder_input_ids", "labels") if name in example][:1]
    return {name: _without_padding(example, name)[None, :tokens] for name in names}


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Keep the current states of the random generators of Python, numpy and torch (CPU)."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _without_padding(example: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return an entry of an example where its mask is not zero, `[S]`; of labels the learned ones, if any."""
    values = torch.as_tensor(example[name]).flatten()
    if name == "labels":
        learned = values[values != IGNORED]
        return learned if len(learned) else values
    mask = example.get(name.replace("input_ids", "attention_mask"))
    mask = None if mask is None else torch.as_tensor(mask).flatten()
    return values if mask is None or mask.shape != values.shape else values[mask != 0]
