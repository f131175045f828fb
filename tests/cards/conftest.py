"""A conversion of a gated base and what Trainer makes of it, to write cards of."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import Trainer, TrainingArguments

from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion.checkpoint import readme
from hf_hyperconn.conversion.convert import convert_checkpoint
from tests.card_examples import cache

BASE = "meta-llama/Llama-3.2-tiny"
BASE_CARD = """---
license: llama3.2
license_link: LICENSE
language: [en, de]
tags: [pytorch, llama, 2024-09-25]
base_model: meta-llama/Llama-3.1-8B
datasets: [some/pretraining-data]
widget: [{text: Hello}]
extra_gated_prompt: |-
  You agree.

  You do.
extra_gated_fields: {Born on: date_picker}
model-index: [{name: base, results: []}]
---
# The base
"""

# lm-eval's own form, of a task and of a group with a part of it, with values nobody measured
RESULTS = {
    "results": {
        "arc_easy": {"alias": "arc_easy", "acc,none": 0.65, "acc_stderr,none": 0.01, "acc_norm,none": 0.6125},
        "mmlu": {"alias": "mmlu", "acc,none": 0.31, "acc_stderr,none": 0.004},
        "mmlu_anatomy": {"alias": " - anatomy", "acc,none": 0.29, "acc_stderr,none": 0.04},
        "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.05, "exact_match_stderr,strict-match": "N/A"},
    },
    "groups": {"mmlu": {"alias": "mmlu", "acc,none": 0.31}},
    "group_subtasks": {"mmlu": ["mmlu_anatomy"]},
    "configs": {
        "arc_easy": {"dataset_path": "allenai/ai2_arc", "dataset_name": "ARC-Easy", "test_split": "test"},
        "mmlu_anatomy": {"dataset_path": "cais/mmlu", "dataset_name": "anatomy", "test_split": "test"},
        "gsm8k": {"dataset_path": "json", "test_split": "test"},
    },
    "n-shot": {"arc_easy": 0, "mmlu": 5, "gsm8k": 5},
    "config": {"model": "hf", "model_dtype": "torch.bfloat16", "batch_size": 8, "limit": None, "random_seed": 0},
    "lm_eval_version": "0.4.13",
    "transformers_version": "5.23.0",
}


@pytest.fixture(scope="module")
def converted(llama_folder, tmp_path_factory) -> Path:
    """A conversion of a gated base, which is in a cache of the Hub with its card; it can't be reached otherwise."""
    place = tmp_path_factory.mktemp("cards")
    config = json.loads((llama_folder / "config.json").read_text())
    snapshot = cache(place / "hub", BASE, config, BASE_CARD, ("LICENSE",))
    shutil.copy(llama_folder / "model.safetensors", snapshot)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
        yield convert_checkpoint(BASE, place / "Llama-3.2-tiny-HCx4").path


@pytest.fixture
def folder(converted, tmp_path) -> Path:
    """A copy of the conversion to write into."""
    return shutil.copytree(converted, tmp_path / converted.name)


@pytest.fixture(scope="module")
def trained(converted, tmp_path_factory) -> Path:
    """The conversion after two steps of Trainer, in a folder of its own, where Trainer wrote a README.md."""
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(96).view(4, 24)]
    arguments = TrainingArguments(
        tmp_path_factory.mktemp("runs") / "Llama-tuned",
        max_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        learning_rate=0.1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = HCLlamaForCausalLM.from_pretrained(converted)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card(dataset="tiny texts", dataset_tags="someone/tiny-texts")
    return Path(trainer.args.output_dir)


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the trained model to write into."""
    return shutil.copytree(trained, tmp_path / trained.name)


def text_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    return {match["name"]: match["text"] for match in readme.SECTION.finditer(text)}


def results_file(place: Path, **changes) -> str:
    path = place / "results.json"
    path.write_text(json.dumps({**RESULTS, **changes}))
    return str(path)
