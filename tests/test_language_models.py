"""Models with a language model in them, which has the hyper-connections: Llava, Gemma 3 and others."""

import copy
import json

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, InstructBlipModel, LlavaForConditionalGeneration

import hf_hyperconn
from hf_hyperconn import convert_model
from hf_hyperconn.conversion import cli
from hf_hyperconn.errors import HyperConnectionFileError
from hf_hyperconn.families.family import find_family, name_of_family
from hf_hyperconn.kinds import CONVERTIBLE
from hf_hyperconn.training.hc_file import load_hc, save_hc

from .conftest import randomise_connections
from .other_families import fields_of, tiny
from .test_families import compared

IMAGE = 90  # the token in whose place an image goes
PATCHES = 16  # of an image of 16 by 16, each 4 by 4
GENERATOR = torch.Generator().manual_seed(0)
PIXELS = torch.randn(2, 3, 16, 16, generator=GENERATOR)
WORDS = torch.randint(3, 80, (2, 8), generator=GENERATOR)
SEEN = torch.cat([WORDS[:, :4], torch.full((2, PATCHES), IMAGE), WORDS[:, 4:]], dim=1)


def seeing(model_type: str = "llava", text: str | None = None):
    """A tiny model with a token for images, and possibly another language model than usual."""
    fields = fields_of(model_type) | {"image_token_id": IMAGE}
    if text is not None:
        fields["text_config"] = {**fields_of(text), "model_type": text}
    if model_type == "gemma3":
        fields["mm_tokens_per_image"] = PATCHES
    return randomised(CONFIG_MAPPING[model_type](**fields))


def randomised(config):
    """A model with random weights, also in its norms and biases."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llava with a Mistral in it, as `llava/base` and `llava/dhc4`."""
    place = tmp_path_factory.mktemp("llava")
    seeing(text="mistral").save_pretrained(place / "llava" / "base")
    assert cli.main(["convert", *(str(place / "llava" / name) for name in ("base", "dhc4")), "-q"]) == 0
    return place / "llava" / "dhc4"


def equal_images(outputs, expected) -> bool:
    """Tell whether two outputs have the same features of images: a tensor, from Transformers 5.24 on a tuple."""
    pair = (output.image_hidden_states for output in (outputs, expected))
    return all(map(torch.equal, *((states,) if isinstance(states, torch.Tensor) else states for states in pair)))


@pytest.mark.parametrize(("model_type", "text"), [("llava", None), ("llava", "qwen2"), ("gemma3", None)])
@torch.no_grad()
def test_what_it_says_of_images_is_what_the_base_says(model_type, text):
    base = seeing(model_type, text)
    converted = convert_model(base)
    outputs, expected = (
        model(input_ids=SEEN, pixel_values=PIXELS, output_hidden_states=True) for model in (converted, base)
    )
    assert torch.equal(outputs.logits, expected.logits)
    assert equal_images(outputs, expected)
    assert all(map(torch.equal, outputs.hidden_states, expected.hidden_states))
    assert not torch.equal(outputs.logits, converted(input_ids=SEEN, pixel_values=-PIXELS).logits)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    continued = [model.generate(input_ids=SEEN, pixel_values=PIXELS, **settings) for model in (converted, base)]
    assert torch.equal(*continued)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("connection", [kind for kind in CONVERTIBLE if kind != "attnres"])
@torch.no_grad()
def test_what_is_added_between_layers_is_added_to_every_stream(connection, dtype):
    """Qwen3-VL adds what its vision model saw to the streams after its first layers."""
    base, inputs = deep_stack(dtype)
    converted = convert_model(base, connection=connection)
    outputs, expected = (model(**inputs, output_hidden_states=True) for model in (converted, base))
    assert torch.equal(outputs.logits, expected.logits)
    assert all(map(torch.equal, outputs.hidden_states, expected.hidden_states))
    without = base(**{**inputs, "pixel_values": -inputs["pixel_values"]})
    assert not torch.equal(without.logits, expected.logits)


def test_values_of_sub_layers_take_nothing_between_layers():
    base, inputs = deep_stack(torch.float32)
    with pytest.raises(ValueError, match="_deepstack_process adds to residual streams, and connection 'attnres' has"):
        convert_model(base, connection="attnres")(**inputs)


