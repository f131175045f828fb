"""The fused kernels of attention residuals against their algebra in float64: on a GPU, or in Triton's interpreter."""

from collections import Counter
from itertools import product

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_hyperconn import convert_model, set_hc_implementation
from hf_hyperconn.models import attnres_triton as operators
from hf_hyperconn.models.attention_residuals import AttentionReadout, AttentionResidual, Values
from tests.conftest import hc_llama, llama_config
from tests.marks import few, tail
from tests.tolerances import COMPILED, KERNELS_FLOAT32
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

EPS = 1e-6
ATTNRES = {"connection": "attnres", "hc_mult": 1}
forms = pytest.mark.parametrize("form", ["sum", "mean"])
dtypes = pytest.mark.parametrize("dtype", few(TOLERANCES, torch.float32, torch.bfloat16))


def inputs(counts: tuple[int, ...], size: int, tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A query whose scores are of order one, r, and values in tensors of these counts."""
    shapes = ((size,), *((count, size) for count in counts))
    rows = [torch.randn(1, tokens, *shape, generator=seed(1 + k)).to(dtype) for k, shape in enumerate(shapes)]
    return [size**-0.5 * torch.randn(size, generator=seed(0)), *rows]


def results(form: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """h, and the gradients of query, values and, of the sum, r for a given gradient of h."""
    query, residual, *values = (tensor.to(DEVICE).detach().requires_grad_() for tensor in tensors)
    read = Values(residual, tuple(values)).read(query, form, EPS)
    assert type(read.grad_fn).__name__ == (
        "_ReadBackward" if residual.dtype == torch.float64 else "_FusedReadBackward"
    )
    leaves = [query, *values, *([residual] if form == "sum" else [])]
    return [read, *torch.autograd.grad(read, leaves, torch.randn(read.shape, generator=seed(9)).to(read))]


def check(form: str, tensors: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Every result and gradient against autograd through the algebra in float64."""
    ours = results(form, tensors)
    set_hc_implementation("torch")
    reference = results(form, [tensor.double() for tensor in tensors])
    set_hc_implementation("triton")
    rtol, atol = TOLERANCES[dtype].values()
    for place, (mine, other) in enumerate(zip(ours, reference, strict=True)):
        terms = other.abs().max().item()
        torch.testing.assert_close(
            mine.double(), other, rtol=rtol, atol=atol * terms, msg=lambda text, place=place: f"{place}: {text}"
        )


@forms
@pytest.mark.parametrize("counts", few(("1", "2", "1+1", "16", "7+1", "2+1+1", "64+1"), "1", "7+1", "64+1"))
def test_every_number_of_values(counts, form):
    check(form, inputs(tuple(map(int, counts.split("+"))), 48, 3))


@forms
@dtypes
def test_every_dtype(dtype, form):
    check(form, inputs((4, 1), 64, 7, dtype), dtype)


def test_values_of_another_dtype_than_the_others():
    """As under autocast, whose residual stream is float32 and branches bfloat16."""
    query, residual, first, last = inputs((3, 1), 64, 5)
    check("sum", [query, residual, first, last.bfloat16()], torch.bfloat16)
    streams = torch.float32, torch.bfloat16
    for of_streams, of_outputs in (streams, streams[::-1]):
        check_branch_outputs_of_another_dtype(connections(64, 2), of_streams, of_outputs)


@pytest.mark.parametrize("size", [*few((1, 37, 576, 1000, 2048, 5129, 16384), 1, 1000, 5129), *tail(4096)])
def test_every_size(size):
    for form in ("sum", "mean"):
        check(form, inputs((3, 1), size, 2))


@pytest.mark.parametrize("tokens", few((1, 4, 5, 11), 11))
def test_every_number_of_tokens(tokens, monkeypatch):
    """Also more than there are programs in the backward."""
    monkeypatch.setattr(operators, "_CHUNKS", 4)
    check("sum", inputs((2,), 16, tokens))


@ON_GPU
@pytest.mark.parametrize("size", SIZES)
def test_many_tokens(size):
    for dtype, counts in product((torch.float32, torch.bfloat16), ((1,), (8, 1), (32, 1))):
        check("sum", inputs(counts, size, 4096, dtype), dtype)


@pytest.mark.parametrize("kind", NOT_CONTIGUOUS)
def test_not_contiguous(kind):
    torch.manual_seed(0)
    first, last = NOT_CONTIGUOUS[kind](), NOT_CONTIGUOUS[kind]()
    check("sum", [0.1 * torch.randn(64), first[..., 0, :], first[..., 1:, :], last[..., :2, :]])


@forms
def test_finite_differences(form):
    """Gradients against differences of the formula, written out in float64."""
    tensors = inputs((2, 1), 5, 2)
    found = results(form, tensors)[1:]
    wide = [tensor.double() for tensor in tensors]
    grad = torch.randn(2, 5, generator=seed(9)).double()

    def loss() -> torch.Tensor:
        query, residual, *values = wide
        v = torch.cat(values, dim=-2)
        p = torch.softmax((v * query).sum(-1) / (v.square().mean(-1) + EPS).sqrt(), dim=-1).unsqueeze(-1)
        h = (p * v).sum(-2) if form == "mean" else residual + ((3 * p - 1) * v).sum(-2)
        return (grad * h).sum()

    for mine, tensor in zip(found, [wide[0], *wide[2:], wide[1]], strict=False):
        expected = torch.empty_like(tensor)
        for place, of_value in zip(tensor.view(-1), expected.view(-1), strict=True):
            value, ends = place.item(), []
            for moved in (value + 1e-5, value - 1e-5):
                place.fill_(moved)
                ends.append(loss())
            place.fill_(value)
            of_value.copy_((ends[0] - ends[1]) / 2e-5)
        torch.testing.assert_close(mine.double().cpu(), expected, **KERNELS_FLOAT32)


def connections(size: int, number: int, block: int = 1, spread: float = 0.3) -> list[AttentionResidual]:
    """Consecutive connections with random queries."""
    modules = [AttentionResidual(size, k, block, eps=EPS) for k in range(number)]
    with torch.no_grad():
        for k, module in enumerate(modules):
            module.query.copy_(spread * torch.randn(size, generator=seed(k)))
    return [module.to(DEVICE) for module in modules]


def run(modules: list, readout: AttentionReadout, hidden_states: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """What every sub-layer and the readout read, in layers of so many parts."""
    streams, seen = modules[0].take(modules[0].expand_streams(hidden_states)), []
    for k, module in enumerate(modules):
        branch_input, carry = module(streams)
        seen.append(branch_input)
        streams = carry.write(torch.sin(branch_input + k))
        if k % parts == parts - 1:
            streams = module.take(streams.written())
    return [*seen, readout(streams.written())]


@pytest.mark.parametrize("block", few((1, 2, 3, 4), 1, 3))
@pytest.mark.parametrize("parts", [2, 4])
def test_whole_stacks(parts, block):
    """What every sub-layer reads, and the gradients of embedding and queries, against the algebra in float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        set_hc_implementation("triton" if dtype == torch.float32 else "torch")
        modules = [module.to(dtype) for module in connections(24, 8, block)]
        readout = AttentionReadout(24, eps=EPS).to(DEVICE, dtype)
        hidden_states = torch.randn(1, 3, 24, generator=seed(0)).to(DEVICE, dtype).requires_grad_()
        seen = run(modules, readout, hidden_states, parts)
        leaves = [hidden_states, *(module.query for module in (*modules, readout))]
        found.append([*seen, *torch.autograd.grad(seen[-1].cos().sum(), leaves)])
    for mine, other in zip(*found, strict=True):
        rtol, atol = KERNELS_FLOAT32.values()
        torch.testing.assert_close(mine.double(), other, rtol=rtol, atol=atol * max(1.0, other.abs().max().item()))


@dtypes
@pytest.mark.parametrize("block", few((1, 2, 3, 4), 1, 3))
@torch.no_grad()
def test_reads_the_residual_stream_at_the_start(block, dtype):
    """Bit for bit, through 16 sub-layers, whose number of values takes every count up to 17."""
    modules, readout = connections(64, 16, block, spread=0.0), AttentionReadout(64, eps=EPS).to(DEVICE)
    residual = torch.randn(1, 1, 64, generator=seed(0)).to(DEVICE, dtype)
    for k, read in enumerate(run(modules, readout, residual, 2)):
        assert read.dtype == dtype
        assert torch.equal(read, residual)
        residual = residual + torch.sin(residual + k)


@dtypes
def test_values_have_no_gradient_at_the_start(dtype):
    """Exactly, so that what is below has the gradients that it has in the base."""
    _, *others = inputs((5, 1), 64, 3, dtype)
    _, of_query, *of_values, of_residual = results("sum", [torch.zeros(64), *others])
    assert of_query.any()
    assert not any(grad.any() for grad in of_values)
    assert torch.equal(of_residual, torch.randn(1, 3, 64, generator=seed(9)).to(of_residual))


@forms
def test_large_scores_do_not_overflow(form):
    _, *others = inputs((5, 1), 64, 3)
    assert all(value.isfinite().all() for value in results(form, [torch.full((64,), 1e4), *others]))


def test_second_derivatives():
    def make(dtype):
        set_hc_implementation("torch" if dtype == torch.float64 else "triton")
        return [module.to(dtype) for module in connections(16, 2)]

    check_second_derivatives(make)


@forms
def test_no_token(form):
    for value in results(form, inputs((2, 1), 64, 0)):
        assert not value.isnan().any()


def test_runs_repeat_bit_for_bit():
    tensors = inputs((8, 1), 130, 11, torch.bfloat16)
    for mine, other in zip(*(results("sum", tensors) for _ in range(2)), strict=True):
        assert torch.equal(mine, other)


def test_a_token_does_not_depend_on_those_beside_it(monkeypatch):
    monkeypatch.setattr(operators, "_CHUNKS", 4)
    query, *rows = (tensor.to(DEVICE) for tensor in inputs((4, 1), 64, 11))
    grad = torch.randn(rows[0].shape, generator=seed(9)).to(DEVICE)

    def computed(part):
        residual, first, last = (tensor[:, part] for tensor in rows)
        read, *of_softmax = operators.read_forward(True, EPS, query, residual, first, last)
        return read, *operators.read_backward(True, query, first, last, *of_softmax, grad[:, part])[:2]

    whole = computed(slice(None))
    for token in (0, 10):
        alone = computed(slice(token, token + 1))
        assert all(torch.equal(y[:, token : token + 1], x) for y, x in zip(whole, alone, strict=True))


def test_the_kernels_ran(monkeypatch):
    """When they are asked for, each once a sub-layer and once for the readout."""
    launched = launches_of(("_read", "_read_backward"), operators, monkeypatch)
    model = hc_llama(num_hidden_layers=2, hc_block=2, **ATTNRES).to(DEVICE)
    tokens = torch.arange(5, device=DEVICE)[None]
    loss = model(tokens, labels=tokens).loss
    assert launched == ["_read"] * 5
    loss.backward()
    assert Counter(launched) == {"_read": 5, "_read_backward": 5}


def test_what_they_can_not_do_is_left_to_torch():
    tensors = inputs((2,), 2**14 + 1, 1)
    with pytest.raises(RuntimeError, match="1 streams of 16385 values"):
        results("sum", tensors)
    set_hc_implementation("auto")
    query, residual, values = (tensor.to(DEVICE).requires_grad_() for tensor in tensors)
    assert type(Values(residual, (values,)).read(query, "sum", EPS).grad_fn).__name__ == "_ReadBackward"


def test_operators_refuse_values_of_another_shape():
    query, residual, first, last = (tensor.to(DEVICE) for tensor in inputs((2, 1), 24, 3))
    arguments = True, EPS, query
    for wrong in ((residual[:, :2], first, last), (residual, first[:, :2], last), (residual, first, last[..., :12])):
        with pytest.raises(ValueError, match="must be of shape"):
            operators.read_forward(*arguments, *wrong)


@dtypes
@pytest.mark.parametrize("block", few((1, 2), 2))
@torch.no_grad()
def test_conversion_stays_exact(block, dtype):
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config()).to(DEVICE, dtype)
    converted = convert_model(base, **ATTNRES, hc_block=block)
    tokens = torch.randint(3, 90, (2, 4), device=DEVICE)
    assert torch.equal(converted(tokens).logits, base(tokens).logits)


def test_gradient_checkpointing():
    check_gradient_checkpointing(hc_llama(num_hidden_layers=1, **ATTNRES))


def test_autocast():
    check_autocast(hc_llama(num_hidden_layers=1, **ATTNRES))


@pytest.mark.parametrize("counts", [(3,), (3, 1)])
def test_operators_are_sound(counts):
    """PyTorch's own check of custom operators: schemas and fake tensors."""
    query, residual, *values = (tensor.to(DEVICE) for tensor in inputs(counts, 64, 5))
    first, last = [*values, None][:2]

    def check(operator, *arguments):
        torch.library.opcheck(operator.operator, arguments, test_utils=("test_schema", "test_faketensor"))
        return operator(*arguments)

    _, *of_softmax = check(operators.read_forward, True, EPS, query, residual, first, last)
    check(operators.read_backward, True, query, first, last, *of_softmax, residual)


def test_compiles_whole():
    """`torch.compile(fullgraph=True)` sees through the operators, forward and backward."""
    modules = connections(64, 2)
    found = eager_and_compiled(modules, of=[module.query for module in modules])
    for mine, other in zip(*found, strict=True):
        if DEVICE == "cuda":  # Inductor's order of sums
            torch.testing.assert_close(mine, other, **COMPILED)
        else:
            assert torch.equal(mine, other)


def test_export():
    """A model exports with the kernels inside, as operators."""
    check_export(hc_llama(num_hidden_layers=1, **ATTNRES), "read_forward")
