"""The fused kernels of mHC and iHC against their algebra in float64: on a GPU, or in Triton's interpreter.

Run by `make test`, in a process of its own: the interpreter is chosen when Triton is imported.
"""

from collections import Counter

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_hyperconn import convert_model, set_hc_implementation
from hf_hyperconn.analysis.costs import kept_bytes
from hf_hyperconn.models import mhc_triton as operators
from hf_hyperconn.models.manifold_hyper_connections import ManifoldCarry, ManifoldHyperConnection
from tests.conftest import hc_llama, kept_for_a_token, llama_config
from tests.marks import few, tail
from tests.tolerances import COMPILED, READS_SUM_TO_ONE
from tests.triton.common import (
    DEVICE,
    NOT_CONTIGUOUS,
    ON_GPU,
    SIZES,
    TOLERANCES,
    check_autocast,
    check_branch_outputs_of_another_dtype,
    check_export,
    check_gradient_checkpointing,
    check_second_derivatives,
    eager_and_compiled,
    launches_of,
    seed,
)

FEW = 4  # iterations of Sinkhorn, of which the interpreter needs a millisecond each and the backward iters^2 / 2
widths = pytest.mark.parametrize("n", few(range(2, 9), 2, 4, tail=(5, 6, 7)))
mixing = pytest.mark.parametrize("mixes", [True, False])
FORWARD = ("_project", "_coefficients", "_read", "_write")
BACKWARD = tuple(f"{name}_backward" for name in ("_write", "_dot", "_coefficients", "_read", "_projection"))


def connections(n: int, size: int, mixes: bool, iters: int = FEW) -> list[ManifoldHyperConnection]:
    """Two consecutive connections with random parameters; what they predict is of order one."""
    modules = []
    for k in range(2):
        torch.manual_seed(k)
        module = ManifoldHyperConnection(size, n, k, mixes=mixes, sinkhorn_iters=iters)
        spreads = {"fn": (n * size) ** -0.5, "base": 0.3, "scale": 1.0}
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.add_(spreads[name] * torch.randn_like(parameter))
        modules.append(module.to(DEVICE))
    return modules


