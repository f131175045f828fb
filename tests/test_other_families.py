"""The families tested beside those of test_families.py: converted on the command line, loaded without this package."""

import copy
import inspect
import json
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel, TrainingArguments

import hf_hyperconn
from hf_hyperconn import HCTrainer, convert_model
from hf_hyperconn.conversion import cli
from hf_hyperconn.conversion.verify import numeric
from hf_hyperconn.conversion.verify.start import hyper_connection_shapes
from hf_hyperconn.errors import UnsupportedCheckpointError, VerificationError
from hf_hyperconn.families.family import find_family
from hf_hyperconn.models.modeling_hc_llama import HCLlamaPreTrainedModel
from hf_hyperconn.models.modeling_hyper_connections import HyperConnectionHead

from .conftest import asked_for
from .marks import few
from .other_families import COMMON, LONG_TAIL, OF_EACH_FORM, RELEASE, inputs_of, long_tail, loss_of, tiny
from .processes import elsewhere
from .record import listed
from .test_families import DTYPES, compared

# gated, or without a weight
NORMS_THAT_STAY = (
    *("axk2", "bamba", "gemma4_text", "granitemoehybrid", "kimi_linear", "llama4_text", "mamba2"),
    *("nanochat", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text", "qwen3_next"),
)
NORMS_CALLED_OTHERWISE = ("falcon_mamba", "inkling_text", "moonshine")
KEEL, DYT = {"connection": "keel", "hc_mult": 1}, {"norm": "dyt"}
IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def place(request, tmp_path_factory) -> Path:
    """The bases of the families asked for and their conversions, `<model type>/base`, `<model type>/dhc4`."""
    place = tmp_path_factory.mktemp("families")
    for model_type in asked(request):
        base = place / model_type / "base"
        tiny(model_type).save_pretrained(base)
        verify = "full" if model_type in COMMON else "structure"
        assert cli.main(["convert", str(base), str(base.with_name("dhc4")), "-q", "--verify", verify]) == 0
    return place


def asked(request) -> list[str]:
    """The families that a module's selected tests are about, of those that the installed Transformers has."""
    model_types = []
    for model_type in LONG_TAIL:
        if model_type in asked_for(request, "model_type"):
            with suppress(pytest.skip.Exception):
                tiny(model_type)
                model_types.append(model_type)
    return model_types


@pytest.fixture(scope="module")
def differing(request, place) -> dict[str, list[str]]:
    return compared(place, asked(request), new_tokens=4)


def loaded(folder: Path, model_type: str) -> PreTrainedModel:
    """A conversion, by the class of its family."""
    family = find_family(model_type)
    return getattr(family.modeling_module(), f"HC{family.usual_architecture}").from_pretrained(folder)


def prefixes_of_stacks(names: Iterable[str]) -> list[str]:
    """What comes before the index of a layer, for each stack, an encoder's before a decoder's."""
    prefixes = {match[1] for name in names if (match := re.match(r"(.*?\.)0\.\w+_hc\.", name))}
    return sorted(prefixes, key=lambda prefix: ("encoder" not in prefix, prefix))


def train(model: PreTrainedModel, learning_rate: float, steps: int) -> list[float]:
    """The loss at each step, on the same inputs."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=learning_rate), []
    for _ in range(steps):
        loss = loss_of(model, inputs_of(model))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@long_tail
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_to_the_base_without_the_package(model_type, dtype, place, differing):
    tiny(model_type)
    assert differing[f"{place / model_type / 'dhc4'} {dtype} None"] == []


@long_tail
def test_trained_and_saved_it_loads_again(model_type, place, tmp_path):
    tiny(model_type)
    torch.manual_seed(0)
    model = loaded(place / model_type / "dhc4", model_type).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "_hc.static_" in name}
    train(model, learning_rate=0.02, steps=3)
    parameters = dict(model.named_parameters())
    assert [name for name, value in before.items() if torch.equal(parameters[name], value)] == []
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path, model_type)
    assert type(again) is type(model)
    state = model.state_dict()
    assert state.keys() == again.state_dict().keys()
    if model_type == "youtu":  # Transformers' own class, too, zeroes the row of the padding token when it is loaded
        assert not again.get_input_embeddings().weight[0].any()
        model.get_input_embeddings().weight.data[0] = 0
    assert [name for name, value in again.state_dict().items() if not torch.equal(value, state[name])] == []


@pytest.mark.slow
def test_trainer_saves_what_loads_without_the_package(tmp_path):
    """With checkpoints, whose code is written by the config."""
    model = convert_model(copy.deepcopy(tiny("glm4")), hc_mult=2)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    settings = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    HCTrainer(model, TrainingArguments(str(tmp_path / "run"), **settings), train_dataset=rows).train()
    saved = tmp_path / "run" / "checkpoint-2"
    assert {path.name for path in saved.glob("*.py")} == set(find_family("glm4").code({}))
    model.save_pretrained(tmp_path / "again")
    comparison = {"base": str(saved), "converted": [str(tmp_path / "again")], "attention": None, "dtypes": ["float32"]}
    found = elsewhere([{"comparisons": [{**comparison, "prompts": IDS.tolist()}], "new_tokens": 4}], tmp_path)
    assert list(found.values()) == [[]]


@long_tail
def test_the_table_knows_the_classes_and_the_norm(model_type, place):
    """What the converter writes without torch is what the class of the family makes."""
    base, family = tiny(model_type), find_family(model_type)
    model = convert_model(base)
    assert type(model).__module__ == f"hf_hyperconn.models.{Path(family.files[1]).stem}"
    added = {name: p for name, p in model.named_parameters() if "_hc." in name}
    stacks = prefixes_of_stacks(added)
    loaded_from = dict(type(model).from_prenorm(place / model_type / "base").named_parameters())
    assert [name for name, parameter in added.items() if not torch.equal(loaded_from[name], parameter)] == []
    shapes = dict(hyper_connection_shapes(model.config.to_dict(), family, stacks))
    assert {name: tuple(p.shape) for name, p in added.items()} == shapes
    with safe_open(next((place / model_type / "dhc4").glob("model-*2-of-*2.safetensors")), "pt") as file:
        on_disk = dict(zip(prefixes_of_stacks(file.keys()), stacks, strict=True))
        written = {
            name.replace(stack, on_disk[stack], 1): file.get_tensor(name)
            for stack in on_disk
            for name in file.keys()  # noqa: SIM118
            if name.startswith(stack)
        }
    assert {name: torch.equal(written[name], added[name]) for name in added} == dict.fromkeys(added, True)
    for suffix, name in family.heads.items():
        assert hasattr(family.modeling_module(), f"HC{name}"), suffix


def new(model_type: str, **fields):
    """A new model with the sizes of the tiny one."""
    base, family = tiny(model_type), find_family(model_type)
    sizes = {
        name: value for name, value in base.config.to_dict().items() if name not in ("model_type", "architectures")
    }
    config = getattr(family.configuration_module(), f"HC{family.name}Config")(**{**sizes, **fields})
    torch.manual_seed(0)
    return getattr(family.modeling_module(), f"HC{family.usual_architecture}")(config)


@pytest.mark.parametrize("fields", few((KEEL, DYT), KEEL), ids=["keel", "dyt"])
@long_tail
def test_it_trains_with_what_has_no_equivalent(model_type, fields):
    tiny(model_type)
    if model_type.startswith("modernbert"):
        pytest.skip("its initialisation divides by a number of layers, of which it has none while it is built")
    if "norm" in fields and model_type in NORMS_THAT_STAY:
        with pytest.raises(ValueError, match="norm is 'dyt', which can't stand for the"):
            new(model_type, **fields)
        return
    model = new(model_type, **fields)
    if "norm" in fields and model_type in NORMS_CALLED_OTHERWISE:
        with pytest.raises(RuntimeError, match="size of tensor|input to conv1d"):
            loss_of(model, inputs_of(model))
        return
    losses = train(model, learning_rate=0.05, steps=5)
    assert losses[-1] < losses[1]  # of the first step not all is smooth: a class token starts at 0, where norms jump


@pytest.mark.parametrize("model_type", ["gptj", "t5", "umt5", "whisper"])
def test_what_is_recorded_is_the_bases(model_type):
    """T5 adds in a module that is not called any more, and there Transformers records the weights of attention."""
    base = tiny(model_type)
    converted = convert_model(base)
    for model in (base, converted):
        model.set_attn_implementation("eager")
    inputs = {**inputs_of(base), "output_attentions": True, "output_hidden_states": True}
    found, expected = converted(**inputs), base(**inputs)
    assert found.keys() == expected.keys()
    for name in [key for key in expected if key.endswith(("attentions", "hidden_states"))]:
        assert len(found[name]) == len(expected[name])
        assert expected[name] or transformers.__version__ != RELEASE  # T5 itself records none in 5.16
        assert all(map(torch.equal, found[name], expected[name])), name


def test_whisper_generates_after_a_prompt():
    """No start token comes before it, which Transformers knows by the model type."""
    base = tiny("whisper")
    features = inputs_of(base)["input_features"]
    prompt = torch.tensor([[7, 40, 41, base.generation_config.decoder_start_token_id or 1, 5]]).expand(
        len(features), -1
    )
    found, expected = (
        model.generate(features, decoder_input_ids=prompt, max_new_tokens=6, eos_token_id=None)
        for model in (convert_model(base), base)
    )
    assert torch.equal(found, expected)


def test_a_layer_whose_last_line_has_a_comment_is_known(caplog):
    convert_model(tiny("bloom"))
    assert "is not the one that" not in caplog.text


def test_a_constructor_takes_what_the_bases_takes():
    base, hc = (getattr(package, name) for package, name in ((transformers, "ViTModel"), (hf_hyperconn, "HCViTModel")))
    assert inspect.signature(hc.__init__) == inspect.signature(base.__init__)
    config = hc.config_class(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    assert hc(config, add_pooling_layer=False, use_mask_token=True).embeddings.mask_token is not None


def test_a_head_without_a_base_model_is_refused():
    class Alone(transformers.LlamaPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.score = torch.nn.Linear(config.hidden_size, 2)
            self.post_init()

    class HCAlone(HyperConnectionHead, HCLlamaPreTrainedModel, Alone):
        model_class = hf_hyperconn.HCLlamaModel

    config = hf_hyperconn.HCLlamaConfig(hidden_size=32, num_attention_heads=4)
    with pytest.raises(ValueError, match="HCAlone has no HCLlamaModel in it.*such as LlamaModel itself"):
        HCAlone(config)


def test_an_auto_class_without_a_base_model_has_no_head():
    """Seamless M4T's text model has an encoder and a decoder of the base model's, not that."""
    if transformers.__version__ != RELEASE:
        pytest.skip("another release has another decoder, or no Cohere Compass, whose head calls a general one's")
    assert find_family("seamless_m4t").heads == {"Model": "SeamlessM4TModel"}
    assert "CohereCompassTextForSequenceClassification" in find_family("cohere_compass_text").heads.values()


@pytest.mark.parametrize("model_type", ["gpt2", "mamba2", "t5"])
def test_output_projections_start_as_the_base_starts_them_but_smaller(model_type):
    """By a rule of the family's own, which may be one for a module around them."""
    family, hc_config = find_family(model_type), convert_model(tiny(model_type), hc_mult=4).config
    torch.manual_seed(0)
    base = getattr(transformers, family.usual_architecture)(tiny(model_type).config)
    torch.manual_seed(0)
    new = getattr(hf_hyperconn, f"HC{family.usual_architecture}")(hc_config)
    expected = dict(base.named_parameters())
    scaled = {
        f"{name}.{module.hc_output_projection}"
        for name, module in new.named_modules()
        if hasattr(module, "hc_output_projection")
    }
    assert len(scaled) >= 4
    for name, value in new.named_parameters():
        if name in expected:
            assert torch.equal(value, expected[name] / 2 if name in scaled else expected[name]), name


def test_another_form_of_a_layer_is_refused():
    """Pythia adds attention and MLP at once; GPT-NeoX's config can ask for one after the other."""
    base = copy.deepcopy(tiny("gpt_neox"))
    connections = [name for name, _ in convert_model(base).named_parameters() if "_hc" in name]
    assert connections[0].startswith("gpt_neox.layers.0.attention_mlp_hc.")
    config = type(base.config)(**{**base.config.to_dict(), "use_parallel_residual": False})
    message = "use_parallel_residual is False, with which the layer is another one"
    with pytest.raises(UnsupportedCheckpointError, match=message):
        convert_model(type(base)(config))
    with pytest.raises(ValueError, match=message):
        new("gpt_neox", use_parallel_residual=False)


def test_what_an_encoder_made_is_refused():
    model = convert_model(copy.deepcopy(tiny("gpt2")))
    with pytest.raises(ValueError, match="received encoder_hidden_states, for which it has no hyper-connection"):
        model(IDS, encoder_hidden_states=torch.zeros(2, 3, 32))


def test_the_docs_name_every_family():
    assert {*COMMON, *OF_EACH_FORM} < set(LONG_TAIL)
    assert listed() == LONG_TAIL


@pytest.mark.parametrize("model_type", ["mamba"])
def test_verification_of_the_first_layers(model_type, place, capsys):
    """Also where the config derives what it says of each layer from their number."""
    folders = [str(place / model_type / "dhc4"), "--against", str(place / model_type / "base")]
    assert cli.main(["verify", *folders, "--layers", "2"]) == 0
    assert "layers        the first 2 of 4" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["t5"])
@pytest.mark.parametrize("changes", [{}, {"num_decoder_layers": None}])
def test_a_decoder_whose_depth_the_config_leaves_open(model_type, changes, place, tmp_path):
    """It is as deep as the encoder."""
    base = shutil.copytree(place / model_type / "base", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    del config["num_decoder_layers"]
    (base / "config.json").write_text(json.dumps({**config, **changes}))
    assert cli.main(["convert", str(base), str(tmp_path / "out"), "-q", "--verify", "full"]) == 0


@pytest.mark.parametrize("name", ["input_features", "pixel_values"])
def test_a_model_that_takes_something_unknown_is_not_run(name):
    model = copy.deepcopy(tiny("phi"))
    model.main_input_name = name
    with pytest.raises(VerificationError, match=f"PhiForCausalLM.*{name}.*--verify structure"):
        numeric._inputs(model)
