"""Unfolded matrices against real forwards, statistics against numpy."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM

from hf_hyperconn import HCLlamaForCausalLM, convert_model
from hf_hyperconn.analysis.arrangements import ARRANGEMENTS
from hf_hyperconn.analysis.observation import observe, run_observed
from hf_hyperconn.analysis.statistics import PERCENTILES, Moments, Sample
from hf_hyperconn.analysis.study import batches_of, study
from hf_hyperconn.analysis.unfolding import Unfolding, unfold, unfold_static
from hf_hyperconn.errors import HyperConnError

from .adapted import CONNECTIONS
from .conftest import hc_llama, randomise_connections
from .other_families import tiny as tiny_of_others
from .tolerances import FLOAT32, ROW_SUMS

SUB_LAYERS = 6


def lower_triangle(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.float64).tril()


@pytest.mark.parametrize(
    ("connection", "n"),
    [*((c, n) for c in ("shc", "dhc", "frac") for n in (1, 2, 4)), *((c, n) for c in ("mhc", "ihc") for n in (2, 4))],
)
def test_a_fresh_conversion_unfolds_to_the_lower_triangle(connection, n, llama, ids):
    matrices = study(convert_model(llama, hc_mult=n, connection=connection), [ids]).matrices
    expected = lower_triangle(SUB_LAYERS + 1)
    if connection in ("mhc", "ihc"):
        torch.testing.assert_close(matrices.inputs, expected, **ROW_SUMS)
    else:
        assert torch.equal(matrices.inputs, expected)
        assert torch.equal(matrices.streams, expected[:-1].expand(n, -1, -1))
        assert not matrices.inputs_deviation.any()


def randomised(**fields) -> HCLlamaForCausalLM:
    model = hc_llama(**fields).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_hc." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def unfolded_constant_branches(model, scale: float = 1.0):
    """The matrices, observations and outputs `[1, 1, D]` where branch k gives e_{k+1} and the embedding is e_0."""
    units, unfolding = torch.eye(32), Unfolding(SUB_LAYERS, model.config.hc_readout)
    for k, layer in enumerate(model.model.layers):
        layer.attention_branch = lambda x, k=k, **kwargs: units[2 * k + 1].expand_as(x)
        layer.mlp_branch = lambda x, k=k, **kwargs: units[2 * k + 2].expand_as(x)
    observations, outputs = [], []
    model.model.layers[-1].register_forward_hook(lambda module, args, output: outputs.append(output))

    def see(observation):
        unfolding.see(observation)
        observations.append(observation)

    with observe(model, see), torch.no_grad():
        model(inputs_embeds=scale * units[:1][None])
    return unfolding.result(), observations, outputs


@pytest.mark.parametrize(
    "fields",
    [
        {"connection": "shc"},
        {"connection": "shc", "hc_readout": "sum"},
        {"connection": "dhc"},
        {"connection": "dhc", "hc_tanh": False},
        {"connection": "mhc"},
        {"connection": "ihc"},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, -3.0])
def test_constant_branches_reproduce_the_matrix(fields, scale):
    """The inputs of the branches are the rows of C."""
    matrices, observations, outputs = unfolded_constant_branches(randomised(hc_mult=3, **fields), scale)
    inputs = [observation.branch_input for observation in observations]
    rows = torch.cat([*inputs, *outputs])[:, 0, : SUB_LAYERS + 1].double()
    rows[:, 0] /= scale
    assert rows.abs().max() > 1
    torch.testing.assert_close(matrices.inputs, rows, **FLOAT32)
    assert matrices.tokens == 1


def test_streams_hold_what_their_matrices_say():
    """C^(i) is what is in stream i once it is mixed: the next streams without the write between."""
    matrices, observations, _ = unfolded_constant_branches(randomised(hc_mult=3, connection="dhc"))
    for k in range(SUB_LAYERS - 1):
        mixed = observations[k + 1].streams[0, 0, :, : SUB_LAYERS + 1].double()
        mixed[:, k + 1] = 0  # what sub-layer k wrote
        torch.testing.assert_close(matrices.streams[:, k], mixed, **FLOAT32)


def test_means_are_of_products_token_by_token(ids):
    model = randomised(hc_mult=2, connection="dhc")
    whole = study(model, [ids]).matrices
    assert whole.tokens == ids.numel()
    assert whole.inputs_deviation[-1].min() > 0
    first, both = (study(model, [ids[:, :tokens]]).matrices.inputs for tokens in (1, 2))
    assert not torch.allclose(first, 2 * both - first)


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_presets_unfold_to_the_published_patterns(name):
    """Sequential; parallel pairs that do not read each other; two hops that skip the attention's residual."""
    expected = lower_triangle(5)
    if name == "parallel":
        expected = torch.tensor([[2, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 1, 1, 0, 0], [4, 1, 1, 0, 0], [8, 2, 2, 1, 1]])
    elif name == "two_hop":
        expected = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 0, 1]])
    readout = "sum" if name == "parallel" else "mean"
    matrices = unfold([ARRANGEMENTS[name](2, k) for k in range(4)], readout)
    assert torch.equal(matrices.inputs, expected.double())


