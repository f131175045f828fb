"""Every family: saved by Transformers, converted by the command line, loaded where this package is not."""

import copy
import dataclasses
import inspect
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import hf_hyperconn
from hf_hyperconn import convert_model
from hf_hyperconn.analysis.costs import base_flops
from hf_hyperconn.conversion import cli
from hf_hyperconn.conversion.inspection import inspect_checkpoint
from hf_hyperconn.families.family import find_family

from .conftest import asked_for
from .families import FAMILIES, FIELDS
from .marks import few
from .processes import elsewhere
from .tiny import tiny

families = pytest.mark.parametrize("model_type", FAMILIES)
VARIANTS = {
    "dhc2": ["-n", "2", "--verify", "structure"],
    "dhc4": ["-n", "4", "--verify", "full"],
    "shc4": ["-n", "4", "--connection", "shc", "--verify", "structure"],
}
# norms before a branch, after it and both, biases, joined projections, two kinds of mixtures
OF_EACH_FORM = ("llama", "olmo2", "gemma2", "starcoder2", "phi3", "olmoe", "deepseek_v3")
CASES = [(model_type, variant) for model_type in FAMILIES for variant in VARIANTS]
PROMPTS = torch.randint(3, 96, (3, 24), generator=torch.Generator().manual_seed(0)).tolist()
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def place(request, model_types, tmp_path_factory) -> Path:
    """Every family's base and its conversions, `<model type>/base`, `<model type>/<variant>`."""
    place = tmp_path_factory.mktemp("families")
    asked = {variant or "dhc4" for variant in asked_for(request, "variant")}
    for model_type in model_types:
        base = place / model_type / "base"
        tiny(model_type).save_pretrained(base)
        for variant in VARIANTS.keys() & asked:
            arguments = [str(base), str(base.with_name(variant)), "-q", *VARIANTS[variant]]
            assert cli.main(["convert", *arguments]) == 0
    return place


@families
def test_inspection_of_a_conversion(model_type, place):
    """On disk experts are apart, in the model they are fused."""
    found = inspect_checkpoint(str(place / model_type / "dhc4"))
    base = tiny(model_type)
    assert (found.family, found.connection, found.hc_mult) == (FAMILIES[model_type].name, "dhc", 4)
    assert (found.trained, found.base) == (False, "base")
    stored = {value.data_ptr(): value.numel() for value in base.state_dict().values()}
    assert found.parameters - found.added_parameters == sum(stored.values())
    shapes = {name: parameter.shape for name, parameter in base.named_parameters()}
    assert found.flops - found.added_flops == base_flops(base.config.to_dict(), shapes)


def compared(place: Path, model_types: list[str], new_tokens: int) -> dict[str, list[str]]:
    """What two processes without this package, each with half of the families, find to differ; of one family, one.

    place: of every family's base and its conversions, `<model type>/base`, `<model type>/<anything else>`.
    """
    sources = {model_type: find_family(model_type).source for model_type in model_types}
    comparisons = [
        {
            "base": str(place / model_type / "base"),
            "module": f"transformers.models.{sources[model_type].modeling}",
            "part": tower.attribute if (tower := sources[model_type].tower) else None,
            "converted": [str(path) for path in (place / model_type).iterdir() if path.name != "base"],
            "attention": None,
            "dtypes": DTYPES,
            "prompts": [PROMPTS[0], PROMPTS[1][:5], PROMPTS[2][:17]],
        }
        for model_type in model_types
    ]
    halves = [half for half in (comparisons[::2], comparisons[1::2]) if half]
    return elsewhere([{"comparisons": half, "new_tokens": new_tokens} for half in halves], place)


@pytest.fixture(scope="module")
def differing(model_types, place) -> dict[str, list[str]]:
    return compared(place, model_types, new_tokens=6)


@families
def test_the_tiny_models_ask_for_nothing_that_the_family_ignores(model_type):
    config = type(tiny(model_type).config)
    known = {field.name for field in dataclasses.fields(config)} | config.attribute_map.keys()
    source = inspect.getsource(sys.modules[type(tiny(model_type)).__module__])
    assert [name for name in FIELDS[model_type] if name not in known and f'"{name}"' not in source] == []