def deep_stack(dtype: torch.dtype):
    """A tiny Qwen3-VL and an image of 4 by 4 patches, which become 4 tokens."""
    fields = fields_of("qwen3_vl") | {"image_token_id": IMAGE, "vision_start_token_id": 92, "vision_end_token_id": 93}
    fields["vision_config"] |= {
        **{"depth": 4, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 64},
        "deepstack_visual_indexes": [0, 1, 2],
    }
    model = randomised(CONFIG_MAPPING["qwen3_vl"](**fields)).to(dtype)
    ids = torch.cat([WORDS[:1, :4], torch.tensor([[92, *[IMAGE] * 4, 93]]), WORDS[:1, 4:]], dim=1)
    return model, {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, dtype=dtype),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def test_the_layers_to_wrap_are_those_of_every_part():
    base = seeing()
    others = set(base._no_split_modules) - {"LlamaDecoderLayer"}
    assert others
    assert others | {"HCLlamaDecoderLayer"} <= set(convert_model(base)._no_split_modules)


def test_it_learns_from_images_through_the_connections():
    model = convert_model(seeing(), hc_mult=2).train()
    model(input_ids=SEEN, pixel_values=PIXELS, labels=SEEN).loss.backward()
    connections = {name: p.grad for name, p in model.named_parameters() if "_hc." in name}
    assert connections
    assert [name for name, grad in connections.items() if grad is None] == []
    assert model.get_submodule("model.vision_tower").parameters().__next__().grad is not None


def test_a_language_model_may_have_its_layers_in_a_decoder():
    """As OPT has, the usual one of InstructBLIP."""
    fields = fields_of("instructblip") | {"image_token_index": IMAGE}
    fields["qformer_config"] |= {"encoder_hidden_size": 32}
    base = InstructBlipModel(CONFIG_MAPPING["instructblip"](**fields)).eval()
    inputs = {"pixel_values": PIXELS, "qformer_input_ids": WORDS, "input_ids": WORDS}
    converted = convert_model(copy.deepcopy(base), hc_mult=2)
    with torch.no_grad():
        outputs, expected = (model(**inputs).language_model_outputs for model in (converted, base))
    assert torch.equal(outputs.last_hidden_state, expected.last_hidden_state)
    assert converted.language_model.decoder.config.hc_mult == 2


def test_another_language_model_than_usual_has_a_name_of_its_own(folder):
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["text_config"]["model_type"]) == ("hc_llava__mistral", "hc_mistral")
    assert (config["text_config"]["connection"], config["text_config"]["hc_mult"]) == ("dhc", 4)
    assert "connection" not in config
    base = json.loads((folder.with_name("base") / "config.json").read_text())
    assert name_of_family(base) == name_of_family(config) == "llava__mistral"
    assert [name for name in base.keys() - config.keys() if name != "_name_or_path"] == []
    assert {path.name for path in folder.glob("*.py")} == set(find_family("llava__mistral").code(config))


def test_it_equals_its_base_without_the_package(folder):
    assert sum(compared(folder.parents[1], ["llava"], new_tokens=4).values(), []) == []


def test_a_config_of_another_language_model_is_refused(folder):
    config = type(AutoModelForImageTextToText.from_pretrained(folder).config)
    for other in ({"model_type": "qwen2"}, CONFIG_MAPPING["qwen2"]()):
        with pytest.raises(ValueError, match="text_config must have model_type 'hc_mistral' .*(got 'qwen2')"):
            config(text_config=other)


def test_fields_of_connections_are_those_of_the_language_model():
    config_class = find_family("llava").configuration_module().HCLlavaConfig
    sizes = {name: value for name, value in fields_of("llava").items() if name != "text_config"}
    for text in (None, fields_of("llama"), CONFIG_MAPPING["llama"](**fields_of("llama"))):
        config = config_class(**sizes, text_config=text, connection="keel", hc_mult=1)
        assert (config.text_config.model_type, config.text_config.connection) == ("hc_llama", "keel")
        assert not hasattr(config, "connection")
        if text is not None:
            assert config.text_config.hidden_size == 32
        again = config_class.from_dict(config.to_dict())
        assert again.text_config.to_dict() == config.text_config.to_dict()
    with pytest.raises(ValueError, match="connection belong in text_config, which is a HCLlamaConfig"):
        config_class(**sizes, text_config=again.text_config, connection="shc")


