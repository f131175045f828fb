"""HC-Llama as a Transformers model."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    pipeline,
)

from hf_hyperconn import (
    HCLlamaConfig,
    HCLlamaForCausalLM,
    HCLlamaForQuestionAnswering,
    HCLlamaForSequenceClassification,
    HCLlamaForTokenClassification,
    HCLlamaModel,
    HyperConnection,
    convert_model,
)
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.models.hyper_connections import reduce_streams

from .conftest import hc_llama, llama_config, randomise_connections, traced_logits
from .marks import few
from .tolerances import COMPILED


def hc_config(**changes) -> HCLlamaConfig:
    fields = {name: changes.pop(name) for name in list(changes) if name.startswith("hc_") or name == "connection"}
    return HCLlamaConfig.from_prenorm(llama_config(**changes), **fields)


@pytest.fixture
def hc(llama):
    """The tiny Llama with random, so not equivalent, hyper-connections."""
    return randomise_connections(convert_model(copy.deepcopy(llama), hc_mult=4))


# config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hc_mult", 0, "at least 1"),
        ("hc_mult", 2.5, "hc_mult"),
        ("hc_mult", "4", "hc_mult"),
        ("connection", "mHC", "'shc', 'dhc'"),
        ("hc_readout", "max", "'mean', 'sum'"),
        ("hc_tanh", 1, "hc_tanh"),
    ],
)
def test_config_refuses(field, value, message):
    with pytest.raises(StrictDataclassError, match=message):
        HCLlamaConfig(**{field: value})


def test_config_keeps_the_base_fields(tmp_path):
    base = llama_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    config = HCLlamaConfig.from_prenorm(base, hc_mult=3, connection="shc")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is HCLlamaConfig
    skipped = ("model_type", "transformers_version", "_name_or_path")
    expected = {name: value for name, value in base.to_dict().items() if name not in skipped}
    assert {name: loaded.to_dict()[name] for name in expected} == expected
    assert (loaded.hc_mult, loaded.connection, loaded.hc_tanh, loaded.hc_readout) == (3, "shc", True, "mean")


def test_config_of_another_family_is_refused():
    with pytest.raises(ValueError, match="'llama' config, not from 'mistral'"):
        HCLlamaConfig.from_prenorm(AutoConfig.for_model("mistral"))


def test_parallel_plans():
    config, base = hc_config(), llama_config()
    assert config.base_model_tp_plan == base.base_model_tp_plan
    assert config.base_model_pp_plan is None
    model = HCLlamaForCausalLM(config)
    assert model._pp_plan in (None, {})
    assert model._tp_plan == LlamaForCausalLM(base)._tp_plan


# initialisation


def assert_equivalent_initialisation(model):
    connections = [module for module in model.modules() if isinstance(module, HyperConnection)]
    assert len(connections) == 2 * model.config.num_hidden_layers
    for k, module in enumerate(connections):
        assert module.sub_layer == k
        for name, value in module.initial_values().items():
            assert torch.equal(getattr(module, name).detach(), value), name
        if module.norm is not None:
            assert torch.equal(module.norm.weight.detach(), torch.ones(model.config.hidden_size))


@pytest.mark.parametrize("connection", ["shc", "dhc"])
def test_initialisation_on_every_path(connection, llama_folder, llama, tmp_path):
    config = hc_config(hc_mult=4, connection=connection)
    assert_equivalent_initialisation(HCLlamaForCausalLM(config))
    assert_equivalent_initialisation(AutoModelForCausalLM.from_config(config))
    low = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert_equivalent_initialisation(low)
    assert low.lm_head.weight.dtype == torch.bfloat16
    assert_equivalent_initialisation(HCLlamaForCausalLM.from_prenorm(llama_folder, connection=connection))
    assert_equivalent_initialisation(HCLlamaModel.from_prenorm(llama_folder, connection=connection))
    assert_equivalent_initialisation(convert_model(llama, connection=connection))
    with torch.device("meta"):
        model = HCLlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()
    assert_equivalent_initialisation(model)


def test_loading_does_not_initialise_what_was_saved(hc, tmp_path):
    hc.save_pretrained(tmp_path)
    loaded = HCLlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in hc.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("connection", ["shc", "dhc", "mhc", "ihc", "frac"])
def test_output_projections_are_scaled_as_the_paper_of_the_connection_says(connection):
    model = HCLlamaForCausalLM(hc_config(connection=connection, hc_mult=4, hidden_size=256, intermediate_size=512))
    layer = model.model.layers[1]
    expected = 0.01 if connection in ("shc", "dhc") else 0.02
    for scaled in (layer.self_attn.o_proj, layer.mlp.down_proj):
        assert scaled.weight.std().item() == pytest.approx(expected, rel=0.05)
    for plain in (layer.self_attn.q_proj, layer.mlp.up_proj):
        assert plain.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_conversion_keeps_the_weights(llama, llama_folder):
    converted = HCLlamaForCausalLM.from_prenorm(llama_folder)
    for name, value in llama.state_dict().items():
        assert torch.equal(converted.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_connections_stay_float32(dtype, llama_folder, tmp_path):
    model = HCLlamaForCausalLM.from_prenorm(llama_folder, dtype=dtype)
    model.save_pretrained(tmp_path)
    for each in (model, HCLlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)):
        for name, parameter in each.named_parameters():
            assert parameter.dtype == (torch.float32 if "_hc." in name else dtype), name


# outputs


def test_hidden_states_and_attentions(hc, ids):
    streams = []
    for layer in hc.model.layers[:-1]:
        layer.register_forward_hook(lambda module, args, output: streams.append(output))
    hc.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = hc(ids, output_hidden_states=True, output_attentions=True)
        as_tuple = hc(ids, output_hidden_states=True, return_dict=False)
    assert len(outputs.hidden_states) == hc.config.num_hidden_layers + 1
    assert {state.shape for state in outputs.hidden_states} == {(2, 24, 32)}
    assert torch.equal(outputs.hidden_states[0], hc.model.embed_tokens(ids))
    for state, expected in zip(outputs.hidden_states[1:-1], streams, strict=False):
        assert expected.shape == (2, 24, 4, 32)
        assert torch.equal(state, reduce_streams(expected))
    assert [attention.shape for attention in outputs.attentions] == [(2, 4, 24, 24)] * 3
    assert torch.equal(as_tuple[0], outputs.logits)
    assert all(state.dim() == 3 for state in as_tuple[-1])


def test_readout_sum_differs_from_mean_only_in_scale(llama, ids):
    mean = convert_model(llama, hc_mult=4)
    summed = convert_model(llama, hc_mult=4, hc_readout="sum")
    with torch.no_grad():
        a, b = (m(ids, output_hidden_states=True).hidden_states[1] for m in (mean, summed))
    assert torch.equal(4 * a, b)


@pytest.mark.parametrize("attention", few(("sdpa", "eager", "flex_attention"), "sdpa", "eager"))
def test_attention_implementations(attention, llama, ids):
    if attention == "flex_attention":
        pytest.importorskip("torch.nn.attention.flex_attention")
    base = copy.deepcopy(llama)
    base.set_attn_implementation(attention)
    hc = convert_model(base, hc_mult=4)
    assert hc.config._attn_implementation == attention
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        assert torch.equal(hc(ids, attention_mask=mask).logits, base(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("cache", [None, "dynamic", "static", "offloaded", "offloaded_static"])
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 10}], ids=str)
def test_generate_as_the_base(cache, arguments, llama, ids):
    if cache is not None and "offloaded" in cache and not torch.cuda.is_available():
        pytest.skip("offloads from a GPU")
    hc = convert_model(llama, hc_mult=4)
    results = []
    for model in (llama, hc):
        torch.manual_seed(0)
        kwargs = {"use_cache": False} if cache is None else {"cache_implementation": cache}
        results.append(model.generate(ids, max_new_tokens=12, pad_token_id=0, **kwargs, **arguments))
    assert results[0].shape == (2, 36)
    assert torch.equal(*results)


def test_assisted_generation(hc, ids):
    expected = hc.generate(ids[:1], max_new_tokens=12, do_sample=False, pad_token_id=0)
    assistant = convert_model(hc_base(hc))
    assisted = hc.generate(ids[:1], max_new_tokens=12, do_sample=False, pad_token_id=0, assistant_model=assistant)
    assert torch.equal(assisted, expected)


def hc_base(hc) -> LlamaForCausalLM:
    """A Llama with the same base weights."""
    base = LlamaForCausalLM(llama_config())
    base.load_state_dict({name: value for name, value in hc.state_dict().items() if "_hc." not in name})
    return base.eval()


def test_early_exit_reads_the_streams_out(hc, ids):
    """`assistant_early_exit` runs the first layers only, by changing the config."""
    expected = hc.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0)
    early = hc.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0, assistant_early_exit=1)
    assert torch.equal(early, expected)


def test_cache_gives_the_same_logits(hc, ids):
    with torch.no_grad():
        full = hc(ids).logits
        first = hc(ids[:, :10], use_cache=True)
        rest = hc(ids[:, 10:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], dim=1), full, **COMPILED)


# training and compilation


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, hc, ids):
    hc.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            hc.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            hc.enable_input_require_grads()
        hc.zero_grad()
        hc(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in hc.named_parameters()})
    assert len(gradients[0]) == len(list(hc.parameters()))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


@pytest.mark.parametrize("model_class", [HCLlamaModel, HCLlamaForCausalLM, HCLlamaForSequenceClassification])
def test_gradient_checkpointing_asked_for_in_the_config(model_class):
    model = model_class(hc_config(gradient_checkpointing=True))
    layers = [module for module in model.modules() if type(module).__name__ == "HCLlamaDecoderLayer"]
    assert [layer.gradient_checkpointing for layer in layers] == [True] * 3


@pytest.mark.parametrize("model_class", [HCLlamaModel, HCLlamaForCausalLM, HCLlamaForSequenceClassification])
def test_the_layer_to_wrap_is_named(model_class):
    """FSDP's automatic wrapping looks for every class named here."""
    assert list(model_class(hc_config())._no_split_modules) == ["HCLlamaDecoderLayer"]


