"""What the monitor logs, and that watching changes nothing."""

import json
import math
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hyperconn import HCMonitorCallback, convert_model
from hf_hyperconn.analysis.observation import observe
from hf_hyperconn.analysis.study import study
from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.training.monitor import hc_figures

from .conftest import hc_llama, randomise_connections
from .marks import tail
from .other_families import tiny as tiny_of_others
from .tolerances import FLOAT32

IDS = torch.randint(3, 96, (8, 24), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in IDS]


def trainer_of(model, folder, **settings):
    torch.manual_seed(0)
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", **settings}
    settings = {"max_steps": 4, "logging_steps": 2, "learning_rate": 3e-2, "lr_scheduler_type": "constant", **settings}
    return Trainer(model, TrainingArguments(str(folder), **settings), train_dataset=DATA)


class Received(TrainerCallback):
    """What an integration is handed."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_every_integration_receives_at_most_ten_figures_with_the_loss(tmp_path, llama):
    trainer, received = trainer_of(convert_model(deepcopy(llama)), tmp_path), Received()
    trainer.add_callback(received)
    HCMonitorCallback().attach(trainer)
    trainer.train()
    with_loss = [logs for logs in received.logs if "loss" in logs]
    assert len(with_loss) == 2
    for logs, entry in zip(with_loss, trainer.state.log_history, strict=False):
        figures = {name: value for name, value in logs.items() if name.startswith("hc/")}
        assert 5 <= len(figures) <= 10
        assert figures.items() <= entry.items()
    assert not any(name.startswith("hc") for logs in received.logs if "loss" not in logs for name in logs)
    assert with_loss[1]["hc/stream_cosine"] < with_loss[0]["hc/stream_cosine"] < 1  # the streams separate
    json.dumps(trainer.state.log_history)


def test_figures_of_a_fresh_conversion(tmp_path, llama):
    monitor = HCMonitorCallback().attach(trainer_of(convert_model(llama), tmp_path))
    figures = monitor.measure()
    expected = {"read_dominance": 1.0, "write_norm": 1.0, "mix_offdiag": 0.0, "gain_max": 1.0, "stream_cosine": 1.0}
    expected |= {"dynamic_scale": 0.01, "dynamic_spread": 0.0}
    assert figures == pytest.approx({f"hc/{name}": value for name, value in expected.items()}, abs=1e-6)


def test_figures_of_known_matrices(tmp_path):
    """Two streams; A and b written by hand, the same in every sub-layer."""
    model = hc_llama(hc_mult=2, connection="shc")
    with torch.no_grad():
        for layer in model.model.layers:
            for connection in (layer.attn_hc, layer.mlp_hc):
                connection.static_alpha.copy_(torch.tensor([[3.0, 1.0, 0.5], [-1.0, 0.0, 1.0]]))
                connection.static_beta.copy_(torch.tensor([2.0, 0.0]))
    figures = HCMonitorCallback().attach(trainer_of(model, tmp_path)).measure()
    assert figures["hc/read_dominance"] == 0.75
    assert figures["hc/write_norm"] == pytest.approx(2 / 2**0.5)
    assert figures["hc/mix_offdiag"] == pytest.approx(0.5 / 2**0.5)
    assert figures["hc/gain_max"] == 1 + 6 * 0.5  # [[1, 0.5], [0, 1]] to the sixth
    assert "hc/dynamic_scale" not in figures


def a_thousandth_more(**fields):
    """A model whose mixes are 1.003 times the identity, which bfloat16 has no number for."""
    model = hc_llama(connection="shc", **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("static_alpha"):
                parameter[:, 1:] *= 1.003
    return model


def test_figures_under_autocast_are_float32(tmp_path):
    settings = {"bf16": True, "learning_rate": 0.0, "max_steps": 1, "logging_steps": 1}
    trainer = trainer_of(a_thousandth_more(), tmp_path, **settings)
    HCMonitorCallback().attach(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["hc/gain_max"] == pytest.approx(1.003**6, abs=1e-6)


def test_a_study_under_autocast_is_float32(ids):
    with torch.autocast("cpu", torch.bfloat16):
        studied = study(a_thousandth_more(), [ids])
    assert studied.streams.gain[-1].item() == pytest.approx(1.003**6, abs=1e-6)
    assert studied.matrices.inputs[-1, 0].item() == pytest.approx(1.003**6, abs=1e-6)


def seq2seq(model_type):
    """A model whose encoder, and not its decoder, doubles its streams at every mix, and its first training example."""
    model = convert_model(deepcopy(tiny_of_others(model_type)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoder." in name and name.endswith("static_alpha"):
                parameter[:, 1:] *= 2
    return model, {"input_ids": IDS[0, :12], "labels": IDS[1, :5]}


@pytest.mark.parametrize("model_type", ["t5", "mbart"])
def test_figures_of_an_encoder_decoder_are_its_decoders(model_type, tmp_path):
    model, example = seq2seq(model_type)
    trainer = trainer_of(model, tmp_path, max_steps=1, logging_steps=1, learning_rate=0.0)
    trainer.train_dataset = [example]
    HCMonitorCallback().attach(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["hc/gain_max"] == pytest.approx(1)
    inputs = {"input_ids": IDS[:2], "decoder_input_ids": IDS[:2]}
    assert hc_figures(model, inputs)["hc/gain_max"] == pytest.approx(1)
    assert hc_figures(model, inputs, stack="encoder")["hc/gain_max"] > 2


def test_labels_that_are_not_learned_are_no_text(tmp_path):
    model, example = seq2seq("t5")
    trainer = trainer_of(model, tmp_path)
    trainer.train_dataset = [{**example, "labels": [7, 8, -100, -100]}]
    assert HCMonitorCallback().attach(trainer).inputs["labels"].tolist() == [[7, 8]]
    trainer.train_dataset = [{**example, "labels": [-100, -100]}]
    assert HCMonitorCallback().attach(trainer).inputs["labels"].tolist() == [[-100, -100]]


def test_an_example_that_the_model_can_not_run_on_is_refused_before_training(tmp_path):
    model, example = seq2seq("t5")
    trainer = trainer_of(model, tmp_path)
    trainer.train_dataset = [{"input_ids": example["input_ids"]}]
    with pytest.raises(HyperConnError, match=r"can't run on input_ids \[1, 12\] of the first .* with labels for"):
        HCMonitorCallback().attach(trainer)


def test_a_monitor_that_is_not_attached_says_how(tmp_path):
    trainer = trainer_of(hc_llama(), tmp_path)
    trainer.add_callback(HCMonitorCallback())
    with pytest.raises(HyperConnError, match=r"call `HCMonitorCallback\(\).attach\(trainer\)`"):
        trainer.train()


class Drawn(torch.utils.data.Dataset):
    """Rows that are drawn when they are asked for, from every generator there is."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        row = torch.randint(3, 40, (16,)) + random.randrange(20) + np.random.randint(20)
        return {"input_ids": row, "labels": row}