def test_a_config_that_is_flat_stays_flat(tmp_path):
    """Qwen2-VL's first checkpoints have no `text_config`."""
    base = tiny("qwen2_vl")
    base.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    nested = json.loads(path.read_text())
    path.write_text(json.dumps({**nested.pop("text_config"), **nested}))
    assert cli.main(["convert", str(tmp_path / "base"), str(tmp_path / "hc"), "-q"]) == 0
    config = json.loads((tmp_path / "hc" / "config.json").read_text())
    assert (config["connection"], "text_config" in config) == ("dhc", False)
    assert cli.main(["verify", str(tmp_path / "hc"), "--against", str(tmp_path / "base"), "-q"]) == 0
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "hc")
    assert model.config.text_config.connection == "dhc"
    assert torch.equal(model(WORDS).logits, base(WORDS).logits)


@pytest.mark.parametrize("text", [None, "llama", ["llama"], 1])
def test_a_text_config_that_is_none_is_no_traceback(text, tmp_path, capsys):
    tiny("llava").save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_config": text}))
    assert cli.main(["convert", str(tmp_path / "base"), str(tmp_path / "hc"), "-q"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "hc").exists()


def test_its_connections_can_be_kept_apart(tmp_path):
    base = seeing()
    trained = randomise_connections(convert_model(copy.deepcopy(base)))
    save_hc(trained, tmp_path / "hc.safetensors")
    again = load_hc(copy.deepcopy(base), tmp_path / "hc.safetensors")
    inputs = {"input_ids": SEEN, "pixel_values": PIXELS}
    assert torch.equal(again(**inputs).logits, trained(**inputs).logits)
    with pytest.raises(HyperConnectionFileError, match="model_type='hc_llava'"):
        load_hc(seeing(text="qwen2"), tmp_path / "hc.safetensors")


def test_a_folder_is_inspected_described_and_current(folder, capsys):
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["connection"], report["hc_mult"], report["trained"]) == ("dhc", 4, False)
    before = (folder / "config.json").read_bytes()
    assert cli.main(["refresh", str(folder)]) == 0
    assert (folder / "config.json").read_bytes() == before
    capsys.readouterr()
    assert cli.main(["card", str(folder)]) == 0
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-text-to-text"
    assert "AutoModelForImageTextToText.from_pretrained(model_id" in card.text


def test_the_next_step_names_the_class_that_loads_it(tmp_path, capsys):
    for model_type, auto in (("llava", "AutoModelForImageTextToText"), ("vit", "AutoModel")):
        tiny(model_type).save_pretrained(tmp_path / model_type)
        arguments = [str(tmp_path / model_type), str(tmp_path / f"{model_type}-hc"), "--verify", "structure"]
        assert cli.main(["convert", *arguments]) == 0
        output = capsys.readouterr()
        assert f"{auto}.from_pretrained(" in output.out + output.err


def test_refreshing_keeps_a_config_as_it_is_written(tmp_path):
    """GPT-2's `n_layer` is no `num_hidden_layers`."""
    tiny("gpt2").save_pretrained(tmp_path / "base")
    assert cli.main(["convert", str(tmp_path / "base"), str(tmp_path / "hc"), "-q", "--verify", "structure"]) == 0
    path = tmp_path / "hc" / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "hc_version": "0.0.1"}))
    assert cli.main(["refresh", str(tmp_path / "hc"), "--accept-changes"]) == 0
    assert json.loads(path.read_text()) == {**written, "hc_version": hf_hyperconn.__version__}


def test_a_model_that_was_saved_after_training_is_loaded_by_the_bases_own_auto_class(tmp_path):
    model = convert_model(seeing())
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert isinstance(again, LlavaForConditionalGeneration)
    state = model.state_dict()
    assert [name for name, value in again.state_dict().items() if not torch.equal(value, state[name])] == []
