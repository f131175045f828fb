"""What a monitor runs a model on: the beginning of the first training example."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from .errors import HyperConnError
from .wrappers import outermost_model

IGNORED = -100  # as a label


def first_example(trainer: Trainer, tokens: int) -> dict[str, torch.Tensor]:
    """The first `tokens` token ids `[1, S]` of the first training example, without padding.

    For an encoder-decoder also what its decoder reads: `decoder_input_ids`, or the labels that it is made from.

    Raises `HyperConnError` when the example holds no `input_ids`.
    """
    data: Any = trainer.train_dataset
    with kept_random_state():
        example: Any = next(iter(data if data is not None else ()), {})
    if "input_ids" not in example:
        raise HyperConnError(
            f"the first training example holds {', '.join(example) or 'nothing'}, and no input_ids to watch the "
            "connections on. Tokenise the dataset before it is given to the Trainer."
        )
    model: Any = trainer.model
    names = ["input_ids"]
    if getattr(getattr(outermost_model(model), "config", None), "is_encoder_decoder", False):
        names += [name for name in ("decoder_input_ids", "labels") if name in example][:1]
    return {name: _unpadded(example, name)[None, :tokens] for name in names}


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Within it, what is drawn from the generators of Python, numpy and torch (CPU) is drawn again afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _unpadded(example: Mapping[str, Any], name: str) -> torch.Tensor:
    """What an example holds by this name, `[S]`, where its mask is not zero; of labels, those learned, if any are."""
    values = torch.as_tensor(example[name]).flatten()
    if name == "labels":
        learned = values[values != IGNORED]
        return learned if len(learned) else values
    mask = example.get({"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}.get(name, ""))
    mask = None if mask is None else torch.as_tensor(mask).flatten()
    return values if mask is None or mask.shape != values.shape else values[mask != 0]
