"""The start of every program here: imports, one thread, and the valid checkpoints that are mutated."""

import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_hyperconn import convert_model, save_hc
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.demo import byte_tokenizer
from tests import conftest
from tests.conftest import randomise_connections
from tests.push.conftest import TOKENS, connected
from tests.tiny import tiny
from tests.writable_hub import WritableHub

from .children import call

atexit.register(conftest.pytest_unconfigure)  # its cache of code, which pytest would remove
logging.disable_progress_bar()

# model type, and the largest shard of a base in several files
BASES = {
    "llama": ("llama", None),
    "sharded": ("llama", "30KB"),
    "olmoe": ("olmoe", "60KB"),
    "layernorm": ("starcoder2", None),
}
ON_THE_HUB = "sharded"
CONVERSIONS = {
    "llama": {"hc_mult": 2},
    "sharded": {"hc_mult": 4},
    "olmoe": {"hc_mult": 2, "connection": "shc"},
    "layernorm": {"hc_mult": 2, "hc_tanh": False},
}
TRAINED = "trained"
RESULTS = {
    "results": {"arc_easy": {"alias": "arc_easy", "acc,none": 0.5, "acc_stderr,none": 0.1}},
    "configs": {"arc_easy": {"task": "arc_easy", "dataset_path": "allenai/ai2_arc", "dataset_name": "ARC-Easy"}},
    "n-shot": {"arc_easy": 0},
    "config": {"model": "hf", "model_dtype": "torch.float32", "batch_size": 1, "limit": None, "random_seed": 0},
    "lm_eval_version": "0.4.9",
}
CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- tiny\n---\n# A tiny model\n\nSome words about it.\n"
CONVERTER = "hf_hyperconn.conversion"
IMPORTED = (
    *("safetensors.torch", "safetensors.numpy", "huggingface_hub.utils", "huggingface_hub.repocard", "jinja2", "yaml"),
    "matplotlib.pyplot",
    *("huggingface_hub.hf_api", "huggingface_hub._commit_api", "huggingface_hub.lfs", "transformers.modeling_utils"),
    *("transformers.models.llama.modeling_llama", "transformers.models.olmoe.modeling_olmoe"),
    *("transformers.models.starcoder2.modeling_starcoder2",),
    *(f"{CONVERTER}.{name}" for name in ("cli", "convert", "card", "push", "plot")),
    *(f"{CONVERTER}.verify.{name}" for name in ("numeric", "start")),
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
    """Return the folder with all that is mutated."""
    print("building what is mutated", file=sys.stderr)
    folder = place / "starts"
    folder.mkdir()
    call(lambda: build(folder), place / "building")
    return folder


def build(place: Path) -> None:
    """Make everything, in `place`: `bases`, `conversions`, `hyper_connections.safetensors`, `results.json`.

    Threads may be left behind: call it in a process of its own.
    """
    for name, (model_type, shard) in BASES.items():
        base = place / "bases" / name
        tiny(model_type).save_pretrained(base, **({"max_shard_size": shard} if shard else {}))
        byte_tokenizer().save_pretrained(base)
        (base / "README.md").write_text(CARD)
        (base / "LICENSE").write_text("of the base")
        (base / "assets").mkdir()
        (base / "assets" / "words.txt").write_text("that go along")
    (place / "conversions").mkdir()
    (place / "hub").mkdir()
    with WritableHub(place / "hub", TOKENS) as hub, connected(hub, place):
        hub.push(f"org/{ON_THE_HUB}", place / "bases" / ON_THE_HUB)
        for name, fields in CONVERSIONS.items():
            base = f"org/{name}" if name == ON_THE_HUB else str(place / "bases" / name)
            convert_checkpoint(base, place / "conversions" / name, verify="full", **fields)
    model = AutoModelForCausalLM.from_pretrained(place / "conversions" / "llama")
    randomise_connections(model).save_pretrained(place / "conversions" / TRAINED)
    save_hc(randomise_connections(convert_model(tiny("llama"), hc_mult=2)), place)
    (place / "results.json").write_text(json.dumps(RESULTS))
    for path in place.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes files for their owner alone
    for left in ("hub", "cache"):
        shutil.rmtree(place / left, ignore_errors=True)


def base_of(name: str) -> str:
    """Return the base of a conversion."""
    return "llama" if name == TRAINED else name


def ids() -> torch.Tensor:
    """Return token ids `[2, 12]` that every model here takes."""
    return torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