@pytest.mark.parametrize(
    ("model_type", "variant"),
    few(
        CASES,
        *((model_type, "dhc4") for model_type in FAMILIES),
        tail=[case for case in CASES if case[0] not in OF_EACH_FORM and case[1] != "dhc4"],
    ),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_to_the_base_without_the_package(model_type, variant, dtype, place, differing):
    assert differing[f"{place / model_type / variant} {dtype} None"] == []


@families
def test_saving_a_trained_model_again_keeps_every_tensor(model_type, place, tmp_path):
    """By name, dtype and value; experts under the names of the base's checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(place / model_type / "dhc4", dtype="auto")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_hc." in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "first")
    converted, first = stored(place / model_type / "dhc4"), stored(tmp_path / "first")
    assert first.keys() == converted.keys()
    assert [name for name in first if "_hc." not in name and first[name] != converted[name]] == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype="auto")
    again.save_pretrained(tmp_path / "second")
    assert stored(tmp_path / "second") == first
    ids = torch.tensor(PROMPTS)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@families
def test_from_prenorm_equals_the_base(model_type, place):
    hc_class = getattr(hf_hyperconn, f"HC{FAMILIES[model_type].name}ForCausalLM")
    ids, base = torch.tensor(PROMPTS), place / model_type / "base"
    with torch.no_grad():
        expected = type(tiny(model_type)).from_pretrained(base)(ids).logits
        assert torch.equal(hc_class.from_prenorm(base, hc_mult=2)(ids).logits, expected)


@families
def test_connections_stay_in_float32_and_the_rest_has_the_bases_dtypes(model_type, place):
    base = type(tiny(model_type)).from_pretrained(place / model_type / "base", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(place / model_type / "dhc4", dtype=torch.bfloat16)
    expected = {name: tensor.dtype for name, tensor in base.state_dict().items()}
    found = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert {name: dtype for name, dtype in found.items() if "_hc." not in name} == expected
    assert {dtype for name, dtype in found.items() if "_hc." in name} == {torch.float32}


@families
def test_every_class_equals_its_base(model_type):
    ids = torch.tensor(PROMPTS)
    for suffix in FAMILIES[model_type].heads:
        base = tiny(model_type, suffix)
        converted = convert_model(base)
        assert type(converted) is getattr(hf_hyperconn, f"HC{type(base).__name__}")
        with torch.no_grad():
            assert torch.equal(converted(ids)[0], base(ids)[0]), suffix


@families
def test_the_coefficients_are_predicted_from_the_familys_own_norm(model_type):
    family = FAMILIES[model_type]
    layer = convert_model(tiny(model_type)).base_model.layers[0]
    own = next(module for name, module in layer.named_children() if "norm" in name)
    assert type(layer.attn_hc.norm) is type(own)
    initial = {name: values.unique().tolist() for name, values in layer.attn_hc.norm.named_parameters()}
    assert initial == {name: [value] for name, value in family.norm.items()}
    for name in ("eps", "variance_epsilon"):
        assert getattr(layer.attn_hc.norm, name, None) == getattr(own, name, None)


@families
def test_training_reaches_every_connection_and_separates_the_streams(model_type):
    """Gradients of the second step, when DHC's prediction has left zero."""
    torch.manual_seed(0)
    config = getattr(hf_hyperconn, f"HC{FAMILIES[model_type].name}Config").from_prenorm(tiny(model_type).config)
    model = getattr(hf_hyperconn, f"HC{FAMILIES[model_type].name}ForCausalLM")(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(3, 96, (8, 32))
    streams = []
    model.base_model.layers[-1].register_forward_pre_hook(lambda module, args: streams.append(args[0].detach()))
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    reached = {name: p.grad is not None and p.grad.any() for name, p in model.named_parameters() if "_hc." in name}
    assert [name for name, nonzero in reached.items() if not nonzero] == []
    spread = [(state - state[..., :1, :]).abs().max() for state in streams]
    assert spread[0] == 0
    assert spread[1] > 1e-5


MIXTURES = [name for name in FAMILIES if hasattr(tiny(name).config, "num_experts_per_tok")]


@pytest.mark.parametrize("model_type", [name for name in MIXTURES if name != "deepseek_v3"])
@torch.no_grad()
def test_routers_and_losses_of_mixtures_equal_the_bases(model_type):
    """DeepSeek-V3 has no auxiliary loss."""
    base, ids = tiny(model_type), torch.tensor(PROMPTS)
    expected, found = (model(ids, labels=ids, output_router_logits=True) for model in (base, convert_model(base)))
    assert len(found.router_logits) > 0
    assert all(map(torch.equal, found.router_logits, expected.router_logits))
    assert torch.equal(found.aux_loss, expected.aux_loss)
    assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_the_experts_implementation_is_the_bases(model_type, implementation):
    base = copy.deepcopy(tiny(model_type))
    base.set_experts_implementation(implementation)
    assert convert_model(base).config._experts_implementation == implementation


def stored(folder: Path) -> dict[str, bytes]:
    """Dtype and bytes of every tensor of a folder."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                tensors[name] = (str(tensor.dtype), tensor.flatten().view(torch.uint8).numpy().tobytes())
    return tensors
