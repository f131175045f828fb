"""What every program here does first: one thread, all imports made, and the valid checkpoints built."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch

from . import starts
from .children import call

CONVERTER = "hf_hyperconn.conversion"
IMPORTED = (
    *("safetensors.torch", "safetensors.numpy", "huggingface_hub.utils", "huggingface_hub.repocard", "jinja2", "yaml"),
    "matplotlib.pyplot",
    *("huggingface_hub.hf_api", "huggingface_hub._commit_api", "huggingface_hub.lfs", "transformers.modeling_utils"),
    *("transformers.models.llama.modeling_llama", "transformers.models.olmoe.modeling_olmoe"),
    *("transformers.models.starcoder2.modeling_starcoder2",),
    *(f"{CONVERTER}.{name}" for name in ("cli", "convert", "card", "push", "plot")),
    *(f"{CONVERTER}.verification.{name}" for name in ("numeric", "start")),
    *(f"hf_hyperconn.models.modeling_hc_{name}" for name in ("llama", "olmoe", "starcoder2")),
)


@contextmanager
def prepared() -> Iterator[Path]:
    """An empty folder to work in, in a process from which commands can be forked."""
    torch.set_num_threads(1)
    for name in IMPORTED:
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="hf_hyperconn_fuzz_", ignore_cleanup_errors=True) as folder:
        place = Path(folder).resolve()
        yield place


def build_starts(place: Path) -> Path:
    """The folder with all that is mutated."""
    print("building what is mutated", file=sys.stderr)
    folder = place / "starts"
    folder.mkdir()
    call(lambda: starts.build(folder), place / "building")
    return folder
