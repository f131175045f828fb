"""Fixtures that tests share. No test needs the network."""

import gc
import io
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# the code of loaded folders is copied there, by their names, which test processes side by side choose alike
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules_")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, HyperConnection

from .families import FAMILIES

logging.disable_progress_bar()


def pytest_unconfigure():
    gc.unfreeze()
    shutil.rmtree(os.environ["HF_MODULES_CACHE"])


@pytest.fixture(scope="module", autouse=True)
def frozen_objects():
    """Objects that were there before are passed over when garbage is collected, which verification does often."""
    gc.collect()
    gc.freeze()


SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def stories() -> Path:
    """A pretrained Llama of 260K parameters with grouped queries and tied embeddings."""
    folder = SHARED / "checkpoints" / "stories260k"
    if not folder.is_dir():
        pytest.skip("needs the stories260k checkpoint beside the repository")
    return folder


@pytest.fixture(scope="module")
def model_types(request) -> list[str]:
    """The families that a module's selected tests are about: all, or those that `-k` leaves."""
    return [model_type for model_type in FAMILIES if model_type in asked_for(request, "model_type")]


def asked_for(request, *names: str) -> set:
    """Return the values of a parameter, or the tuples of several, in the selected tests of a module.

    A test without the parameter has None.
    """
    tests = [item for item in request.session.items if item.path == request.path]
    parameters = [test.callspec.params if hasattr(test, "callspec") else {} for test in tests]
    return {values[0] if len(values) == 1 else values for values in (tuple(map(p.get, names)) for p in parameters)}


@pytest.fixture(scope="session")
def texts() -> Path:
    """A file of a few hundred thousand characters of English."""
    path = SHARED / "text" / "wizard_of_oz.txt"
    if not path.is_file():
        pytest.skip("needs the text beside the repository")
    return path


@pytest.fixture(scope="session")
def text(texts) -> str:
    """What that file holds."""
    return texts.read_text(encoding="utf-8")


# of a model that runs in milliseconds
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama_config(**changes) -> LlamaConfig:
    """Return the config of a tiny Llama."""
    return LlamaConfig(**{**TINY, **changes})


def hc_llama(**fields) -> HCLlamaForCausalLM:
    """Return a tiny random Llama with the hyper-connection `fields`, as for training from scratch."""
    torch.manual_seed(0)
    return HCLlamaForCausalLM(HCLlamaConfig(**{**TINY, **fields}))


def traced_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model that `torch.jit.trace` has made a program of, saved and loaded again."""

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    file = io.BytesIO()
    with warnings.catch_warnings(category=torch.jit.TracerWarning, action="ignore"):
        torch.jit.save(torch.jit.trace(Logits(), (ids,), check_trace=False), file)
    file.seek(0)
    return torch.jit.load(file)(ids)


def randomise_connections(model, scale: float = 0.1):
    """Return the model, its static and dynamic hyper-connections no longer equivalent to residual connections."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, HyperConnection):
                for parameter in module.parameters():
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def train(model, optimizer, batches) -> list[float]:
    """Return the loss of a language model at each step, one for each batch of token ids."""
    losses = []
    for batch in batches:
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def record_branches(model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a list that every branch of a model adds its input and output to, when it runs."""
    seen = []

    def record(branch):
        def recorded(hidden_states, **kwargs):
            seen.append((hidden_states, branch(hidden_states, **kwargs)))
            return seen[-1][1]

        return recorded

    for layer in model.model.layers:
        layer.attention_branch, layer.mlp_branch = record(layer.attention_branch), record(layer.mlp_branch)
    return seen


def kept_for_a_token(model) -> float:
    """Return bytes that autograd keeps after a language model's forward, for a token.

    From what eight more tokens add, which leaves out what is kept once, such as copies of parameters.
    """

    def kept(tokens: int) -> int:
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.ones(1, tokens, dtype=torch.long, device=model.device), use_cache=False)
        return sum(storage.nbytes() for storage in storages.values())

    return (kept(16) - kept(8)) / 8


@pytest.fixture(scope="session")
def llama() -> Iterator[LlamaForCausalLM]:
    """A Llama with random weights, which the last of a session's tests finds unchanged."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(initializer_range=0.2)).eval()
    model.generation_config.eos_token_id = None
    before = deepcopy(model.state_dict())
    yield model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="session")
def llama_folder(llama, tmp_path_factory) -> Path:
    """The same Llama, saved by Transformers as one file."""
    folder = tmp_path_factory.mktemp("llama") / "tiny-llama"
    llama.save_pretrained(folder)
    return folder


@pytest.fixture
def source(llama_folder, tmp_path) -> Path:
    """A copy of the folder, which a test may change."""
    return shutil.copytree(llama_folder, tmp_path / "base")


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids `[2, 24]` for the tiny Llama."""
    return torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))
