"""The fused kernels against the float64 reference: on a GPU, or in Triton's interpreter where there is none.

Run by `make test`, in a process of its own: the interpreter is chosen when Triton is imported.
"""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from hf_hyperconn import convert_model
from hf_hyperconn.models import hc_triton as triton_kernels
from tests.conftest import hc_llama, llama_config
from tests.marks import few
from tests.tolerances import LARGE_MEANS
from tests.triton.common import (
    DEVICE,
    NOT_CONTIGUOUS,
    ON_GPU,
    SIZES,
    TOLERANCES,
    check_autocast,
    check_branch_outputs_of_another_dtype,
    check_gradient_checkpointing,
    check_second_derivatives,
    launches_of,
    seed,
)
from tests.triton.steps import connections, results


def check(n, size, tokens, dtype=torch.float32, norm="rms", tanh=True, streams=None):
    """Every result and gradient against autograd through the algebra in float64."""
    if streams is None:
        streams = torch.randn(1, tokens, n, size, generator=seed(0)).to(dtype)
    modules = connections(n, size, norm, tanh)
    ours = results(modules, streams.to(DEVICE), dtype)
    exact = [module.double() for module in connections(n, size, norm, tanh)]
    for module in exact:
        module.coefficient_parameters = lambda dtype: None
    reference = results(exact, streams.to(DEVICE).double(), torch.float64)
    of_static = 0.0
    for mine, other in zip(ours, reference, strict=True):
        # the gradient of a scale adds up as many terms as those of static_alpha, which come before, and may cancel
        of_static = other.abs().max().item() if other.shape == (n, n + 1) else of_static
        size_of_terms = of_static if other.shape == (1,) else other.abs().max().item()
        rtol, atol = TOLERANCES[dtype].values()
        torch.testing.assert_close(mine.double(), other, rtol=rtol, atol=atol * size_of_terms)
    return ours


