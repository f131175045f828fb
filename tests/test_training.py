"""A converted model in Transformers' Trainer: its streams separate, and training resumes where it stopped."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, Trainer, TrainingArguments

from hf_hyperconn import HCLlamaForCausalLM, convert_model
from hf_hyperconn.models.connection import expand_streams

from .conftest import train

LENGTH, BATCH = 64, 4


@pytest.fixture(scope="module")
def batches(stories, text) -> torch.Tensor:
    """Token ids `[12, BATCH, LENGTH]`."""
    ids = AutoTokenizer.from_pretrained(stories)(text[:20_000], return_tensors="pt").input_ids[0]
    return ids[: 12 * BATCH * LENGTH].view(12, BATCH, LENGTH)


def separation(model, batch) -> float:
    """Largest difference between two streams before the last layer."""
    streams = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, output: streams.append(args[0]))
    with torch.no_grad():
        model(batch)
    handle.remove()
    return (streams[0] - expand_streams(streams[0][..., 0, :], streams[0].shape[-2])).abs().max().item()


@pytest.mark.parametrize("connection", ["shc", "dhc"])
def test_one_step_separates_the_streams(connection, stories, batches):
    model = HCLlamaForCausalLM.from_prenorm(stories, connection=connection)
    betas = [layer.attn_hc.static_beta.detach().clone() for layer in model.model.layers]
    assert separation(model, batches[0]) == 0
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches[:1])
    for layer, beta in zip(model.model.layers, betas, strict=True):
        assert not torch.equal(layer.attn_hc.static_beta, beta)
    assert separation(model, batches[0]) > 1e-5


def test_smoothed_labels_are_shifted(stories, batches, tmp_path):
    """By Trainer, which knows a causal model by the name of its class."""
    pytest.importorskip("accelerate")
    args = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    base = LlamaForCausalLM.from_pretrained(stories)
    inputs = {"input_ids": batches[0], "labels": batches[0]}
    losses = [Trainer(model, args).compute_loss(model, dict(inputs)) for model in (base, convert_model(base))]
    assert torch.equal(*losses)


def test_trains_and_resumes_with_the_trainer(stories, batches, tmp_path):
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in batches.flatten(0, 1)]
    arguments = {"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "save_steps": 3, "max_steps": 6}
    arguments |= {"logging_steps": 1, "output_dir": str(tmp_path), "disable_tqdm": True, "learning_rate": 1e-3}

    def losses(resume: str | None) -> list[float]:
        trainer = Trainer(HCLlamaForCausalLM.from_prenorm(stories), TrainingArguments(**arguments), train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = losses(None)
    assert len(whole) == 6
    assert (tmp_path / "checkpoint-3" / "modeling_hc_llama.py").is_file()
    assert losses(str(tmp_path / "checkpoint-3")) == whole