def test_compiles_without_breaks(ids):
    hc = randomise_connections(HCLlamaForCausalLM(hc_config(num_hidden_layers=1, initializer_range=0.2)))
    expected = hc(ids, labels=ids)
    compiled = torch.compile(hc, fullgraph=True)(ids, labels=ids)
    torch.testing.assert_close(compiled.logits, expected.logits, **COMPILED)
    compiled.loss.backward()
    assert all(parameter.grad is not None for parameter in hc.parameters())


def test_exports(hc, ids):
    program = torch.export.export(hc, (), {"input_ids": ids, "use_cache": False}, strict=False)
    with torch.no_grad():
        result = program.module()(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(result, hc(ids).logits, **COMPILED)


@pytest.mark.parametrize(
    ("connection", "hc_mult"),
    [*((kind, 2) for kind in ("dhc", "shc", "mhc", "ihc", "frac", "altup", "dual")), ("keel", 1), ("attnres", 1)],
)
def test_traces(connection, hc_mult, ids):
    """By `torch.jit.trace`, as OpenVINO does, also where gradients would be recorded."""
    model = hc_llama(connection=connection, hc_mult=hc_mult).eval()
    assert torch.equal(traced_logits(model, ids), model(ids).logits)


def test_from_prenorm_takes_fields_of_the_config_as_from_pretrained_does(stories, ids):
    asked = {"use_cache": False, "num_hidden_layers": 2, "attn_implementation": "eager", "dtype": torch.bfloat16}
    hc, base = (
        load(stories, **asked).eval() for load in (HCLlamaForCausalLM.from_prenorm, LlamaForCausalLM.from_pretrained)
    )
    for name in ("use_cache", "num_hidden_layers", "_attn_implementation", "dtype"):
        assert getattr(hc.config, name) == getattr(base.config, name)
    assert torch.equal(hc(ids).logits, base(ids).logits)


# embeddings, heads, devices


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_resized_embeddings(tied, tmp_path, ids):
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config(tie_word_embeddings=tied, initializer_range=0.2)).eval()
    hc = convert_model(base)
    assert (hc.lm_head.weight is hc.model.embed_tokens.weight) == tied
    assert torch.equal(hc(ids).logits, base(ids).logits)
    hc.resize_token_embeddings(100)
    hc.save_pretrained(tmp_path)
    loaded = HCLlamaForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded(ids).logits.shape == (2, 24, 100)
    assert torch.equal(loaded(ids).logits, hc(ids).logits)