def test_attaching_draws_nothing(tmp_path):
    states = []
    for watched in (False, True):
        random.seed(0)
        np.random.seed(0)
        trainer = trainer_of(hc_llama(), tmp_path)
        trainer.train_dataset = Drawn()
        if watched:
            HCMonitorCallback().attach(trainer)
        states.append((random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
    assert states[0] == states[1]


def test_padding_is_not_watched(tmp_path):
    model, row = randomise_connections(hc_llama(), 0.3), IDS[0]
    padded = {"input_ids": [0] * 8 + row.tolist(), "attention_mask": [0] * 8 + [1] * len(row)}
    trainer = trainer_of(model, tmp_path)
    expected = hc_figures(model, row[None])
    trainer.train_dataset = [padded]
    assert HCMonitorCallback().attach(trainer).measure() == expected
    batch = {name: torch.tensor([values]) for name, values in padded.items()}
    assert hc_figures(model, batch) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(HyperConnError, match="the mask of the inputs leaves no token"):
        hc_figures(model, {"input_ids": row[None], "attention_mask": torch.zeros(1, len(row))})


def test_a_single_token_has_no_spread():
    figures = hc_figures(hc_llama(), IDS[:1, :1])
    assert figures["hc/dynamic_spread"] == 0
    assert not any(map(math.isnan, figures.values()))


def test_figures_of_each_layer_on_request(tmp_path):
    figures = HCMonitorCallback(per_layer=True).attach(trainer_of(hc_llama(), tmp_path)).measure()
    of_layers = [value for name, value in figures.items() if name.startswith("hc_layers/write_norm/")]
    assert len(of_layers) == 6
    assert sum(of_layers) / 6 == pytest.approx(figures["hc/write_norm"])


COMPILED = {"torch_compile": True, "bf16": True}


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {}),
        ({"gradient_checkpointing": True}, {}),
        *tail((COMPILED, {"num_hidden_layers": 1, "hc_mult": 2})),
    ],
    ids=("eager", "checkpointed", "compiled"),
)
def test_watching_changes_nothing(settings, fields, tmp_path):
    """The same weights after training with dropout, watched or not."""
    weights = []
    for watched in (False, True):
        trainer = trainer_of(hc_llama(attention_dropout=0.1, **fields), tmp_path, **settings)
        if watched:
            HCMonitorCallback().attach(trainer)
        trainer.train()
        weights.append(trainer.model.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


@pytest.mark.parametrize("watch", [hc_figures, lambda model, ids: study(model, [ids])], ids=["figures", "study"])
def test_every_module_keeps_its_mode_also_after_an_error(watch, ids):
    model = hc_llama().train()
    model.model.layers[1].eval()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    watch(model, ids)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(IndexError):
        watch(model, ids + 1000)
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_hooks for module in model.modules() if hasattr(type(module), "matrices"))


@pytest.mark.parametrize("fields", [{}, {"connection": "shc"}, {"connection": "mhc"}, {"connection": "ihc"}])
def test_observed_matrices_are_those_that_the_streams_went_through(fields, ids):
    model, seen, written = hc_llama(hc_mult=4, **fields), [], []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    layer = model.model.layers[1]
    layer.mlp.register_forward_hook(lambda module, args, output: written.append(output))
    with observe(model, seen.append), torch.no_grad():
        model(ids)
    assert [observation.connection.sub_layer for observation in seen] == list(range(6))
    before, after = seen[3], seen[4]
    mixed = before.mixes.transpose(-1, -2) @ before.streams
    update = before.beta.unsqueeze(-1) * written[0].unsqueeze(-2)
    torch.testing.assert_close(mixed + update, after.streams, **FLOAT32)


def test_parts_are_observed_too(ids):
    model, seen = hc_llama(hc_mult=4, connection="frac"), []
    with observe(model, seen.append), torch.no_grad():
        model(ids)
    assert seen[0].reads.shape == seen[0].mixes.shape == (*ids.shape, 4, 4)


def test_what_can_not_be_watched(tmp_path, llama):
    with pytest.raises(HyperConnError, match="LlamaForCausalLM has no streams"):
        HCMonitorCallback().attach(trainer_of(llama, tmp_path))
    trainer = trainer_of(hc_llama(), tmp_path)
    trainer.train_dataset = [{"text": "not tokenised"}]
    with pytest.raises(HyperConnError, match=r"holds text, and no input_ids .* Tokenize"):
        HCMonitorCallback().attach(trainer)
