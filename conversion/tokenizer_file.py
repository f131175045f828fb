"""What a tokenizer.json could do to who reads a text with it: make it grow beyond memory, or fail in other words."""

import math
import os
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_hyperconn.errors import HyperConnError

from .checkpoint import read_json
from .source import Source

FILE = "tokenizer.json"
LONGEST = 4096  # characters of a string that a tokenizer puts into a text
MOST_GROWTH = 1024  # characters that one character may become
CHARS_MAP = "precompiled_charsmap"  # a table of SentencePiece, in base64
RULES = ("normalizer", "pre_tokenizer", "decoder")


def growth_of(source: Source) -> int:
    """How many characters one character of a text can become by the rules of a tokenizer.json; 1 without such a file.

    Raises `HyperConnError` when these would put long strings into a text, or let it grow without end.
    """
    if FILE not in source.files:
        return 1
    content = read_json(source, FILE)
    rules = [content.get(name) for name in RULES]
    model = content.get("model")
    fields = model if isinstance(model, dict) else {}
    longest = max(map(_longest, [*rules, *(value for value in fields.values() if isinstance(value, str))]))
    if longest > LONGEST:
        raise HyperConnError(
            f"{FILE} of {source.name!r} puts a string of {longest:,} characters into a text, and up to {LONGEST:,} "
            f"are accepted. Do not trust this checkpoint."
        )
    word = fields.get("max_input_chars_per_word")
    if isinstance(word, int) and word > LONGEST:
        raise HyperConnError(
            f"{FILE} of {source.name!r} looks for words of up to {word:,} characters, and up to {LONGEST:,} are "
            f"accepted. Do not trust this checkpoint."
        )
    growth = _grown(rules[0], 1)
    if growth > MOST_GROWTH:
        raise HyperConnError(
            f"{FILE} of {source.name!r} makes more than {MOST_GROWTH:,} characters of one. Do not trust this "
            f"checkpoint."
        )
    return growth


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


def _longest(rules: Any) -> int:
    """Length of the longest string in rules of a tokenizer, at any depth; of a table, of those that it holds."""
    longest, pending = 0, [rules]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            longest = max(longest, *(len(name) for name in part), _longest_of_table(part.get(CHARS_MAP)))
            pending += [value for name, value in part.items() if name != CHARS_MAP]
        elif isinstance(part, list):
            pending += part
        elif isinstance(part, str):
            longest = max(longest, len(part))
    return longest


def _longest_of_table(table: Any) -> int:
    """Bytes of the longest string that a table of SentencePiece puts into a text; 0 of what is no table."""
    try:
        content = b64decode(table)
    except (TypeError, ValueError):
        return 0
    strings = content[4 + int.from_bytes(content[:4], "little") :]
    return max(map(len, strings.split(b"\0")))


def _grown(rule: Any, size: int) -> int:
    """How many characters a rule can make of `size` characters; more than `MOST_GROWTH` are not told apart."""
    match rule:
        case {"type": "Sequence", "normalizers": list() as rules}:
            for each in rules:
                size = _grown(each, size)
        case {"type": "Prepend", "prepend": str() as text}:
            size += len(text)
        case {"type": "Replace", "pattern": {"String": str() as pattern}, "content": str() as text} if pattern:
            size *= max(1, math.ceil(len(text) / len(pattern)))
        case {"type": "Replace", "content": str() as text}:  # a pattern may find nothing, before each character
            size *= 1 + len(text)
        case {"type": "Precompiled", "precompiled_charsmap": table}:
            size *= max(1, _longest_of_table(table))
    return min(size, MOST_GROWTH + 1)
