"""mHC and iHC: against a loop from the paper, finite differences, and the models of Transformers that have them."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hyper_connections.manifold_constrained_hyper_connections import (
    ManifoldConstrainedHyperConnections,
    sinkhorn_knopps,
)
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from hf_hyperconn import HCLlamaConfig
from hf_hyperconn.models.connection import reduce_streams
from hf_hyperconn.models.hyper_connections import HyperConnection
from hf_hyperconn.models.manifold_hyper_connections import ManifoldHyperConnection, read_logits, sinkhorn
from hf_hyperconn.models.readouts import LearnedReadout

from .conftest import hc_llama, llama_config
from .marks import few
from .sub_layer import branch, check_gradients, randomized, written
from .tolerances import FLOAT32, LOOP_FLOAT64, ROW_SUMS

D = 16
WIDTHS = [2, 3, 4, 8]


def random_connection(n: int, mixes: bool = True, size: int = D) -> ManifoldHyperConnection:
    torch.manual_seed(n)
    return randomized(ManifoldHyperConnection(size, n, sub_layer=1, mixes=mixes))


def by_the_paper(module: ManifoldHyperConnection, streams: torch.Tensor) -> torch.Tensor:
    """Eqs. 3 and 7-9 in float64, entry by entry, with Sinkhorn run until it has converged."""
    n, p = module.hc_mult, {name: value.detach().double() for name, value in module.named_parameters()}
    result = torch.empty(streams.shape, dtype=torch.float64)
    for position in torch.cartesian_prod(*map(torch.arange, streams.shape[:-2])).tolist():
        x = streams[tuple(position)].double()
        flat = x.flatten()
        normed = flat / (flat.pow(2).mean() + module.eps).sqrt()
        logits = torch.stack([(row * normed).sum() for row in p["fn"]])
        read = [1 / (1 + torch.exp(-(p["scale"][0] * logits[i] + p["base"][i]))) for i in range(n)]
        write = [2 / (1 + torch.exp(-(p["scale"][1] * logits[n + i] + p["base"][n + i]))) for i in range(n)]
        output = branch(sum((read[i] + module.eps) * x[i] for i in range(n)))
        mix = torch.eye(n, dtype=torch.float64)
        if module.mixes:
            # row-major by input stream, so its transpose is H_res, whose rows are output streams
            mix = torch.exp(p["scale"][2] * logits[2 * n :] + p["base"][2 * n :]).reshape(n, n).T.clone()
            for _ in range(500):
                mix = mix / mix.sum(0, keepdim=True)
                mix = mix / mix.sum(1, keepdim=True)
        for i in range(n):
            result[tuple(position)][i] = sum(mix[i, j] * x[j] for j in range(n)) + write[i] * output
    return result


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("mixes", [True, False])
def test_equals_the_equations_token_by_token(n, mixes):
    module = random_connection(n, mixes).double()
    module.sinkhorn_iters, module.eps = 500, 1e-15
    with torch.no_grad():
        module.fn.mul_(0.1)
    streams = torch.randn(2, 3, n, D, dtype=torch.float64)
    torch.testing.assert_close(written(module, streams), by_the_paper(module, streams), **LOOP_FLOAT64)


@pytest.mark.parametrize("n", few(WIDTHS, *(n for n in WIDTHS if n < 8)))
@pytest.mark.parametrize("mixes", [True, False])
def test_gradients(n, mixes):
    check_gradients(random_connection(n, mixes, size=5).double(), torch.randn(1, 2, n, 5, dtype=torch.float64))


def test_sinkhorn_against_an_independent_package():
    """It ends with rows where ours ends with columns, so it takes and gives the transpose."""
    logits = torch.randn(7, 4, 4)
    ours = sinkhorn(logits, 200, 1e-8)
    torch.testing.assert_close(ours, sinkhorn_knopps(logits.mT, 200).mT, **FLOAT32)
    for dimension in (-1, -2):
        torch.testing.assert_close(ours.sum(dimension), torch.ones(7, 4), **FLOAT32)


@pytest.mark.parametrize("n", WIDTHS)
def test_static_weights_equal_an_independent_package(n):
    """The package predicts the rest from each stream by itself, as HC does and the mHC paper does not."""
    ours = random_connection(n)
    with torch.no_grad():
        ours.fn.zero_()
    ours.sinkhorn_iters, ours.eps = 300, 1e-9
    theirs = ManifoldConstrainedHyperConnections(n, dim=D, branch=nn.Identity(), layer_index=0, sinkhorn_iters=300)
    with torch.no_grad():
        theirs.static_alpha.copy_(torch.cat([ours.base[:n, None], ours.base[2 * n :].view(n, n)], dim=1))
        theirs.static_beta.copy_(ours.base[n : 2 * n])
    streams = torch.randn(2, 5, n, D)
    branch_input, mixed, rest = theirs.width_connection(streams.permute(0, 2, 1, 3).flatten(0, 1))
    expected = theirs.depth_connection(branch(branch_input), mixed, **rest)
    found = written(ours, streams).permute(0, 2, 1, 3).flatten(0, 1)
    torch.testing.assert_close(found, expected, **ROW_SUMS)


LIGER = """
import torch
from liger_kernel.transformers.functional import liger_mhc_forward
from hf_hyperconn.models.manifold_hyper_connections import ManifoldHyperConnection

