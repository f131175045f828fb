"""Transformers of diffusers with hyper-connections."""

import inspect
import json
import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, UNet2DModel
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from hf_hyperconn import convert_model, diffusion, hc_param_groups, hc_parameters, load_hc, save_hc
from hf_hyperconn.analysis.costs import connection_parameters
from hf_hyperconn.analysis.study import study
from hf_hyperconn.errors import HyperConnectionFileError, HyperConnError, UnsupportedCheckpointError
from hf_hyperconn.kinds import CONVERTIBLE

from .diffusers_models import dit, inputs_of, krea2, pixart, sample, sd3
from .marks import few

BASES = {"DiT": dit, "PixArt": pixart}
STARTS = [
    *({"connection": name} for name in CONVERTIBLE),
    *({"connection": name, "hc_mult": 2, "hc_start": "history"} for name in ("shc", "dhc")),
    {"connection": "dhc", "hc_start": "history", "hc_history": "depth"},
    {"connection": "shc", "hc_mult": 2},
    {"connection": "attnres", "hc_block": 2},
]
bases = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def trained(base=dit, **fields):
    """A conversion whose connections have moved from where they start."""
    model = convert_model(deepcopy(base()), **fields)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in hc_parameters(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("base", few(BASES.values(), dit), ids=BASES)
@pytest.mark.parametrize("fields", STARTS, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_the_base(base, fields, dtype):
    if dtype == torch.float32 and fields["connection"] in ("mhc", "ihc"):
        pytest.skip("is exact in 16 bits")
    model = deepcopy(base()).to(dtype)
    converted = convert_model(model, **fields)
    assert torch.equal(sample(converted), sample(model))
    assert not torch.equal(sample(trained(base, **fields).to(dtype)), sample(model))
    assert {parameter.dtype for parameter in hc_parameters(converted).values()} == {torch.float32}


@pytest.mark.skipif(not hasattr(diffusers, "Krea2Transformer2DModel"), reason="this diffusers has no Krea 2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_model_of_that_form(dtype, tmp_path):
    """Which calls its blocks and their arguments otherwise, and has modules of its own that stay float32."""
    model = deepcopy(krea2()).to(dtype)
    assert torch.equal(sample(convert_model(model)), sample(model))
    of_float32 = trained(krea2)
    of_float32.save_pretrained(tmp_path)
    loaded = type(of_float32).from_pretrained(tmp_path, torch_dtype=dtype)
    wide = {name: parameter for name, parameter in loaded.named_parameters() if ".norm1." in name or "_hc." in name}
    assert {parameter.dtype for parameter in wide.values()} == {torch.float32}
    assert len(wide) > len(hc_parameters(loaded)) > 0


@bases
def test_training_computes_the_same_with_and_without_checkpoints(base):
    """Labels are dropped at random in training: by the same draws."""
    plain, model = deepcopy(base()).train(), trained(base, hc_mult=2).train()
    converted = convert_model(plain, hc_mult=2)
    found = []
    for each, checkpoints in ((plain, False), (converted, True), (model, False), (model, True)):
        if checkpoints:
            each.enable_gradient_checkpointing()
        torch.manual_seed(3)
        each.zero_grad()
        output = each(**inputs_of(each)).sample
        output.square().sum().backward()
        found.append((output, {name: parameter.grad for name, parameter in each.named_parameters()}))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[2][0], found[3][0])
    gradients, again = found[2][1], found[3][1]
    for name in hc_parameters(model):
        assert gradients[name].any() or "dynamic_" in name or name.endswith("norm.weight")
        assert torch.equal(gradients[name], again[name])


def test_what_the_norm_computes_is_computed_once():
    """And handed on from the branch of attention to that of the MLP."""
    model, calls = convert_model(dit()), []
    for block in model.transformer_blocks:
        block.norm1.linear.register_forward_hook(lambda *call: calls.append(call))
    sample(model)
    assert len(calls) == len(model.transformer_blocks)


@bases
def test_tensors_are_shared_and_the_base_stays_as_it_is(base):
    model = deepcopy(base())
    model.pos_embed.requires_grad_(False)
    model.transformer_blocks[1].train()
    model.transformer_blocks[0].attn1.set_processor(processor := type(model.transformer_blocks[0].attn1.processor)())
    processor.mark = "mine"
    before, config = {name: id(value) for name, value in model.named_parameters()}, dict(model.config)
    converted = convert_model(model)
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert dict(model.config) == config
    assert type(model).__name__ == type(converted).__name__.removeprefix("HC")
    assert not hasattr(model.transformer_blocks[0], "is_first")
    parameters = dict(converted.named_parameters())
    assert {name: id(parameters[name]) for name in before} == before
    assert parameters.keys() - before.keys() == hc_parameters(converted).keys()
    assert not any(tensor.is_meta for tensor in [*converted.parameters(), *converted.buffers()])
    assert not converted.pos_embed.proj.weight.requires_grad
    assert converted.transformer_blocks[1].ff.training
    assert not converted.transformer_blocks[0].ff.training
    assert converted.transformer_blocks[0].attn1.processor.mark == "mine"
    assert isinstance(converted, type(model))
    assert inspect.signature(converted.forward) == inspect.signature(model.forward)


@bases
def test_diffusers_saves_and_loads_it(base, tmp_path):
    model = trained(base, hc_start="history")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["_class_name"] == f"HC{type(base()).__name__}"
    assert saved.items() >= {"connection": "dhc", "hc_start": "history", "hc_readout": "weighted"}.items()
    hc_class = getattr(diffusion, saved["_class_name"])
    loaded = hc_class.from_pretrained(tmp_path)
    assert type(loaded) is hc_class is type(model)
    assert torch.equal(sample(loaded), sample(model))
    narrow = hc_class.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    for name, parameter in hc_parameters(narrow).items():
        assert torch.equal(parameter, hc_parameters(model)[name])
    base().save_pretrained(tmp_path / "base")
    with pytest.raises(UnsupportedCheckpointError, match="holds no hyper-connections .* give that to convert_model"):
        hc_class.from_pretrained(tmp_path / "base")


def test_a_new_model_is_made_of_its_config():
    config = {name: value for name, value in dit().config.items() if not name.startswith("_")}
    model = diffusion.HCDiTTransformer2DModel(**config, connection="shc", hc_mult=2, hc_readout="sum")
    assert model.config.hc_readout == "sum"
    again = type(model).from_config(model.config)
    assert again.config.hc_mult == 2
    assert sample(again).shape == (2, 8, 8, 8)
    with pytest.raises(StrictDataclassError, match="hc_mult must be .* .got 0"):
        diffusion.HCDiTTransformer2DModel(**config, hc_mult=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'norm'"):
        diffusion.HCDiTTransformer2DModel(**config, norm="dyt")


@bases
@pytest.mark.parametrize("fields", [{"connection": "shc", "hc_mult": 2}, {"hc_start": "history"}, {}])
def test_the_file_of_connections(base, fields, tmp_path):
    model = trained(base, **fields)
    file = save_hc(model, tmp_path)
    assert torch.equal(sample(load_hc(base(), file)), sample(model))
    assert not torch.equal(sample(model), sample(base()))
    onto = convert_model(base(), **fields)
    assert load_hc(onto, file) is onto
    assert torch.equal(sample(onto), sample(model))
    (other,) = set(BASES.values()) - {base}
    with pytest.raises(HyperConnectionFileError, match="belongs to another model: it has model_type="):
        load_hc(other(), file)
    with pytest.raises(HyperConnectionFileError, match="save_hc got a '.*Transformer2DModel' model without"):
        save_hc(base(), tmp_path)


@pytest.fixture(scope="module")
def pipeline():
    """Makes a pipeline with a tiny VAE, which is the same for all."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=2, latent_channels=4, sample_size=8, **blocks)

    def make(transformer) -> DiTPipeline:
        return DiTPipeline(transformer=transformer, vae=vae, scheduler=DDIMScheduler(num_train_timesteps=10))

    return make


def images(pipeline: DiTPipeline) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    settings = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
    return pipeline([1, 2], **settings).images


def test_pipelines_take_it_save_it_and_load_it(pipeline, tmp_path):
    expected = images(pipeline(dit()))
    assert np.array_equal(images(pipeline(convert_model(dit()))), expected)
    model = pipeline(trained())
    assert not np.array_equal(images(model), expected)
    model.save_pretrained(tmp_path)
    loaded = DiTPipeline.from_pretrained(tmp_path)
    assert type(loaded.transformer) is type(model.transformer)
    assert np.array_equal(images(loaded), images(model))


@pytest.mark.parametrize("connection", ["shc", "dhc", "frac"])
def test_a_fresh_conversion_unfolds_to_the_lower_triangle(connection):
    found = study(convert_model(dit(), connection=connection), [inputs_of(dit())]).matrices
    assert torch.equal(found.inputs, torch.ones(7, 7, dtype=torch.float64).tril())
    assert found.tokens == 2 * 16
    with pytest.raises(HyperConnError, match="has no streams that matrices read and mix"):
        study(dit(), [inputs_of(dit())])


@pytest.mark.parametrize("connection", CONVERTIBLE)
def test_parameters_are_counted(connection):
    model = convert_model(dit(), connection=connection)
    added = sum(parameter.numel() for parameter in hc_parameters(model).values())
    assert added == connection_parameters(model.hc_config.to_dict())
    assert added == sum(parameter.numel() for parameter in model.parameters()) - dit().num_parameters()


def test_static_weights_do_not_decay():
    groups = hc_param_groups(convert_model(dit()), lr=1e-4, weight_decay=0.1, hc_lr=1e-3)
    found = {(group["lr"], group["weight_decay"]): len(group["params"]) for group in groups}
    assert found[1e-3, 0.0] == 6 * 4  # two static matrices and two scales
    assert found[1e-3, 0.1] == 6 * 2


def test_layers_may_be_removed():
    model = trained()
    model.transformer_blocks = model.transformer_blocks[:2]
    of_two = deepcopy(dit())
    of_two.transformer_blocks = of_two.transformer_blocks[:2]
    assert sample(model).shape == (2, 8, 8, 8)
    shorter = convert_model(dit())
    shorter.transformer_blocks = shorter.transformer_blocks[:2]
    assert torch.equal(sample(shorter), sample(of_two))


def test_removed_layers_that_others_count_are_told_when_it_is_saved(tmp_path, caplog):
    model = convert_model(dit(), connection="altup", hc_mult=3)
    model.transformer_blocks = model.transformer_blocks[1:]
    model.save_pretrained(tmp_path)
    assert "as layers have been removed or moved" in caplog.text


def test_two_streams_are_refused():
    message = (
        "the forward of JointTransformerBlock .* it hands encoder_hidden_states on, too, a second residual stream"
    )
    with pytest.raises(UnsupportedCheckpointError, match=message):
        convert_model(sd3())


def test_what_would_be_lost_is_refused():
    hooked, patched, of_another_block = (deepcopy(dit()) for _ in range(3))
    hooked.transformer_blocks[1].register_forward_hook(lambda *call: None)
    patched.transformer_blocks[0].ff.forward = lambda x: x
    of_another_block.transformer_blocks[2] = nn.Identity()
    with pytest.raises(UnsupportedCheckpointError, match="blocks.1 has a hook or another forward than its class"):
        convert_model(hooked)
    with pytest.raises(UnsupportedCheckpointError, match="transformer_blocks.0.ff has a hook or another forward"):
        convert_model(patched)
    with pytest.raises(UnsupportedCheckpointError, match="the forward of Identity is not a chain of branches"):
        convert_model(of_another_block)


def test_other_models_are_refused(pipeline):
    levels = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (32,)}
    with pytest.raises(UnsupportedCheckpointError, match="UNet2DModel has no `transformer_blocks`"):
        convert_model(UNet2DModel(sample_size=8, **levels))
    with pytest.raises(UnsupportedCheckpointError, match="got HCDiTTransformer2DModel, which has connections already"):
        convert_model(convert_model(dit()))
    with pytest.raises(UnsupportedCheckpointError, match="diffusion transformer of diffusers .got DiTPipeline"):
        convert_model(pipeline(dit()))
    with pytest.raises(ValueError, match="no pretrained model computes the same"):
        convert_model(dit(), connection="keel")
    with pytest.raises(AttributeError, match="has no attribute 'HCNothing'"):
        diffusion.HCNothing  # noqa: B018
    with pytest.raises(ValueError, match=r"shape \(2, 16, 3, 16\), but takes \[batch, sequence, 16\]"):
        convert_model(dit()).transformer_blocks[0](torch.zeros(2, 16, 3, 16))


@bases
@pytest.mark.slow
def test_compiled(base):
    """By a backend that keeps every rounding."""
    compiled = torch.compile(convert_model(base()), backend="aot_eager", fullgraph=True)
    assert torch.equal(sample(compiled), sample(base()))


@bases
def test_a_conversion_can_be_pickled_and_copied_as_its_base(base):
    """As for processes that are not forked; its classes are made when they are asked for."""
    model = trained(base, hc_mult=2)
    expected = sample(model)
    for block in model.transformer_blocks:
        block.compile(backend="eager")  # which a copy does not take over
    for again in (pickle.loads(pickle.dumps(model)), deepcopy(model)):
        assert type(again.transformer_blocks[0]) is type(model.transformer_blocks[0])
        assert type(again.hc_config) is type(model.hc_config)
        assert torch.equal(sample(again), expected)
        again.transformer_blocks[0].ff.net[0].proj.weight.data.zero_()
        assert not torch.equal(sample(again), expected)
