"""The text of the deep study: files of the user's, or source code, in tokens of a BPE trained on them."""

import hashlib
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.pretraining.corpus import HELD_OUT, Corpus, corpus
from benchmarks.pretraining.train import WORK
from hf_hyperconn.conversion.files.writing import replace_file

PLACE = WORK / "text"


@cache
def given(training: Path | None, held_out: Path | None, vocabulary: int) -> Corpus:
    """Return a file to train on, or source code; and one held out, or the last fiftieth of the other."""
    if training is None:
        source = corpus("python")
        tokenizer = bpe(source.training.numpy().tobytes(), vocabulary)
        parts = [encode(tokenizer, part.numpy().tobytes()) for part in (source.training, source.held_out)]
        return Corpus(*parts, source.files, source.sha256)
    parts = _parts(training, held_out)
    return _corpus(bpe(parts[0], vocabulary), parts)


@cache
def another(known: Path, known_held_out: Path | None, training: Path, held_out: Path, vocabulary: int) -> Corpus:
    """Files to train on and to evaluate on, in tokens of the BPE of the text that a base knows."""
    return _corpus(bpe(_parts(known, known_held_out)[0], vocabulary), _parts(training, held_out))


def bpe(content: bytes, vocabulary: int) -> Tokenizer:
    """Return a byte-level BPE trained on a text, once."""
    path = PLACE / f"{hashlib.sha256(content).hexdigest()[:16]}-{vocabulary}.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_lines(content), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, tokenizer.to_str().encode())
    return tokenizer


def encode(tokenizer: Tokenizer, content: bytes) -> torch.Tensor:
    """Return the tokens of a text, `[T]` int16, made once."""
    key = hashlib.sha256(tokenizer.to_str().encode() + content).hexdigest()[:16]
    path = PLACE / f"{key}.npy"
    if not path.exists():
        encodings = tokenizer.encode_batch_fast(_lines(content))
        buffer = BytesIO()
        np.save(buffer, np.concatenate([np.asarray(encoding.ids, np.int16) for encoding in encodings]))
        replace_file(path, buffer.getvalue())
    return torch.from_numpy(np.load(path))


def _parts(training: Path, held_out: Path | None) -> list[bytes]:
    """What is trained on, and what is held out."""
    content = training.read_bytes()
    if held_out is not None:
        return [content, held_out.read_bytes()]
    cut = len(content) - len(content) // HELD_OUT
    return [content[:cut], content[cut:]]


def _corpus(tokenizer: Tokenizer, parts: list[bytes]) -> Corpus:
    sha256 = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return Corpus(*(encode(tokenizer, part) for part in parts), len(parts), sha256)


def _lines(content: bytes) -> list[str]:
    """Return a text in pieces that no token spans."""
    return content.decode(errors="replace").splitlines(keepends=True)
