"""Models and tokenizers to draw, from safetensors and configs alone: no code of a checkpoint is run."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_hyperconn.analysis.study import batches_of
from hf_hyperconn.errors import HyperConnError, UnsupportedCheckpointError
from hf_hyperconn.models.sub_layers import is_of_connection
from hf_hyperconn.registration import register_auto_classes

from ..card.facts import TOKENIZERS
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint_files import (
    INDEX,
    open_tensors,
    read_raw_config,
    refuse_links_out,
    refuse_other_weights,
)
from ..checkpoint.loading import quiet_loading, refused_by_transformers, without_kernels
from ..checkpoint.repository_files import belongs
from ..checkpoint.source import CONFIG, Source, open_source
from ..planning.base_refusals import LOAD_REMEDY


def load_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """Load a model without its head, in the dtype of the weights.

    Raises `UnsupportedCheckpointError` when weights are missing, or Transformers would load others, or can't load it.
    """
    register_auto_classes()
    source = checkpoint.source
    refuse_other_weights(source, checkpoint.raw_config)
    folder = source.folder([name for name in (CONFIG, INDEX, *checkpoint.weights.files) if name in source.files])
    with _refusals(source), quiet_loading():
        config = without_kernels(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        model, info = AutoModel.from_pretrained(
            folder, config=config, output_loading_info=True, trust_remote_code=False, use_safetensors=True
        )
    _refuse_missing(source, info["missing_keys"])
    return model


def load_connections(checkpoint: Checkpoint) -> PreTrainedModel:
    """Load the connections of a conversion alone. All other weights are on the meta device, and not read.

    Raises `UnsupportedCheckpointError` when their weights are missing, or Transformers can't load them.
    """
    register_auto_classes()
    source, weights, family = checkpoint.source, checkpoint.weights, checkpoint.family
    folder = source.folder([CONFIG])
    with _refusals(source), torch.device("meta"):
        config = without_kernels(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        model = AutoModel.from_config(config)
    with open_tensors(source, weights, "torch") as read:
        tensors = {
            f"{stack}.{name.removeprefix(on_disk)}": read(name)
            for stack, on_disk in zip(family.source.places, checkpoint.stack_prefixes, strict=True)
            for name in filter(is_of_connection, weights.tensors)
            if name.startswith(on_disk)
        }
    with _refusals(source):
        missing = model.load_state_dict(tensors, strict=False, assign=True).missing_keys
    _refuse_missing(source, filter(is_of_connection, missing))
    return model


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint.

    Raises `HyperConnError` when it has no tokenizer, or an unreadable one.
    """
    if set(TOKENIZERS).isdisjoint(source.files):
        raise HyperConnError(
            f"{source.name!r} has no tokenizer to read the text with. Copy {' and '.join(TOKENIZERS[:2])} from its "
            f"base."
        )
    refuse_links_out(source, filter(belongs, source.files))
    with _tokenizer_errors(source):
        return AutoTokenizer.from_pretrained(source.folder(TOKENIZERS), trust_remote_code=False)


def tokens_of(text: str, source: Source, tokenizer: PreTrainedTokenizerBase, length: int) -> list[torch.Tensor]:
    """Return token ids of the beginning of a text, as `batches_of` does.

    Raises `HyperConnError` when the tokenizer can't read it.
    """
    with _tokenizer_errors(source):
        return batches_of(text, tokenizer, length)


def open_base_of(model: str, checkpoint: Checkpoint) -> Checkpoint:
    """Open the base of a conversion.

    model: local folder or Hub id.

    Raises `UnsupportedCheckpointError` when it can't be read, or is of another family or number of layers. Raises it
    also when Transformers would load other weights than its own.
    """
    source, family = open_source(model), checkpoint.family
    base = Checkpoint(source, read_raw_config(source), family)
    refuse_other_weights(source, base.raw_config)
    base.weights  # noqa: B018  # refused before a model is studied
    expected = (family.base_model_type, checkpoint.config["num_hidden_layers"])
    actual = (base.raw_config.get("model_type"), base.config.get("num_hidden_layers"))
    if actual != expected:
        raise UnsupportedCheckpointError(
            f"{model!r} is not the base of {checkpoint.name!r}: it has model_type {actual[0]!r} and {actual[1]} "
            f"layers, not {expected[0]!r} and {expected[1]}. Give the base to --against."
        )
    return base


@contextmanager
def _refusals(source: Source) -> Iterator[None]:
    """Raise errors of Transformers, which reads unchecked files here, as `UnsupportedCheckpointError`."""
    try:
        yield
    except Exception as error:
        raise UnsupportedCheckpointError(
            f"{source.name!r}: {refused_by_transformers(error)}. {LOAD_REMEDY}"
        ) from error


def _refuse_missing(source: Source, names) -> None:
    if names := sorted(names):
        raise UnsupportedCheckpointError(
            f"{source.name!r} holds no {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}. Copy or "
            f"download the checkpoint again."
        )


@contextmanager
def _tokenizer_errors(source: Source) -> Iterator[None]:
    """Raise errors of a tokenizer, panics of Rust included, as `HyperConnError`, and hide Rust's report."""
    try:
        with _without_stderr():
            yield
    except (HyperConnError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        name = "tokenizer.json" if "tokenizer.json" in source.files else "the tokenizer"
        raise HyperConnError(
            f"{name} of {source.name!r} can't read a text ({reason:.300}). Copy the tokenizer's files from its base."
        ) from error


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard the output to the process's stderr, where Rust writes itself."""
    sys.stderr.flush()
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
