"""Estimates of training: against times that were measured, states of AdamW, and the values between layers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.estimates import MODELS, TOKENS, estimated
from benchmarks.timing import RESULTS
from hf_hyperconn.analysis.estimates import estimate
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.kinds import kind_of
from hf_hyperconn.models.connection_fields import complete

from .conftest import hc_llama
from .edits import configure
from .other_families import tiny as tiny_of_others
from .tolerances import ESTIMATED_TIME

MEASURED = json.loads((RESULTS / "models_cuda.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("shape", ["Llama-3.2-1B", "Llama-3.1-8B"])
@pytest.mark.parametrize("connection", ["shc", "dhc"])
def test_the_time_of_a_step_is_near_a_measured_one(shape, connection):
    """Of compiled steps, and of eager ones with so many tokens that launches don't count."""
    name = f"{connection.upper()}×4"
    measured = [
        row["step"]["ratio"]
        for row in MEASURED
        if row["shape"] == shape
        and "step" in row
        and (row["case"] == f"{name}, compiled" or (row["case"], row["tokens"]) == (name, 16384))
    ]
    found = estimated(MODELS[shape], connection=connection)
    assert found.tokens == TOKENS
    assert len(measured) >= 1
    for ratio in measured:
        assert found.time == pytest.approx(ratio, **ESTIMATED_TIME)


def test_the_state_is_that_of_a_step_with_adamw():
    model = hc_llama(hc_mult=4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    optimizer.step()
    held = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    held += [
        moment for state in optimizer.state.values() for name, moment in state.items() if name.startswith("exp_avg")
    ]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if "hc" not in name}
    base = sum(shape.numel() for shape in shapes.values())
    found = estimate(model.config.to_dict(), ("weight",), parameters=base, flops=2 * base, tokens=6)
    assert found.state + found.added_state == sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("fields", [{"connection": name} for name in ("shc", "dhc", "mhc", "ihc", "frac", "altup")])
def test_checkpointing_keeps_what_layers_hand_on(fields):
    model, handed_on = hc_llama(**fields), []
    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(lambda module, args: handed_on.append(args[0].numel()))
    model(torch.arange(6)[None])
    config = model.config.to_dict()
    assert {*handed_on} == {6 * kind_of(config).rows_between_layers(config) * config["hidden_size"]}


def test_attention_residuals_hand_on_more_from_layer_to_layer():
    config = {"hidden_size": 32, "num_hidden_layers": 3, **complete({"connection": "attnres", "hc_mult": 1})}
    found = estimate(config, parameters=2048, flops=4096, tokens=6)
    assert (found.added_layer_inputs, found.time) == (None, None)
    assert found.kept > 0


def test_the_command_is_alike_for_a_base_and_its_conversion(llama_folder, tmp_path, capsys):
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", hc_mult=2, verify="structure").path
    estimates = []
    for model in ([str(llama_folder), "-n", "2"], [str(out)]):
        assert main(["estimate", *model, "--gpus", "8", "--json"]) == 0
        estimates.append({**json.loads(capsys.readouterr().out), "model": None})
    assert estimates[0] == estimates[1]
    assert main(["estimate", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "Estimates for 1 GPU, 4,096 tokens a step, weights in float32, AdamW:" in shown
    assert main(["estimate", str(out), "-n", "4"]) == 1
    assert "has connections already. Leave out their options." in capsys.readouterr().err
    assert main(["estimate", str(tmp_path)]) == 1
    assert "error: " in capsys.readouterr().err


def test_estimates_of_what_is_no_whole_model_are_refused(llama_folder, tmp_path, capsys):
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", hc_mult=2, verify="structure").path
    configure(out, quantization_config={"quant_method": "awq"})
    assert main(["estimate", str(out)]) == 1
    assert "are quantized by awq, and packed weights are not trained. Give its base." in capsys.readouterr().err
    configure(out, quantization_config=None)
    connections = load_file(out / "model-00002-of-00002.safetensors")
    for path in [*out.glob("*.safetensors"), out / "model.safetensors.index.json"]:
        path.unlink()
    save_file(connections, out / "model.safetensors")
    assert main(["estimate", str(out)]) == 1
    assert "connections alone" in capsys.readouterr().err


def test_a_conversion_of_a_model_in_another_is_known_as_one(tmp_path, capsys):
    """Its fields of connections are in the config of its part."""
    tiny_of_others("llava").save_pretrained(tmp_path / "llava")
    assert main(["estimate", str(tmp_path / "llava"), "--json"]) == 0
    of_base = json.loads(capsys.readouterr().out)
    out = convert_checkpoint(str(tmp_path / "llava"), tmp_path / "out", verify="structure").path
    assert main(["estimate", str(out), "--json"]) == 0
    assert {**json.loads(capsys.readouterr().out), "model": None} == {**of_base, "model": None}
