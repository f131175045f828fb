"""What is quantised, and how."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from hf_hyperconn import convert_model, hc_param_groups, hc_parameters
from hf_hyperconn.conversion.demo import byte_tokenizer
from tests.campaigns.engines.cases import BASES
from tests.campaigns.environments import Environment
from tests.conftest import train
from tests.pages import snippets

FOLDER, QUANTISED = "Llama-3.2-1B-HCx4", "Llama-3.2-1B-HCx4-quantised"  # on the page
LOAD = 'from_pretrained("Llama-3.2-1B-HCx4-quantised"'
NOISE = 0.01  # of each quantised matrix's root mean square: how far a model moves without quantisation
LLMCOMPRESSOR = Environment("quantised", (("install", "llmcompressor==0.14.0", "torch==2.13.0"),))


@dataclass(frozen=True)
class Scheme:
    """A way to quantise.

    package: that does it. word: of the page's snippet. replaced: in the snippet, to get from its scheme to this one.
    """

    package: str
    word: str
    replaced: dict[str, str] = field(default_factory=dict, hash=False)

    def python(self) -> Path:
        """Return the Python that has the package: this one, or that of an environment of its own."""
        return LLMCOMPRESSOR.python() if self.package == "llmcompressor" else Path(sys.executable)

    @property
    def code(self) -> str:
        """Return the page's snippet, changed to this scheme."""
        code = snippet(self.word)
        for old, new in self.replaced.items():
            assert old in code
            code = code.replace(old, new)
        return code


def snippet(word: str) -> str:
    """Return the one block of Python on the page that has this word."""
    (code,) = [code for language, code in snippets("docs/quantised.md") if language == "python" and word in code]
    return code


SCHEMES = {
    "llmcompressor W8A16": Scheme("llmcompressor", "oneshot", {"W8A8": "W8A16"}),
    "llmcompressor W8A8": Scheme("llmcompressor", "oneshot"),
    "torchao int8 weights": Scheme("torchao", "TorchAoConfig"),
    "torchao int8 weights and activations": Scheme(
        "torchao", "TorchAoConfig", {"Int8WeightOnlyConfig": "Int8DynamicActivationInt8WeightConfig"}
    ),
    "bitsandbytes int8": Scheme(
        "bitsandbytes", "BitsAndBytesConfig", {'load_in_4bit=True, bnb_4bit_quant_type="nf4"': "load_in_8bit=True"}
    ),
    "bitsandbytes NF4": Scheme("bitsandbytes", "BitsAndBytesConfig"),
}


@dataclass(frozen=True)
class Model:
    """A tiny Llama, in bfloat16.

    base: the name of the model that it is compared with, of None a base. fields: of the conversion.
    is_trained: for 20 steps, as is what it is compared with.
    """

    base: str | None = None
    fields: dict = field(default_factory=dict, hash=False)
    is_trained: bool = False


MODELS = {
    "Llama": Model(),
    "Llama, trained": Model(is_trained=True),
    "DHC×4": Model("Llama"),
    "DHC×4, trained": Model("Llama, trained", is_trained=True),
    "mHC×4": Model("Llama", {"connection": "mhc"}),
}


def build(model: Model, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model, in a folder; returns its connections."""
    torch.manual_seed(0)
    network: PreTrainedModel = LlamaForCausalLM(BASES["Llama"])
    ids = torch.randint(3, network.config.vocab_size, (4, 64))
    if model.base is not None:
        network = convert_model(network, **model.fields)
    if model.is_trained:
        groups = network.parameters() if model.base is None else hc_param_groups(network, 1e-3, 0.0, hc_lr=1e-2)
        train(network, torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0), [ids] * 20)
    network.bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return dict(hc_parameters(AutoModelForCausalLM.from_pretrained(folder)))


def token_ids() -> list[list[int]]:
    """What all models evaluate, none of it trained on."""
    return torch.randint(3, 512, (8, 64), generator=torch.Generator().manual_seed(1)).tolist()