def test_padding_is_not_studied(ids):
    """On the left and on the right, with the statistics of the rows alone."""
    model, padding = randomise_connections(hc_llama(hc_mult=4), 0.3), torch.zeros_like(ids)
    expected = study(model, [ids])
    for left in (True, False):
        parts = {"input_ids": [padding, ids], "attention_mask": [padding, torch.ones_like(ids)]}
        inputs = {name: torch.cat(both if left else both[::-1], 1) for name, both in parts.items()}
        studied = study(model, [inputs, {"input_ids": padding, "attention_mask": padding}])
        assert studied.matrices.tokens == expected.matrices.tokens == ids.numel()
        torch.testing.assert_close(studied.matrices.inputs, expected.matrices.inputs, **FLOAT32)
        torch.testing.assert_close(studied.similarity, expected.similarity, **FLOAT32)
        torch.testing.assert_close(studied.streams.similarity, expected.streams.similarity, **FLOAT32)
        torch.testing.assert_close(studied.coefficients["read"], expected.coefficients["read"], **FLOAT32)


def test_each_stack_has_its_own_padding(ids):
    model = convert_model(deepcopy(tiny_of_others("mbart")))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5]}
    inputs["decoder_attention_mask"] = mask[:, -5:]
    assert study(model, [inputs], "encoder").matrices.tokens == mask.sum()
    assert study(model, [inputs]).matrices.tokens == mask[:, -5:].sum()


def test_a_mask_of_other_positions_is_refused():
    with pytest.raises(HyperConnError, match=r"attention_mask \[1, 2\] has padding, but the sub-layers have \[1, 3\]"):
        run_observed(
            Unmasked(), {"inputs_embeds": torch.ones(1, 3, 32), "attention_mask": torch.tensor([[0, 1]])}, print
        )


class Unmasked(torch.nn.Module):
    """A model whose positions are other ones than those of its mask."""

    def __init__(self):
        super().__init__()
        self.model = hc_llama()

    def forward(self, inputs_embeds, attention_mask):
        return self.model(inputs_embeds=inputs_embeds)


def test_one_sub_layer_has_no_neighbours(ids):
    base = MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=8))
    studied = study(convert_model(base), [ids])
    assert studied.similarity.shape == (0, 3)
    assert studied.matrices.inputs.shape == (2, 2)


def test_batches_do_not_matter(ids):
    model = randomised(hc_mult=2)
    one, two = study(model, [ids]), study(model, [ids[:1], ids[1:]])
    torch.testing.assert_close(one.matrices.inputs, two.matrices.inputs, **FLOAT32)
    torch.testing.assert_close(one.similarity, two.similarity, **FLOAT32)
    torch.testing.assert_close(one.streams.similarity, two.streams.similarity, **FLOAT32)