for n in (2, 4):
    torch.manual_seed(n)
    ours, layer, streams = ManifoldHyperConnection(32, n, 1), torch.nn.Linear(32, 32), torch.randn(2, 5, n, 32)
    ours.sinkhorn_iters = 200
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    # the mix by rows of H_res, where ours is by columns
    rows = torch.cat([torch.arange(2 * n), 2 * n + torch.arange(n * n).view(n, n).T.flatten()])
    phi, bias = ours.fn[rows].T.contiguous(), ours.base[rows].contiguous()
    theirs = liger_mhc_forward(streams, layer, phi, bias, *ours.scale, allow_fp32=True, pre_eps=1e-6, tmax=200)
    branch_input, carry = ours.width_connection(streams)
    print((carry.write(layer(branch_input)).written() - theirs).abs().max().item())
"""


@pytest.mark.slow
def test_equals_ligers_kernels_in_the_interpreter_of_triton():
    """Once Sinkhorn has converged: Liger's ends with the columns of H_res, the paper's with its rows."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    done = subprocess.run(
        [sys.executable, "-c", LIGER], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr
    differences = list(map(float, done.stdout.split()))
    assert len(differences) == 2
    assert max(differences) < ROW_SUMS["atol"]


@pytest.mark.parametrize("n", WIDTHS)
def test_equals_deepseek_v4_with_the_same_weights(n):
    """The state dict is the mapping: same names, same layout."""
    ours = random_connection(n)
    config = SimpleNamespace(hc_mult=n, hidden_size=D, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6)
    theirs = DeepseekV4HyperConnection(config)
    theirs.load_state_dict(ours.state_dict())
    streams = torch.randn(2, 5, n, D)
    write, comb, collapsed = theirs(streams)
    branch_input, carry = ours.width_connection(streams)
    torch.testing.assert_close(branch_input, collapsed, **FLOAT32)
    expected = write.unsqueeze(-1) * branch(collapsed).unsqueeze(-2) + comb.transpose(-1, -2) @ streams
    torch.testing.assert_close(carry.write(branch(branch_input)).written(), expected, **ROW_SUMS)
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("n", WIDTHS)
def test_identity_form_equals_hy_v4_but_for_its_eps(n):
    """HY-V4 adds eps to the writes too, which the paper and DeepSeek-V4 do not."""
    hy_v4 = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
    ours = random_connection(n, mixes=False)
    config = SimpleNamespace(hc_mult=n, hidden_size=D, hc_eps=1e-6, rms_norm_eps=1e-6, hc_magnitude=2.0)
    theirs = hy_v4.HYV4HyperConnection(config)
    theirs.load_state_dict(ours.state_dict())
    streams = torch.randn(2, 5, n, D)
    write, collapsed = theirs(streams)
    branch_input, carry = ours.width_connection(streams)
    torch.testing.assert_close(branch_input, collapsed, **FLOAT32)
    torch.testing.assert_close(carry.beta, write - 1e-6, **FLOAT32)
    assert torch.equal(carry.mixed, streams)


@pytest.mark.parametrize("n", WIDTHS)
def test_learned_readout_equals_deepseek_v4_head(n):
    torch.manual_seed(0)
    ours = randomized(LearnedReadout(D, n))
    theirs = DeepseekV4HyperHead(SimpleNamespace(hc_mult=n, hidden_size=D, hc_eps=1e-6, rms_norm_eps=1e-6))
    theirs.load_state_dict(ours.state_dict())
    streams = torch.randn(2, 5, n, D)
    torch.testing.assert_close(ours(streams), theirs(streams), **FLOAT32)


