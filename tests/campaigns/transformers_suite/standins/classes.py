"""The classes under test: this package's, or with `--control` Transformers' own that they are made from."""

import os

import transformers

import hf_hyperconn

CONTROL = bool(os.environ.get("TRANSFORMERS_SUITE_CONTROL"))


def class_of(family: str, task: str) -> type | None:
    """The class of a family for a task, such as "ForCausalLM"; None where it has none.

    family: as Transformers spells it in class names.
    """
    package, prefix = (transformers, "") if CONTROL else (hf_hyperconn, "HC")
    return getattr(package, f"{prefix}{family}{task}", None)