@pytest.mark.slow
def test_a_compiled_model_is_studied_as_it_is(ids):
    """Observed eagerly: each meter would have every layer compiled anew. Afterwards it is compiled as before."""
    model = randomise_connections(hc_llama())
    expected = study(model, [ids])
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=counter)
    studied = study(model, [ids])
    assert torch.equal(studied.matrices.inputs, expected.matrices.inputs)
    assert torch.equal(studied.similarity, expected.similarity)
    assert counter.frame_count == 0
    model(ids)
    assert counter.frame_count > 0


def test_moments_and_percentiles_are_numpys():
    values = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    moments, sample = Moments(), Sample(size=5000)
    for part in values.split([1, 400, 599]):
        moments.add(part)
        sample.add(part)
    np.testing.assert_allclose(moments.mean, values.double().numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation, values.double().numpy().std(0), rtol=1e-12)
    expected = np.percentile(values.double().numpy(), PERCENTILES, axis=0).T
    np.testing.assert_allclose(sample.percentiles(), expected, rtol=1e-12)


def test_a_sample_is_bounded_and_uniform():
    sample = Sample(size=2000)
    for start in range(0, 100_000, 1000):
        sample.add(torch.arange(start, start + 1000).float())
    assert len(sample.kept) == 2000
    assert sample.percentiles((50,)).item() == pytest.approx(50_000, rel=0.05)
    assert sample.percentiles((5,)).item() == pytest.approx(5_000, rel=0.3)


def test_shares_gain_and_coefficients_of_known_matrices(ids):
    model = hc_llama(hc_mult=2, connection="shc").eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for connection in (layer.attn_hc, layer.mlp_hc):
                connection.static_alpha.copy_(torch.tensor([[3.0, 1.0, 0.5], [-1.0, 0.0, 1.0]]))
                connection.static_beta.copy_(torch.tensor([2.0, 0.0]))
    studied = study(model, [ids])
    assert studied.streams.read_share.tolist() == [[0.75, 0.25]] * SUB_LAYERS
    assert studied.streams.write_share.tolist() == [[1.0, 0.0]] * SUB_LAYERS
    assert studied.streams.gain.tolist() == [1 + 0.5 * (k + 1) for k in range(SUB_LAYERS)]
    assert studied.streams.similarity[0] == pytest.approx(1)
    by_stream = {"read": [3.0, -1.0], "keep": [1.0, 1.0], "mix": [0.0, 0.5], "write": [2.0, 0.0]}
    for kind, values in by_stream.items():
        assert studied.coefficients[kind].tolist() == [[[value] * 5 for value in values]] * SUB_LAYERS
    assert repr(studied) == f"Study({SUB_LAYERS} sub-layers, streams=2, tokens={ids.numel()})"
    assert "mixing: makes a stream at most 4 times as large, sub-layer 6" in studied.summary()


