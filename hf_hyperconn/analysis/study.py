"""A study of a model over text, images or other inputs: all statistics of its connections in one pass."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.utils import tqdm
from transformers import PreTrainedTokenizerBase

from ..errors import HyperConnError
from .observation import Inputs, attention_of, connections_of, in_evaluation_mode, run_observed, with_layers
from .statistics import CoefficientMeter, LayerSimilarity, StreamMeter, StreamStatistics
from .unfolding import ConnectionMatrices, Unfolding, readout_weights

LENGTH = 256  # tokens of a row


@dataclass(frozen=True, repr=False)
class Study:
    """The statistics of one pass. Their meters in `unfolding` and `statistics` explain them."""

    matrices: ConnectionMatrices
    similarity: torch.Tensor
    streams: StreamStatistics
    coefficients: dict[str, torch.Tensor]

    def __repr__(self) -> str:
        sub_layers, streams = self.streams.read_share.shape
        return f"Study({sub_layers} sub-layers, streams={streams}, tokens={self.matrices.tokens})"

    def summary(self) -> str:
        """Return the main figures in a few lines: distances of streams, inputs and reads from a fresh conversion."""
        similarity, gain, inputs = self.streams.similarity, self.streams.gain, self.matrices.inputs
        change = (inputs - torch.ones_like(inputs).tril()).abs()
        reader, writer = divmod(int(change.argmax()), len(inputs))
        reads = _place(reader) if reader < len(gain) else "the output"
        written = _place(writer - 1) if writer else "the embedding"
        lines = [repr(self), f"reads: change most from Pre-Norm, by {change.max():.3g}, where {reads} reads {written}"]
        if len(self.similarity):
            lines.append(f"inputs: median cosine of neighbors at least {self.similarity[:, 1].min():.3f}")
        if not similarity.isnan().all():
            lines.append(
                f"streams: their mean cosine is at least {similarity.min():.3f}, {_place(similarity.argmin())}"
            )
        lines.append(f"mixing: makes a stream at most {gain.max():.3g} times as large, {_place(gain.argmax())}")
        return "\n".join(lines)


def _place(sub_layer: int | torch.Tensor) -> str:
    """Name a sub-layer as the pictures do, from 1."""
    return f"sub-layer {int(sub_layer) + 1}"


@torch.no_grad()
def study(model: Any, batches: Iterable[Inputs], stack: str | None = None) -> Study:
    """Run a model over batches and return the statistics of its connections.

    model: of Transformers or diffusers.
    batches: token ids `[B, S]`, or other arguments by name, as `{"pixel_values": images}`. Padding, where the stack's
        mask `[B, S]` among them is zero, is left out.
    stack: "encoder" or "decoder" of an encoder-decoder; None for the decoder.

    Memory does not grow with the number of batches.

    Raises `HyperConnError` for a model without hyper-connections, without a batch, and for a mask with padding and
    another shape than the positions of the stack.
    """
    part = with_layers(model, stack)
    sub_layers = len(connections_of(part))
    unfolding, similarity = Unfolding(sub_layers, readout_weights(part)), LayerSimilarity(sub_layers)
    streams, coefficients = StreamMeter(sub_layers), CoefficientMeter(sub_layers)

    def see(observation):
        for meter in (unfolding, similarity, streams, coefficients):
            meter.see(observation)

    empty, device = True, getattr(model, "device", None) or next(model.parameters()).device
    with in_evaluation_mode(model):
        for inputs in tqdm(batches, desc="Studying", unit="batch", disable=None):
            empty = not run_observed(model, inputs, see, stack, device) and empty
    if empty:
        raise HyperConnError("there was no batch to study. Give a longer text, or more inputs.")
    if not unfolding.rows[-1].count:
        raise HyperConnError(
            f"not all {sub_layers} sub-layers ran: num_hidden_layers says less than there are. Set it back, or "
            f"remove the layers that don't run."
        )
    matrices = replace(unfolding.result(), attention=attention_of(part))
    return Study(matrices, similarity.result(), streams.result(), coefficients.result())


def batches_of(
    text: str, tokenizer: PreTrainedTokenizerBase, length: int = LENGTH, batch: int = 4, tokens: int = 16_384
) -> list[torch.Tensor]:
    """Return token ids `[batch, length]` of the beginning of a text, at most `tokens` in all.

    A text shorter than `length` tokens gives one batch `[1, S]`.
    """
    ids = tokenizer(text[: 16 * tokens], return_tensors="pt", verbose=False).input_ids[0, :tokens]
    if len(ids) < length:
        return [ids[None]] if len(ids) else []
    rows = ids[: len(ids) // length * length].view(-1, length)
    return list(rows.split(batch))
