"""Running a model over text and asking everything of it in one pass."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from huggingface_hub.utils import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import HyperConnError
from ..families import usual_names
from ..kinds import sub_layers
from ..observation import in_evaluation_mode, observe
from .coefficients import CoefficientMeter
from .similarity import LayerSimilarity
from .streams import StreamMeter, StreamStatistics
from .unfolding import ConnectionMatrices, Unfolding, readout_of


@dataclass(frozen=True)
class Study:
    """What one pass over text shows of a model; each field is explained where it is made."""

    matrices: ConnectionMatrices
    similarity: torch.Tensor
    streams: StreamStatistics
    coefficients: dict[str, torch.Tensor]


@torch.no_grad()
def study(model: PreTrainedModel, batches: Iterable[torch.Tensor]) -> Study:
    """Run a model over batches of token ids `[B, S]` and gather what its connections do.

    Memory does not grow with the number of batches.

    Raises `HyperConnError` for a model without hyper-connections, or when there is no batch.
    """
    connections = sub_layers(usual_names(model.config.to_dict()))
    unfolding, similarity = Unfolding(connections, readout_of(model)), LayerSimilarity(connections)
    streams, coefficients = StreamMeter(connections), CoefficientMeter(connections)

    def see(observation):
        for meter in (unfolding, similarity, streams, coefficients):
            meter.see(observation)

    empty = True
    with in_evaluation_mode(model), observe(model, see):
        for ids in tqdm(batches, desc="Studying", unit="batch", disable=None):
            model(input_ids=ids.to(model.device), use_cache=False)
            empty = False
    if empty:
        raise HyperConnError("there was no text to study. Give a longer one.")
    return Study(unfolding.result(), similarity.result(), streams.result(), coefficients.result())


def batches_of(
    text: str, tokenizer: PreTrainedTokenizerBase, length: int = 256, batch: int = 4, tokens: int = 16_384
) -> list[torch.Tensor]:
    """Token ids `[batch, length]` of the beginning of a text, at most `tokens` in all; the rest is left out.

    A text shorter than `length` tokens gives one batch `[1, S]`.
    """
    ids = tokenizer(text[: 16 * tokens], return_tensors="pt", verbose=False).input_ids[0, :tokens]
    if len(ids) < length:
        return [ids[None]] if len(ids) else []
    rows = ids[: len(ids) // length * length].view(-1, length)
    return list(rows.split(batch))
