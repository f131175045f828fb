"""Connections in another model than the usual one: an encoder or a decoder alone, a vision tower (`--stack`)."""

import copy
import json
import shutil

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

import hf_hyperconn
from hf_hyperconn import convert_model
from hf_hyperconn.conversion import cli
from hf_hyperconn.errors import HyperConnectionFileError, UnsupportedCheckpointError
from hf_hyperconn.families.family import find_family, name_of_family
from hf_hyperconn.families.reading.classes import FamilyName
from hf_hyperconn.training.hc_file import load_hc, save_hc

from .conftest import randomise_connections
from .other_families import fields_of, inputs_of, tiny
from .test_families import compared
from .test_language_models import PIXELS, SEEN, equal_images, seeing

INPUTS = {"input_ids": SEEN, "pixel_values": PIXELS}
CHOSEN = ("llava__vision_tower", "whisper__decoder", "t5__encoder", "qwen2_vl__visual")


def connections(model) -> set[str]:
    """Where a model has its connections."""
    return {name.rpartition(".layer")[0] for name, _ in model.named_modules() if name.endswith("_hc")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Of each family a base and its conversion."""
    place = tmp_path_factory.mktemp("chosen")
    for name in CHOSEN:
        tiny(name).save_pretrained(place / name / "base")
        stack = ["--stack", FamilyName.of(name).stack, "--verify", "structure"]
        assert cli.main(["convert", str(place / name / "base"), str(place / name / "hc"), *stack, "-q"]) == 0
    return place


@pytest.mark.parametrize("name", CHOSEN)
def test_names_have_parts(name):
    assert str(FamilyName.of(name)) == name
    assert find_family(name).base_model_type == FamilyName.of(name).own
    three = FamilyName("llava", "siglip_vision_model", "vision_tower")
    assert FamilyName.of(str(three)) == three
    assert FamilyName.of("llava__mistral") == FamilyName("llava", "mistral")


@pytest.mark.parametrize("name", ["whisper__mistral", "whisper__mistral__encoder", "llama__layers", "llava__../x"])
def test_names_of_nothing_are_refused(name):
    with pytest.raises(UnsupportedCheckpointError):
        find_family(name)


def test_they_equal_their_bases_without_the_package(place):
    assert sum(compared(place, list(CHOSEN), new_tokens=4).values(), []) == []


@pytest.mark.parametrize("connection", ["dhc", "mhc", "attnres"])
@torch.no_grad()
def test_a_vision_tower_sees_what_the_bases_sees(connection):
    base = seeing()
    converted = convert_model(base, connection=connection, stack="vision_tower")
    assert connections(converted) == {"model.vision_tower.encoder"}
    found, expected = (model(**INPUTS, output_hidden_states=True) for model in (converted, base))
    assert torch.equal(found.logits, expected.logits)
    assert equal_images(found, expected)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(*(model.generate(**INPUTS, **settings) for model in (converted, base)))
    assert {"HCCLIPEncoderLayer", "LlamaDecoderLayer"} <= set(converted._no_split_modules)


@pytest.mark.parametrize(("stack", "prefix"), [("encoder", "model.encoder"), ("decoder", "model.decoder")])
@torch.no_grad()
def test_one_of_two_has_connections(stack, prefix):
    base = tiny("whisper")
    converted = convert_model(base, stack=stack)
    assert connections(converted) == {prefix}
    inputs = inputs_of(base)
    assert torch.equal(converted(**inputs).logits, base(**inputs).logits)


def test_a_vision_tower_learns_and_is_saved_again(tmp_path):
    model = convert_model(seeing(), hc_mult=2, stack="vision_tower").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**INPUTS, labels=SEEN).loss.backward()
    # what the language model takes is the last layer's input, so its last layer learns nothing, as the base's
    learning = {name for name, each in model.named_parameters() if "_hc." in name and each.grad is not None}
    assert {name.split(".")[4] for name in learning} == {"0", "1", "2"}
    optimizer.step()
    model.eval().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["vision_config"]["hc_mult"]) == ("hc_llava__vision_tower", 2)
    assert "hc_mult" not in config["text_config"]
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(again(**INPUTS).logits, model(**INPUTS).logits)


def test_the_class_of_the_usual_stack_takes_no_other(place):
    with pytest.raises(ValueError, match="'hc_llava', and this is a 'hc_llava__vision_tower'. Load it by the"):
        hf_hyperconn.HCLlavaForConditionalGeneration.from_pretrained(place / "llava__vision_tower" / "hc")


def test_the_usual_stack_by_its_name_is_the_usual_family():
    base = seeing()
    assert type(convert_model(base, stack="language_model")) is type(convert_model(base))
    assert name_of_family(tiny("opt").config.to_dict(), "decoder") == "opt"


def test_a_config_may_choose_another_tower():
    text = {**fields_of("llama"), "model_type": "llama"}
    for vision, name in ((CLIPVisionConfig, "llava__vision_tower"), (SiglipVisionConfig, None)):
        config = LlavaConfig(text_config=text, vision_config=vision(**fields_of(vision.model_type)), image_token_id=90)
        expected = name or "llava__siglip_vision_model__vision_tower"
        assert name_of_family(config.to_dict(), "vision_tower") == expected
        model = convert_model(LlavaForConditionalGeneration(config).eval(), stack="vision_tower")
        assert model.config.model_type == f"hc_{expected}"


def test_connections_kept_apart_belong_to_their_stack(tmp_path):
    base = seeing()
    trained = randomise_connections(convert_model(copy.deepcopy(base), stack="vision_tower"))
    save_hc(trained, tmp_path / "hc.safetensors")
    again = load_hc(copy.deepcopy(base), tmp_path / "hc.safetensors")
    assert torch.equal(again(**INPUTS).logits, trained(**INPUTS).logits)
    with pytest.raises(HyperConnectionFileError, match="model_type='hc_llava__vision_tower'"):
        load_hc(convert_model(base), tmp_path / "hc.safetensors")


def test_a_folder_is_verified_inspected_drawn_and_described(tmp_path, capsys):
    base, out = tmp_path / "base", tmp_path / "hc"
    seeing().save_pretrained(base)
    assert cli.main(["convert", str(base), str(out), "--stack", "vision_tower"]) == 0
    assert "logits, hidden states: equal to the base, bit for bit" in capsys.readouterr().err
    assert cli.main(["verify", str(out), "--against", str(base), "-q"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(out)]) == 0
    assert "Llava (vision_tower), 4 layers" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert "in the place of the residual connections of its vision_tower" in card
    assert "--stack vision_tower" in card
    assert cli.main(["refresh", str(out)]) == 0
    assert cli.main(["plot", str(out), "-o", str(tmp_path / "sheet.png")]) == 0


def test_a_changed_tower_is_found(place, tmp_path, capsys):
    base = shutil.copytree(place / "llava__vision_tower" / "base", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["vision_config"]["layer_norm_eps"] = 0.1
    (base / "config.json").write_text(json.dumps(config))
    assert cli.main(["verify", str(place / "llava__vision_tower" / "hc"), "--against", str(base)]) == 3
    assert "layer_norm_eps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model_type", "stack", "message"),
    [
        ("llava", "visual", "stack must be vision_tower or language_model"),
        ("gpt2", "decoder", "stack must be None, for its one list of layers"),
        ("whisper", "vision_tower", "stack must be encoder or decoder"),
        ("video_llava", "video_tower", "makes video_tower and image_tower of one config"),
    ],
)
def test_another_stack_is_refused(model_type, stack, message, tmp_path, capsys):
    tiny(model_type).save_pretrained(tmp_path / "base")
    assert cli.main(["convert", str(tmp_path / "base"), str(tmp_path / "hc"), "--stack", stack]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "hc").exists()
    with pytest.raises(UnsupportedCheckpointError, match=message):
        convert_model(tiny(model_type), stack=stack)
