"""The folders that are served, and what Transformers says of the prompts."""

from functools import cache
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_hyperconn import convert_model
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.demo import byte_tokenizer
from tests.conftest import randomise_connections

from .cases import BASES, CONNECTIONS, Case

NEW_TOKENS, BLOCK = 16, 128  # vLLM's blocks of keys and values on a CPU
LENGTHS = (5, 17, 64, 100, 130, 150, 200, 220)
ADAPTER = "adapter"


def prompts() -> list[list[int]]:
    """Return short prompts and some longer than a block; the last four begin alike."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, 512, (BLOCK,), generator=generator).tolist()
    drawn = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]
    return [(shared + prompt[BLOCK:]) if len(prompt) > BLOCK else prompt for prompt in drawn]


def build(case: Case, place: Path) -> Path:
    """Return the folder of a case, made if it isn't there."""
    folder, base = place / case.name, place / case.base
    if not base.is_dir():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(BASES[case.base])
        model.save_pretrained(base)
        byte_tokenizer().save_pretrained(base)
    if case.connection is not None and not folder.is_dir():
        fields = CONNECTIONS[case.connection]
        if case.is_trained:
            trained(convert_model(AutoModelForCausalLM.from_pretrained(base), **fields)).save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
        else:
            convert_checkpoint(str(base), folder, verify="off", **fields)
    if case.has_adapter and not (folder / ADAPTER).is_dir():
        torch.manual_seed(1)
        settings = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        get_peft_model(load(folder), settings).save_pretrained(folder / ADAPTER)
    return folder


def trained(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with connections that are far from the start."""
    with torch.no_grad():
        for name, parameter in randomise_connections(model).named_parameters():
            if name.endswith((".query", "_hc.fn")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def load(folder: Path) -> PreTrainedModel:
    """Return the model of a folder, by Transformers and this package."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@cache
@torch.no_grad()
def expected(folder: Path, has_adapter: bool) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return the continuation of each prompt by `generate` in float32, and its log-probabilities `[NEW_TOKENS, V]`."""
    model = load(folder)
    model.generation_config.eos_token_id = None  # neither ends there nor forbids it, as the engines are asked to
    if has_adapter:
        model = PeftModel.from_pretrained(model, folder / ADAPTER)
    tokens, log_probabilities = [], []
    for prompt in prompts():
        output = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(output.sequences[0, len(prompt) :].tolist())
        log_probabilities.append(torch.cat(output.logits).log_softmax(-1))
    return tokens, log_probabilities