@pytest.mark.parametrize("n", few(range(1, 9), 1, 2, 4, tail=(5, 6, 7)))
@pytest.mark.parametrize(("norm", "tanh"), [("static", True), ("rms", True), ("rms", False), ("layer", True)])
def test_every_number_of_streams(n, norm, tanh):
    check(n, 64, 7, norm=norm, tanh=tanh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", few((1, 2, 3, 4, 8), 4, tail=(1, 2)))
def test_16_bit_streams(n, dtype):
    check(n, 64, 7, dtype)


@pytest.mark.parametrize("size", few(SIZES, *SIZES[:3]))
def test_every_size(size):
    check(4, size, 3)


@pytest.mark.parametrize("tokens", few((1, 7, 63), 1, 7))
def test_every_number_of_tokens(tokens):
    check(4, 64, tokens, torch.bfloat16)


@ON_GPU
@pytest.mark.parametrize("size", SIZES)
def test_many_tokens(size):
    for n in range(1, 9 if size <= 4096 else 5):
        for dtype in (torch.float32, torch.bfloat16):
            check(n, size, 4096, dtype)


def test_more_than_registers_hold():
    with pytest.raises(RuntimeError, match="5 streams of 5129 values, padded to 8 x 8192, are more than 32768"):
        check(5, 5129, 1)


@pytest.mark.parametrize("mean", LARGE_MEANS)
def test_large_means_do_not_cancel(mean):
    """What a LayerNorm of them predicts, and its gradients, are as near to float64 as the norm itself is."""
    streams = mean + 0.01 * torch.randn(1, 5, 3, 64, generator=seed(0)).to(DEVICE)
    found = []
    for dtype in (torch.float32, torch.float64):
        module = connections(3, 64, "layer", True)[0].to(dtype)
        if dtype == torch.float64:
            module.coefficient_parameters = lambda dtype: None
        values = streams.to(dtype).requires_grad_()
        x, carry = module.width_connection(values)
        after = carry.write(x.detach().cos()).written()
        grads = [torch.randn(y.shape, generator=seed(k)).to(DEVICE, dtype) for k, y in enumerate((x, after))]
        inputs = [values, module.dynamic_alpha_fn, module.dynamic_beta_fn]
        found.append([x.detach(), after.detach(), *torch.autograd.grad((x, after), inputs, grads)])
    for mine, exact in zip(*found, strict=True):
        scale = exact.abs().max().item()
        torch.testing.assert_close(mine.double() / scale, exact / scale, **LARGE_MEANS[mean])


@pytest.mark.parametrize("norm", ["static", "rms", "layer"])
def test_second_derivatives(norm):
    def make(dtype):
        modules = [module.to(dtype) for module in connections(2, 16, norm, True)]
        if dtype == torch.float64:
            for module in modules:
                module.coefficient_parameters = lambda dtype: None
        return modules

    check_second_derivatives(make)


def test_no_token():
    for value in results(connections(4, 64, "rms", True), torch.empty(1, 0, 4, 64, device=DEVICE), torch.float32):
        assert not value.isnan().any()


@pytest.mark.parametrize("kind", NOT_CONTIGUOUS)
def test_not_contiguous(kind):
    check(4, 64, 7, streams=NOT_CONTIGUOUS[kind]())


def test_streams_that_lie_too_far_apart_for_32_bits():
    far = torch.empty_strided((1, 7, 4, 64), (7 * 64, 64, 2**30, 1), device="meta")
    near, *strides = triton_kernels.token_rows(far[:, :, :2], 2)
    assert [*strides, near.stride(-1)] == [64, 2**30, 1]
    copy, *strides = triton_kernels.token_rows(far, 2)
    assert copy.is_contiguous()
    assert strides == [4 * 64, 64]


def test_parameters_of_any_layout():
    streams, found = torch.randn(1, 5, 4, 64, generator=seed(0)).to(DEVICE), []
    for transpose in (False, True):
        modules = connections(4, 64, "static", True)
        for module in modules if transpose else ():
            module.static_alpha = nn.Parameter(module.static_alpha.detach().t().contiguous().t())
            assert not module.static_alpha.is_contiguous()
        found.append(results(modules, streams.clone(), torch.float32))
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


@pytest.mark.parametrize("norm", few(("static", "layer"), "static"))
def test_runs_repeat_bit_for_bit(norm):
    first, second = (check(4, 576, 7, torch.bfloat16, norm) for _ in range(2))
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


def test_branch_outputs_of_another_dtype():
    check_branch_outputs_of_another_dtype(connections(4, 64, "rms", True), torch.float32, torch.bfloat16)


def test_the_kernels_ran(monkeypatch):
    """When they are asked for, three launches a layer forward, and seven backward, four of them for parameters."""
    tokens = torch.arange(5, device=DEVICE)[None]
    model = hc_llama(num_hidden_layers=2).to(DEVICE)
    model(tokens)  # on a GPU, the first connection tries a kernel
    launched = launches_of(("_forward", "_backward", "_parameters", "_total"), triton_kernels, monkeypatch)
    loss = model(tokens, labels=tokens).loss
    assert launched == ["_forward"] * 6
    loss.backward()
    assert sorted(launched[6:]) == ["_backward"] * 6 + ["_parameters"] * 4 + ["_total"] * 4


@pytest.mark.parametrize("dtype", few((torch.float32, torch.bfloat16, torch.float16), torch.bfloat16))
@pytest.mark.parametrize(
    ("n", "connection"), few([(4, "dhc"), (4, "shc"), (1, "dhc"), (8, "dhc")], (4, "dhc"), (4, "shc"))
)
def test_conversion_stays_exact(n, connection, dtype):
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config()).to(DEVICE, dtype)
    converted = convert_model(base, hc_mult=n, connection=connection)
    tokens = torch.randint(3, 90, (2, 4), device=DEVICE)
    assert torch.equal(converted(tokens).logits, base(tokens).logits)


@pytest.mark.slow
def test_gradient_checkpointing():
    check_gradient_checkpointing(hc_llama(num_hidden_layers=2))


def test_autocast():
    check_autocast(hc_llama(num_hidden_layers=2))
