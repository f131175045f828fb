"""Short digests of forwards, by which a change of one is seen."""

import ast
import hashlib

from .source_files import Definition


def digest_in(text: str, forward: ast.FunctionDef) -> str:
    """The digest of a `forward` in the text of its file, from `def` on, however it is spaced."""
    lines = text.splitlines()[forward.lineno - 1 : forward.end_lineno]
    return hashlib.sha256(" ".join("\n".join(lines).split()).encode()).hexdigest()[:16]


def digest_of(definition: Definition) -> str:
    """The digest of the `forward` of a class, its own or inherited."""
    forward, file = definition.own_method("forward")
    return digest_in(file.text, forward)
