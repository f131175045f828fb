"""What `hf-hyperconn plot` loads: safetensors and configs alone, and no code of a checkpoint is run."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_hyperconn.analysis.study import batches_of
from hf_hyperconn.errors import HyperConnError, UnsupportedCheckpointError
from hf_hyperconn.families.family import usual_names
from hf_hyperconn.models.sub_layers import is_of_connection
from hf_hyperconn.registration import register_auto_classes

from .cards.facts import TOKENIZERS
from .checkpoint.checkpoint import Checkpoint, open_conversion
from .checkpoint.checkpoint_files import (
    INDEX,
    open_tensors,
    read_weights,
    read_written_config,
    refuse_links_out,
    refuse_other_weights,
)
from .checkpoint.loading import refused_by_transformers, while_loading, without_kernels
from .checkpoint.repository_files import belongs
from .checkpoint.source import CONFIG, Source, open_source
from .planning.refusals import LOAD_IT

LARGEST = 2**24  # characters of a text


def load_model(source: Source) -> PreTrainedModel:
    """A checkpoint's model without its head, in the dtype of the weights.

    Raises `UnsupportedCheckpointError` when some of its weights are missing, or Transformers would load others, or
    can't load it.
    """
    register_auto_classes()
    refuse_other_weights(source, read_written_config(source))
    weights = read_weights(source)
    folder = source.folder([name for name in (CONFIG, INDEX, *weights.files) if name in source.files])
    with _refusals(source), while_loading():
        config = without_kernels(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        model, info = AutoModel.from_pretrained(
            folder, config=config, output_loading_info=True, trust_remote_code=False, use_safetensors=True
        )
    _refuse_missing(source, info["missing_keys"])
    return model


def load_connections(source: Source) -> PreTrainedModel:
    """A checkpoint's model with its connections alone; all other weights are on the meta device, and not read.

    Raises `UnsupportedCheckpointError` when some of theirs are missing, or Transformers can't load them.
    """
    register_auto_classes()
    checkpoint = open_conversion(source)
    weights, family = checkpoint.weights, checkpoint.family
    folder = source.folder([CONFIG])
    with _refusals(source), torch.device("meta"):
        config = without_kernels(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        model = AutoModel.from_config(config)
    with open_tensors(source, weights, "torch") as read:
        tensors = {
            f"{stack}.{name.removeprefix(on_disk)}": read(name)
            for stack, on_disk in zip(family.source.places, checkpoint.stacks, strict=True)
            for name in filter(is_of_connection, weights.tensors)
            if name.startswith(on_disk)
        }
    with _refusals(source):
        found = model.load_state_dict(tensors, strict=False, assign=True)
    _refuse_missing(source, filter(is_of_connection, found.missing_keys))
    return model


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer.

    Raises `HyperConnError` when it has none, or one that can't be read.
    """
    if set(TOKENIZERS).isdisjoint(source.files):
        raise HyperConnError(
            f"{source.name!r} has no tokenizer to read the text with. Copy {' and '.join(TOKENIZERS[:2])} from its "
            f"base."
        )
    refuse_links_out(source, filter(belongs, source.files))
    with tokenizer_errors(source):
        return AutoTokenizer.from_pretrained(source.folder(TOKENIZERS), trust_remote_code=False)


def tokens_of(text: str, source: Source, tokenizer: PreTrainedTokenizerBase, length: int) -> list[torch.Tensor]:
    """Token ids of the beginning of a text, as `batches_of` gives them.

    Raises `HyperConnError` when the tokenizer can't read it.
    """
    with tokenizer_errors(source):
        return batches_of(text[:LARGEST], tokenizer, length)


def open_base(model: str, checkpoint: Checkpoint) -> Source:
    """The base of a checkpoint with hyper-connections.

    model: local folder or Hub id.

    Raises `UnsupportedCheckpointError` when it can't be read, is of another family or has another number of layers, or
    Transformers would load other weights than its own.
    """
    base = open_source(model)
    refuse_other_weights(base, read_written_config(base))
    read_weights(base)
    expected, family, found = checkpoint.config, checkpoint.family, read_written_config(base)
    as_converted = usual_names({**found, "model_type": family.model_type})
    of_checkpoint = (family.base_model_type, expected["num_hidden_layers"])
    of_base = (found.get("model_type"), as_converted.get("num_hidden_layers"))
    if of_base != of_checkpoint:
        raise UnsupportedCheckpointError(
            f"{model!r} is not the base of {checkpoint.name!r}: it has model_type {of_base[0]!r} and {of_base[1]} "
            f"layers, not {of_checkpoint[0]!r} and {of_checkpoint[1]}. Give the base to --against."
        )
    return base


@contextmanager
def _refusals(source: Source) -> Iterator[None]:
    """Raise whatever Transformers makes of files that nobody has checked as `UnsupportedCheckpointError`."""
    try:
        yield
    except Exception as error:
        raise UnsupportedCheckpointError(f"{source.name!r}: {refused_by_transformers(error)}. {LOAD_IT}") from error


def _refuse_missing(source: Source, names) -> None:
    if names := sorted(names):
        raise UnsupportedCheckpointError(
            f"{source.name!r} holds no {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}. Copy or "
            f"download the checkpoint again."
        )


FILE = "tokenizer.json"


@contextmanager
def tokenizer_errors(source: Source) -> Iterator[None]:
    """Turn what goes wrong in a tokenizer into a `HyperConnError`; also a panic of Rust, whose report is not shown."""
    try:
        with _without_stderr():
            yield
    except (HyperConnError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        name = FILE if FILE in source.files else "the tokenizer"
        raise HyperConnError(
            f"{name} of {source.name!r} can't read a text ({reason:.300}). Copy the tokenizer's files from its base."
        ) from error


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Within it, what is written to the process's stderr goes nowhere: Rust writes there itself."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
