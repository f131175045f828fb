"""HCTrainer resumes from a checkpoint, or loads the best one, with all weights, whatever they are called there."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

from hf_hyperconn import HCTrainer, convert_model
from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.training.checkpoints import load_weights

from . import other_families
from .families import FAMILIES
from .tiny import tiny

pytest.importorskip("accelerate")

RANDOM = torch.Generator().manual_seed(0)
ROWS = [{"input_ids": row, "labels": row} for row in torch.randint(3, 90, (8, 16), generator=RANDOM)]
IMAGES = [
    {"pixel_values": image, "labels": torch.tensor(k % 2)}
    for k, image in enumerate(torch.randn(8, 3, 8, 8, generator=RANDOM))
]


def new(name: str, dtype: torch.dtype = torch.float32):
    """A conversion, always the same, and what it is trained on."""
    if name == "vit":
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        base, data = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=2, **sizes)), IMAGES
    else:
        base, data = deepcopy(tiny(name)), ROWS
    return convert_model(base.to(dtype)), data


def trainer_of(name: str, folder: Path, dtype: torch.dtype = torch.float32, **arguments) -> HCTrainer:
    model, data = new(name, dtype)
    usual = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True}
    usual |= {"per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(str(folder), **(usual | arguments))
    return HCTrainer(model, args, train_dataset=data, eval_dataset=data[:4])


def losses(trainer: HCTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_equal(state: dict, expected: dict) -> None:
    assert state.keys() == expected.keys()
    assert [name for name, value in state.items() if not torch.equal(value, expected[name])] == []


def split(checkpoint: Path, model) -> None:
    """Write the weights of a checkpoint anew, in many files."""
    whole = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    (checkpoint / "model.safetensors").unlink()
    whole.save_pretrained(checkpoint, max_shard_size="20KB")
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ("llama", "olmoe", "mixtral", "vit")), ("olmoe", torch.bfloat16)],
)
def test_a_resumed_run_is_an_uninterrupted_one(name, dtype, tmp_path):
    """From a checkpoint in one file, and in many."""
    whole = trainer_of(name, tmp_path, dtype)
    whole.train()
    for prepare in (lambda *args: None, split):
        prepare(tmp_path / "checkpoint-2", whole.model)
        resumed = trainer_of(name, tmp_path, dtype, save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert losses(resumed) == losses(whole)
        assert_equal(resumed.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("name", ["llama", "olmoe", "vit"])
def test_the_best_checkpoint_is_loaded_whole(name, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    trainer = trainer_of(name, tmp_path, **settings, metric_for_best_model="loss", greater_is_better=True)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-4"
    assert_equal(trainer.model.state_dict(), type(trainer.model).from_pretrained(best).state_dict())
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


def test_loading_draws_no_random_numbers(tmp_path):
    model, _ = new("olmoe")
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    load_weights(model, str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["llama", "olmoe"])
def test_a_checkpoint_that_lacks_weights_is_refused(name, tmp_path):
    model, _ = new(name)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.self_attn.o_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    trainer = trainer_of(name, tmp_path)
    message = r"lacks 1 weights of this HC\w+: model.layers.1.self_attn.o_proj.weight. Resume with"
    with pytest.raises(HyperConnError, match=message):
        trainer._load_from_checkpoint(str(tmp_path))


def test_tied_weights_are_not_lacking(tmp_path):
    model = convert_model(deepcopy(tiny("gemma")))
    assert model.config.tie_word_embeddings
    assert_restored(model, model.model.embed_tokens, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_module_of_the_users_own_is_loaded_too(tmp_path):
    model, _ = new("olmoe")
    model.probe = nn.Linear(3, 2)
    assert_restored(model, model.probe, tmp_path)


def assert_restored(model, module: nn.Module, folder: Path) -> None:
    """Save a model, lose a module's weight, and see that loading brings all weights back."""
    model.save_pretrained(folder)
    expected = deepcopy(model.state_dict())
    nn.init.zeros_(module.weight)
    load_weights(model, str(folder))
    assert_equal(model.state_dict(), expected)


def test_the_usual_loading_is_left_what_is_not_saved_whole(tmp_path):
    trainer = trainer_of("llama", tmp_path)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        trainer._load_from_checkpoint(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", list(dict.fromkeys([*FAMILIES, *other_families.COMMON, *other_families.OF_EACH_FORM]))
)
def test_every_family_is_loaded_whole(name, tmp_path):
    base = tiny(name) if name in FAMILIES else other_families.tiny(name)
    model = convert_model(deepcopy(base))
    model.save_pretrained(tmp_path)
    expected = type(model).from_pretrained(tmp_path).state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    load_weights(model, str(tmp_path))
    assert_equal(model.state_dict(), expected)
