"""What users do with a model, for one of each form of layers: checkpointed and compiled layers, ranks, a pipeline."""

import copy

import numpy as np
import pytest
import torch
from accelerate.utils import compile_regions
from PIL import Image
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel, ViTForImageClassification, ViTImageProcessor, pipeline

from hf_hyperconn import convert_model

from .conftest import randomise_connections
from .marks import few, tail
from .other_families import inputs_of, loss_of, tiny
from .recipe import gradients_of_ranks, run_on_ranks
from .tolerances import COMPILED, REDUCED_GRADIENTS

# parallel branches; one addition; three and a method between layers; two kinds of layers; encoders; both
FORMS = ("gpt_neox", "mamba2", "gemma4_text", "granitemoehybrid", "vit", "t5", "whisper")
KINDS_OF_LAYERS = {"granitemoehybrid": 2, "t5": 2, "whisper": 2, "gemma4_text": 2}
forms = pytest.mark.parametrize("model_type", few(FORMS, "mamba2", "t5"))


def converted(model_type: str) -> PreTrainedModel:
    return randomise_connections(convert_model(copy.deepcopy(tiny(model_type)), hc_mult=2))


def loss_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = loss_of(model, inputs_of(model))
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def apart(model: PreTrainedModel) -> list[str]:
    """The parameters whose gradients are other ones where layers are checkpointed, by more than rounding: none."""
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable()
    (loss, gradients), (again, of_checkpointed) = loss_and_gradients(model), loss_and_gradients(checkpointed)
    assert torch.equal(again, loss)
    assert of_checkpointed.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(of_checkpointed[name], value, **REDUCED_GRADIENTS)
    return [name for name, value in gradients.items() if not torch.equal(of_checkpointed[name], value)]


@forms
def test_checkpointed_layers_have_the_same_gradients(model_type):
    """Bit for bit where the base's are, which T5's are not: its layers share a position bias."""
    differing = apart(converted(model_type).train())
    assert not differing or apart(copy.deepcopy(tiny(model_type)).train())


def graphs(model: PreTrainedModel) -> int:
    """How many a training step compiles to, layer by layer; its loss stays the same."""
    torch.compiler.reset()
    counter = CompileCounter()
    inputs = inputs_of(model)
    expected = loss_of(model, inputs)
    found = loss_of(compile_regions(model, backend=counter), inputs)
    torch.testing.assert_close(found, expected, **COMPILED)
    found.backward()
    return counter.frame_count


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["gpt_neox", "vit", *tail("whisper", "mamba2", "gemma4_text", "granitemoehybrid", "t5")]
)
def test_layers_compile_to_three_graphs_of_a_kind(model_type):
    of_base = graphs(copy.deepcopy(tiny(model_type)))
    assert graphs(converted(model_type)) <= of_base + 2 * KINDS_OF_LAYERS.get(model_type, 1)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mamba2", "vit", "whisper"])
def test_gradients_of_two_ranks_are_those_of_the_joined_batch(model_type, tmp_path):
    """By FSDP2, in which T5's one embedding of two stacks can't be; GPT-NeoX is among make test-transformers."""
    converted(model_type).save_pretrained(tmp_path)
    assert "gradients of 2 FSDP ranks agree" in gradients_of_ranks("examples/configs/fsdp2.yaml", tmp_path)


@pytest.mark.slow
def test_two_ranks_share_the_matrices_of_a_model(tmp_path):
    """By the tensor-parallel plan of the base: parallel branches, three in a layer, two kinds of layers."""
    folders = [tmp_path / model_type for model_type in ("cohere", "gpt_neox", "gemma4_text", "granitemoehybrid")]
    for folder in folders:
        converted(folder.name).save_pretrained(folder)
    said = run_on_ranks(2, "tests/ranks/tensor_parallel.py", *map(str, folders))
    assert [said.count(f"logits agree on rank {rank}") for rank in (0, 1)] == [len(folders)] * 2


def test_images_go_through_a_pipeline(tmp_path):
    torch.manual_seed(0)
    base = ViTForImageClassification(tiny("vit").config).eval()
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8))
    for name, model in (("base", base), ("hc", convert_model(base))):
        model.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
    expected, found = (pipeline("image-classification", str(tmp_path / name))(image) for name in ("base", "hc"))
    assert found == expected