def test_the_mean_readout_is_glm5_nexts_head():
    from transformers.models.glm5_next import modeling_glm5_next

    head = next(value for name, value in vars(modeling_glm5_next).items() if name.endswith("HyperHead"))
    streams = torch.randn(2, 5, 4, D)
    module = head() if head.__init__ is nn.Module.__init__ else head(SimpleNamespace(hc_mult=4, hidden_size=D))
    torch.testing.assert_close(reduce_streams(streams), module(streams), **FLOAT32)


@pytest.mark.parametrize("n", WIDTHS)
def test_equivalent_initialisation(n):
    for k in range(2 * n):
        module = ManifoldHyperConnection(D, n, k)
        read, write, mix = module.coefficients(torch.randn(1, 3, n, D))
        assert read[0, 0].argmax() == k % n
        assert read.min() > 0.03  # no gate is saturated
        torch.testing.assert_close(read.sum(-1), torch.ones(1, 3), **FLOAT32)
        assert torch.equal(write, torch.ones_like(write))
        for dimension in (-1, -2):
            torch.testing.assert_close(mix.sum(dimension), torch.ones(1, 3, n), **FLOAT32)
    assert len(read_logits(n, 0, 1e-6)) == n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", WIDTHS)
def test_equal_streams_stay_what_they_are(n, dtype):
    """Whatever the mix, bit for bit: the deviations that it weights are zero."""
    module = random_connection(n)
    with torch.no_grad():
        module.base[n : 2 * n] = 0
        module.scale[1] = 0
    hidden = torch.randn(2, 5, 1, D).to(dtype)
    _, carry = module.width_connection(hidden.expand(2, 5, n, D))
    added = torch.randn(2, 5, D).to(dtype)
    assert torch.equal(carry.write(added).written(), (hidden + added.unsqueeze(-2)).expand(2, 5, n, D))


def composite_gain(mixes: list[torch.Tensor]) -> float:
    """Largest absolute row or column sum of the product of the layers' matrices: the paper's Amax gain."""
    product = torch.eye(mixes[0].shape[-1])
    for mix in mixes:
        product = mix @ product
    return max(product.abs().sum(dimension).max().item() for dimension in (-1, -2))


def test_composite_gain_over_depth_is_bounded():
    """Sixty random layers: mHC stays below the paper's 1.6, unconstrained hyper-connections blow up."""
    streams, constrained, free = torch.randn(1, 1, 4, D), [], []
    for k in range(60):
        torch.manual_seed(k)
        module, plain = randomized(ManifoldHyperConnection(D, 4, k), 0.5), randomized(HyperConnection(D, 4, k), 0.5)
        constrained.append(module.coefficients(streams)[2][0, 0].detach())
        free.append(plain.coefficients(streams)[0][:, 1:].T.detach())
    assert composite_gain(constrained) <= 1.6
    assert composite_gain(free) > 100


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("mixes", [True, False])
def test_the_biases_of_the_paper(n, mixes):
    """Appendix A.6: b_pre is 3 for the home stream and -3 for others, b_post is 0 and b_res is 6 I - 3."""
    module = ManifoldHyperConnection(D, n, n + 1, mixes=mixes, is_biased=True)
    home = torch.eye(n)[1 % n]
    expected = [6 * home - 3, torch.zeros(n), (6 * torch.eye(n) - 3).flatten()]
    assert torch.equal(module.base.detach(), torch.cat(expected[: 3 if mixes else 2]))
    read, write, mix = module.coefficients(torch.randn(2, 3, n, D))
    torch.testing.assert_close(read, torch.sigmoid(6 * home - 3).expand(2, 3, n), **FLOAT32)
    assert torch.equal(write, torch.ones(2, 3, n))
    if mixes:
        kept = torch.tensor(6.0).exp() / (torch.tensor(6.0).exp() + n - 1)
        torch.testing.assert_close(mix.diagonal(dim1=-2, dim2=-1), kept.expand(2, 3, n), **FLOAT32)


@pytest.mark.parametrize("connection", ["mhc", "ihc"])
def test_the_biased_start_is_for_training_from_scratch(connection):
    model = hc_llama(connection=connection, hc_start="biased")
    assert model.model.layers[1].mlp_hc.base[:4].tolist() == [-3, -3, -3, 3]
    with pytest.raises(ValueError, match="reads of streams with the biased start don't sum to 1, so no pretrained"):
        HCLlamaConfig.from_prenorm(llama_config(), connection=connection, hc_start="biased")
    with pytest.raises(StrictDataclassError, match="got 'biased'.: 'mhc' or 'ihc' can start so"):
        HCLlamaConfig(connection="dhc", hc_start="biased")