def test_similarity_is_that_of_the_bases_inputs(llama, ids):
    """Of a fresh conversion: the base's own residual stream before each norm."""
    inputs = []
    handles = [
        norm.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        for layer in llama.model.layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    with torch.no_grad():
        llama(ids)
    for handle in handles:
        handle.remove()
    cosines = [torch.cosine_similarity(a, b, dim=-1).flatten() for a, b in zip(inputs, inputs[1:], strict=False)]
    expected = np.stack([np.percentile(cosine.double(), (5, 50, 95)) for cosine in cosines])
    np.testing.assert_allclose(study(convert_model(llama), [ids]).similarity, expected, rtol=1e-6)


def test_text_is_cut_into_batches(stories, text):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    batches = batches_of(text, tokenizer, length=64, batch=3, tokens=500)
    assert [tuple(batch.shape) for batch in batches] == [(3, 64), (3, 64), (1, 64)]
    assert batches_of("Once", tokenizer, length=64)[0].shape[0] == 1
    with pytest.raises(HyperConnError, match="no batch to study"):
        study(hc_llama(), [])


@pytest.mark.parametrize(
    "fields",
    [{"connection": "dhc"}, {"connection": "mhc"}, {"hc_start": "history", "hc_readout": "weighted"}],
    ids=str,
)
def test_an_offloaded_model_is_studied(fields, tmp_path, ids):
    """Larger than memory; accelerate brings the parameters of a module for its forward alone."""
    pytest.importorskip("accelerate")
    model = randomised(hc_mult=2, **fields)
    model.save_pretrained(tmp_path / "model")
    places = {name: "disk" if name == "layers" else "cpu" for name, _ in model.model.named_children()}
    offloaded = HCLlamaForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={"lm_head": "cpu", **{f"model.{name}": place for name, place in places.items()}},
        offload_folder=tmp_path / "offloaded",
    )
    assert next(offloaded.model.layers[1].mlp_hc.parameters()).is_meta
    torch.testing.assert_close(unfold_static(offloaded).inputs, unfold_static(model).inputs, **FLOAT32)
    expected, studied = study(model, [ids]), study(offloaded, [ids])
    torch.testing.assert_close(studied.matrices.inputs, expected.matrices.inputs, **FLOAT32)
    torch.testing.assert_close(studied.similarity, expected.similarity, **FLOAT32)
    assert next(offloaded.model.layers[1].mlp_hc.parameters()).is_meta


def randomised_in_peft(**fields):
    """A model in PEFT whose connections and readout are trained as copies, and changed."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(hc_llama(**fields), peft.LoraConfig(modules_to_save=[*CONNECTIONS, "hc_head"])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_the_copies_of_an_adapter_are_studied(ids):
    """What is found is the merged model's: its matrices, readout and attention, with and without a text."""
    model = randomised_in_peft(connection="shc", hc_mult=4, hc_start="history", hc_readout="weighted")
    found = study(model, [ids]).matrices, unfold_static(model)
    with model.disable_adapter():
        disabled = study(model, [ids]).matrices
    merged = model.merge_and_unload()
    for each, expected in zip(found, (study(merged, [ids]).matrices, unfold_static(merged)), strict=True):
        torch.testing.assert_close(each.inputs, expected.inputs, **FLOAT32)
        assert each.attention == expected.attention == (0, 2, 4)
    assert torch.equal(disabled.inputs, lower_triangle(SUB_LAYERS + 1))


def test_an_encoder_decoder_is_studied_within_its_wrapper(ids):
    peft = pytest.importorskip("peft")
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    model = convert_model(deepcopy(tiny_of_others("mbart")))
    expected = study(model, [inputs]).matrices
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["attn_hc"]))
    matrices = study(wrapped, [inputs]).matrices
    assert torch.equal(matrices.inputs, expected.inputs)
    assert matrices.attention == expected.attention == (0, 1, 3, 4, 6, 7, 9, 10)


@pytest.mark.parametrize("connection", ["shc", "dhc", "frac", "mhc", "ihc"])
def test_static_weights_are_those_that_nothing_is_predicted_for(connection, ids):
    """What a model's forward has once its projections are zero."""
    model = randomised(hc_mult=2, connection=connection)
    static = unfold_static(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_hc.dynamic_alpha_fn", "_hc.dynamic_beta_fn", "_hc.fn")):
                parameter.zero_()
    observed = study(model, [ids]).matrices
    torch.testing.assert_close(static.inputs, observed.inputs, **FLOAT32)
    torch.testing.assert_close(static.streams, observed.streams, **FLOAT32)
    assert (static.tokens, observed.tokens) == (0, ids.numel())


def test_a_base_has_nothing_to_unfold_or_study(llama, ids):
    message = "LlamaForCausalLM has no streams that matrices read and mix, so none to"
    for call in (unfold_static, lambda model: study(model, [ids])):
        with pytest.raises(HyperConnError, match=message):
            call(llama)