def results(
    modules: list[ManifoldHyperConnection], streams: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Read, write and read, write: what they give, and every gradient for given gradients of that."""
    first, second = modules
    streams = streams.to(dtype).requires_grad_()
    shape = (*streams.shape[:2], streams.shape[-1])
    outputs = [torch.randn(shape, generator=seed(k)).to(DEVICE, dtype).requires_grad_() for k in (1, 2)]
    x0, carry = first.width_connection(streams)
    assert isinstance(carry, ManifoldCarry) == (dtype != torch.float64)
    x1, carry = second(carry.write(outputs[0]))
    made = {"x0": x0, "x1": x1, "after": carry.write(outputs[1]).written()}
    grads = [torch.randn(y.shape, generator=seed(3 + k)).to(DEVICE, dtype) for k, y in enumerate(made.values())]
    leaves = {"streams": streams, "output 0": outputs[0], "output 1": outputs[1]}
    leaves |= {f"{name} {k}": p for k, module in enumerate(modules) for name, p in module.named_parameters()}
    found = torch.autograd.grad([*made.values()], [*leaves.values()], grads)
    return {name: y.detach() for name, y in made.items()} | dict(zip(leaves, found, strict=True))


def check(n, size, tokens, dtype=torch.float32, mixes=True, streams=None, iters=FEW) -> dict[str, torch.Tensor]:
    """Every result and gradient against autograd through the algebra in float64."""
    if streams is None:
        streams = torch.randn(1, tokens, n, size, generator=seed(0)).to(dtype)
    streams = streams.to(DEVICE)
    ours = results(connections(n, size, mixes, iters), streams, dtype)
    set_hc_implementation("torch")
    reference = results([module.double() for module in connections(n, size, mixes, iters)], streams, torch.float64)
    set_hc_implementation("triton")
    for name, other in reference.items():
        # the gradient of a scale adds up the terms of that of the base, and may cancel
        terms = reference[name.replace("scale", "base")].abs().max().item()
        rtol, atol = TOLERANCES[dtype].values()
        torch.testing.assert_close(ours[name].double(), other, rtol=rtol, atol=atol * terms, msg=_named(name))
    return ours


def _named(name):
    return lambda message: f"{name}: {message}"


@widths
@mixing
def test_every_number_of_streams(n, mixes):
    check(n, 64, 7, mixes=mixes)


@pytest.mark.parametrize("n", few(range(2, 9), 4, tail=(2, 5, 6, 7)))
@mixing
@pytest.mark.parametrize("dtype", few((torch.bfloat16, torch.float16), torch.bfloat16))
def test_16_bit_streams(n, mixes, dtype):
    check(n, 64, 7, dtype, mixes)


@pytest.mark.parametrize("size", [*few((576, 1000, 2048, 5129), 576), *tail(4096)])
def test_every_size(size):
    check(4, size, 1, torch.float16)
    check(3, size, 1, mixes=False)


@pytest.mark.slow
@widths
@mixing
@pytest.mark.parametrize("size", [576, *tail(1000)])
def test_every_size_and_number_of_streams(n, size, mixes):
    check(n, size, 2, torch.bfloat16, mixes)


@mixing
@pytest.mark.parametrize("tokens", few((1, 63), 1))
def test_every_number_of_tokens(tokens, mixes):
    check(4, 64, tokens, torch.bfloat16, mixes)


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_every_number_of_iterations(iters):
    check(3, 64, 2, iters=iters)


@ON_GPU
@mixing
@pytest.mark.parametrize("size", SIZES)
def test_many_tokens(size, mixes):
    for n in range(2, 9):
        for dtype in (torch.float32, torch.bfloat16):
            check(n, size, 1024, dtype, mixes)


@mixing
def test_second_derivatives(mixes):
    def make(dtype):
        set_hc_implementation("torch" if dtype == torch.float64 else "triton")
        return [module.to(dtype) for module in connections(2, 16, mixes)]

    check_second_derivatives(make)


@mixing
def test_no_token(mixes):
    streams = torch.empty(1, 0, 4, 64, device=DEVICE)
    for value in results(connections(4, 64, mixes), streams, torch.float32).values():
        assert not value.isnan().any()


@pytest.mark.parametrize("kind", NOT_CONTIGUOUS)
def test_not_contiguous(kind):
    check(4, 64, 7, streams=NOT_CONTIGUOUS[kind]())


@pytest.mark.parametrize("mixes", few((True, False), True))
def test_runs_repeat_bit_for_bit(mixes):
    streams = torch.randn(1, 11, 4, 130, generator=seed(0)).to(DEVICE)
    first, second = (results(connections(4, 130, mixes), streams, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_token_does_not_depend_on_those_beside_it():
    first, second = connections(4, 64, True)
    streams = torch.randn(1, 34, 4, 64, generator=seed(0)).to(DEVICE)
    outputs = torch.randn(1, 34, 64, generator=seed(1)).to(DEVICE)

    def run(part):
        x0, carry = first.width_connection(streams[:, part])
        x1, carry = second(carry.write(outputs[:, part]))
        return x0, x1, carry.write(outputs[:, part]).written()

    whole = run(slice(None))
    for token in (0, 33):
        alone = run(slice(token, token + 1))
        assert all(torch.equal(y[:, token : token + 1], x) for y, x in zip(whole, alone, strict=True))


@mixing
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_equal_streams_stay_what_they_are(n, dtype, mixes):
    """Whatever the mix, bit for bit: the deviations that it weights are zero."""
    module = connections(n, 64, mixes)[0]
    with torch.no_grad():
        module.base[n : 2 * n] = 0
        module.scale[1] = 0
    hidden = torch.randn(2, 5, 1, 64, device=DEVICE).to(dtype)
    _, carry = module.width_connection(hidden.expand(2, 5, n, 64))
    added = torch.randn(2, 5, 64, device=DEVICE).to(dtype)
    assert torch.equal(carry.write(added).written(), (hidden + added.unsqueeze(-2)).expand(2, 5, n, 64))


@pytest.mark.parametrize(
    ("streams_dtype", "output_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_branch_outputs_of_another_dtype(streams_dtype, output_dtype):
    check_branch_outputs_of_another_dtype(connections(4, 64, True), streams_dtype, output_dtype)


@mixing
def test_the_kernels_ran(mixes, monkeypatch):
    """When they are asked for, each once a sub-layer; that of `fn` only when it is trained."""
    launched = launches_of((*FORWARD, *BACKWARD), operators, monkeypatch)
    model = hc_llama(num_hidden_layers=2, connection="mhc" if mixes else "ihc", hc_sinkhorn_iters=FEW).to(DEVICE)
    model.model.layers[0].attn_hc.fn.requires_grad_(False)
    tokens = torch.arange(5, device=DEVICE)[None]
    loss = model(tokens, labels=tokens).loss
    assert Counter(launched) == {name: 4 for name in FORWARD}
    launched.clear()
    loss.backward()
    assert Counter(launched) == {name: 4 - (name == "_projection_backward") for name in BACKWARD}


def test_what_they_can_not_do_is_left_to_torch():
    set_hc_implementation("auto")
    for streams in (torch.randn(1, 2, 9, 8, device=DEVICE), torch.randn(1, 2, 4, 8, device=DEVICE).double()):
        module = ManifoldHyperConnection(8, streams.shape[-2], 0).to(DEVICE)
        assert not isinstance(module.width_connection(streams)[1], ManifoldCarry)
    set_hc_implementation("triton")
    with pytest.raises(RuntimeError, match="more than 8"):
        ManifoldHyperConnection(8, 9, 0).to(DEVICE).width_connection(torch.randn(1, 2, 9, 8, device=DEVICE))


@pytest.mark.parametrize("dtype", few((torch.bfloat16, torch.float16, torch.float32), torch.bfloat16, torch.float32))
@pytest.mark.parametrize("n", few((2, 4), 4))
@pytest.mark.parametrize("connection", ["mhc", "ihc"])
@torch.no_grad()
def test_conversion_stays_exact(connection, n, dtype):
    """In float32 but for the sum of reads."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config()).to(DEVICE, dtype)
    converted = convert_model(base, hc_mult=n, connection=connection)
    tokens = torch.randint(3, 90, (2, 4), device=DEVICE)
    if dtype == torch.float32:
        torch.testing.assert_close(converted(tokens).logits, base(tokens).logits, **READS_SUM_TO_ONE)
    else:
        assert torch.equal(converted(tokens).logits, base(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("connection", "n"), [("mhc", 4), ("ihc", 3)])
def test_what_is_kept_for_the_backward(connection, n):
    size = {"num_hidden_layers": 2}
    model = hc_llama(connection=connection, hc_mult=n, hc_sinkhorn_iters=FEW, **size).to(DEVICE, torch.bfloat16)
    plain = LlamaForCausalLM(llama_config(**size)).to(DEVICE, torch.bfloat16)
    added = kept_for_a_token(model) - kept_for_a_token(plain)
    assert kept_bytes(model.config.to_dict(), item_size=2) == added


@pytest.mark.parametrize("connection", few(("mhc", "ihc"), "mhc"))
def test_gradient_checkpointing(connection):
    check_gradient_checkpointing(hc_llama(num_hidden_layers=1, connection=connection, hc_sinkhorn_iters=FEW))


def test_autocast():
    check_autocast(hc_llama(num_hidden_layers=1, connection="mhc", hc_sinkhorn_iters=FEW))


@pytest.mark.parametrize("mixes", few((True, False), True))
def test_operators_are_sound(mixes):
    """PyTorch's own check of custom operators: schemas and fake tensors."""
    module, streams = connections(3, 64, mixes, iters=2)[0], torch.randn(2, 5, 3, 64, device=DEVICE)
    parameters = [p.detach() for p in (module.fn, module.base, module.scale)]
    arguments = (streams, *parameters, mixes, 2, module.eps)

    def check(operator, arguments):
        torch.library.opcheck(operator.operator, arguments, test_utils=("test_schema", "test_faketensor"))
        return operator(*arguments)

    x, read, write, mix, predicted, deviation = check(operators.width_forward, arguments)
    saved = (read, mix, predicted, deviation)
    check(operators.depth_forward, (streams, write, mix, mixes, x.bfloat16()))
    check(operators.depth_backward, (streams, write, x.bfloat16()))
    grads = (torch.randn_like(streams), x, torch.randn_like(write))
    of_products = check(operators.width_backward, (*arguments, *saved, *grads))[-1]
    check(operators.projection_backward, (streams, of_products))


@pytest.mark.parametrize("mixes", few((True, False), True))
def test_compiles_whole(mixes):
    """`torch.compile(fullgraph=True)` sees through the operators, forward and backward."""
    modules = connections(3, 64, mixes, iters=3)
    parameters = [p for module in modules for p in module.parameters()]
    found = eager_and_compiled(modules, of=parameters)
    for place, (mine, other) in enumerate(zip(*found, strict=True)):
        if DEVICE == "cuda" and place >= len(found[0]) - len(parameters):  # Inductor's order of sums
            torch.testing.assert_close(mine, other, **COMPILED)
        else:
            assert torch.equal(mine, other)


def test_export():
    """A model exports with the kernels inside, as operators."""
    check_export(hc_llama(num_hidden_layers=1, connection="mhc", hc_sinkhorn_iters=FEW), "width_forward")