@pytest.mark.parametrize(
    ("auto", "base_class", "hc_class"),
    [
        (AutoModel, LlamaModel, HCLlamaModel),
        (AutoModelForCausalLM, LlamaForCausalLM, HCLlamaForCausalLM),
        (AutoModelForSequenceClassification, LlamaForSequenceClassification, HCLlamaForSequenceClassification),
        (AutoModelForTokenClassification, LlamaForTokenClassification, HCLlamaForTokenClassification),
        (AutoModelForQuestionAnswering, LlamaForQuestionAnswering, HCLlamaForQuestionAnswering),
    ],
)
def test_heads(auto, base_class, hc_class, tmp_path, ids):
    torch.manual_seed(0)
    base = base_class(llama_config(initializer_range=0.2)).eval()
    base.save_pretrained(tmp_path / "base")
    hc = hc_class.from_prenorm(tmp_path / "base", hc_mult=2)
    hc.save_pretrained(tmp_path / "hc")
    loaded = auto.from_pretrained(tmp_path / "hc")
    assert type(loaded) is hc_class
    with torch.no_grad():
        for model in (hc, loaded, convert_model(base, hc_mult=2)):
            assert torch.equal(model(ids)[0], base(ids)[0])


def test_device_map(llama_folder, llama, ids, tmp_path):
    pytest.importorskip("accelerate")
    spread = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    spread.update({f"model.layers.{i}": "disk" for i in range(3)})
    convert_model(llama).save_pretrained(tmp_path / "hc")
    model = HCLlamaForCausalLM.from_pretrained(tmp_path / "hc", device_map=spread, offload_folder=tmp_path / "disk")
    assert model.model.layers[0].attn_hc.static_alpha.device.type == "meta"
    with torch.no_grad():
        assert torch.equal(model(ids).logits, llama(ids).logits)
    with pytest.raises(ValueError, match="offloaded to disk"):
        HCLlamaForCausalLM.from_prenorm(llama_folder, device_map=spread, offload_folder=tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="several devices"):
        convert_model(LlamaForCausalLM.from_pretrained(llama_folder, device_map=spread, offload_folder=tmp_path))


def test_a_config_of_ones_own_runs(llama, ids):
    class MyConfig(HCLlamaConfig):
        model_type = "my_llama"

    model = HCLlamaForCausalLM(MyConfig.from_prenorm(llama.config))
    assert torch.isfinite(model(ids).logits).all()


def test_from_prenorm_refuses_a_checkpoint_without_the_weights(tmp_path):
    LlamaModel(llama_config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no weights for lm_head.weight"):
        HCLlamaForCausalLM.from_prenorm(tmp_path)


def test_from_prenorm_reports_what_was_missing(llama_folder):
    model, info = HCLlamaForCausalLM.from_prenorm(llama_folder, output_loading_info=True)
    assert info["missing_keys"]
    assert all("_hc." in key for key in info["missing_keys"])


def test_text_generation_pipeline(stories, tmp_path):
    from transformers import AutoTokenizer

    HCLlamaForCausalLM.from_prenorm(stories).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path)
    written = [
        pipeline("text-generation", model=str(folder))("Once upon a time", max_new_tokens=20, do_sample=False)
        for folder in (stories, tmp_path)
    ]
    assert written[0] == written[1]
