"""AltUp and ResiDual: against plain implementations of their papers and Transformers' own AltUp, and in models."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM
from hf_hyperconn.models.altup_connection import AltUpConnection
from hf_hyperconn.models.dual_residual import DualReadout, DualResidual

from .conftest import hc_llama, record_branches
from .sub_layer import Norm, check_gradients, randomized, written
from .tolerances import ANOTHER_ORDER, LOOP_FLOAT64

D = 6
DUAL = {"connection": "dual", "hc_mult": 2}
MODELS = [{"connection": "altup", "hc_mult": 2}, {"connection": "altup", "hc_selection": "same"}, DUAL]
selections = pytest.mark.parametrize("selection", ["alternating", "same"])


@selections
@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_altup_is_algorithm_1(n, k, selection):
    module = randomized(AltUpConnection(D, n, k, selection), 0.3).double()
    streams = torch.randn(2, 3, n, D, dtype=torch.float64)
    found = written(module, streams, branch=torch.sin).detach()
    p, g = module.prediction.tolist(), module.correction.tolist()
    j = k % n if selection == "alternating" else 0
    for b, s in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        x = streams[b, s]
        predicted = [sum(p[i][m] * x[m] for m in range(n)) for i in range(n)]
        computed = x[j] + torch.sin(x[j])
        for i in range(n):
            corrected = predicted[i] + g[i] * (computed - predicted[j])
            torch.testing.assert_close(found[b, s, i], corrected, **LOOP_FLOAT64)


@selections
def test_altup_by_finite_differences(selection):
    module = randomized(AltUpConnection(4, 3, 1, selection), 0.3).double()
    check_gradients(module, torch.randn(1, 2, 3, 4, dtype=torch.float64))


@torch.no_grad()
def test_altup_equals_gemma3n_with_fixed_modalities():
    """Gemma 3n predicts p - 1 and g - 1 from the token; here its router says the same of each."""
    ours, n = randomized(AltUpConnection(D, 4, 2), 0.3), 4
    fields = {"altup_num_inputs": n, "altup_active_idx": 2, "altup_coef_clip": None}
    theirs = Gemma3nTextAltUp(SimpleNamespace(hidden_size=D, rms_norm_eps=1e-6, **fields)).eval()
    theirs.compute_router_modalities = lambda x: torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(*x.shape[:-1], n)
    theirs.prediction_coefs.weight.zero_()[:, 0] = (ours.prediction - torch.eye(n)).flatten()
    theirs.correction_coefs.weight.zero_()[:, 0] = ours.correction - 1
    streams = torch.randn(2, 3, n, D)
    stacked = streams.permute(2, 0, 1, 3)
    expected = theirs.correct(theirs.predict(stacked), stacked[2] + torch.sin(stacked[2]))
    torch.testing.assert_close(written(ours, streams, branch=torch.sin), expected.permute(1, 2, 0, 3), **ANOTHER_ORDER)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@selections
@torch.no_grad()
def test_altup_starts_as_its_base(n, dtype, selection, stories):
    """At p = 1 and g = 1 it is the residual connection of every stream."""
    ids = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    base = LlamaForCausalLM.from_pretrained(stories, dtype=dtype).eval()
    config = HCLlamaConfig.from_prenorm(base.config, connection="altup", hc_mult=n, hc_selection=selection)
    model = HCLlamaForCausalLM.from_pretrained(stories, config=config, dtype=dtype).eval()
    assert torch.equal(model(ids).logits, base(ids).logits)


@torch.no_grad()
def test_dual_is_its_equation(ids):
    """Section 2: x = Norm(x + F(x)), d = d + F(x), and at the end x + Norm(d)."""
    model = randomized(hc_llama(**DUAL), 0.3).eval()
    seen = record_branches(model)
    states = model(ids, output_hidden_states=True).hidden_states

    def norm(values, module):
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * module.weight

    x = d = model.model.embed_tokens(ids)
    assert len(seen) == 2 * model.config.num_hidden_layers
    for k, (branch_input, output) in enumerate(seen):
        assert torch.equal(branch_input, x)
        layer = model.model.layers[k // 2]
        x = norm(x + output, (layer.attn_hc if k % 2 == 0 else layer.mlp_hc).norm)
        d = d + output
    assert torch.equal(model.model.norm(x + norm(d, layer.hc_head.norm)), states[-1])


def test_dual_token_by_token_and_by_finite_differences():
    module, readout = (
        randomized(DualResidual(D, 3, Norm(D)), 0.3).double(),
        randomized(DualReadout(Norm(D)), 0.3).double(),
    )
    streams = torch.randn(2, 3, 2, D, dtype=torch.float64, requires_grad=True)

    def norm(values, module):
        return values / (values.pow(2).mean() + 1e-6).sqrt() * module.norm.weight.detach()

    found = readout(written(module, streams, branch=torch.sin)).detach()
    for b, s in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        x, d = streams.detach()[b, s]
        expected = norm(x + torch.sin(x), module) + norm(d + torch.sin(x), readout)
        torch.testing.assert_close(found[b, s], expected, **LOOP_FLOAT64)
    assert torch.autograd.gradcheck(
        lambda *args: readout(written(module, *args)),
        (streams[:1, :2].detach().requires_grad_(), *module.parameters()),
    )


@pytest.mark.parametrize("fields", MODELS, ids=str)
def test_models_train(fields, ids):
    model = hc_llama(**fields)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
