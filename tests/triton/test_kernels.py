"""The fused kernels against the float64 reference: on a GPU, or in Triton's interpreter where there is none.

Run by `make test`, in a process of its own: the interpreter is chosen when Triton is imported.
"""

import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hyperconn import set_hc_implementation
from hf_hyperconn.models import hyper_connections_step as step
from hf_hyperconn.models import hyper_connections_triton_operators as triton_kernels
from hf_hyperconn.models.hyper_connections import HyperConnection
from tests.conftest import hc_llama, llama_config, traced_logits
from tests.marks import few
from tests.tolerances import COMPILED, KERNELS_FLOAT32, LARGE_MEANS
from tests.triton.common import DEVICE, NOT_CONTIGUOUS, ON_GPU, SIZES, TOLERANCES, seed


def connections(n: int, size: int, norm: str, tanh: bool) -> list[HyperConnection]:
    """Two consecutive connections with random parameters; what they predict is of order one."""
    modules = []
    for k in range(2):
        torch.manual_seed(k)
        kinds = {
            "rms": lambda: nn.RMSNorm(size, eps=1e-6),
            "layer": lambda: nn.LayerNorm(size),
            "static": lambda: None,
        }
        module = HyperConnection(size, n, k, norm=kinds[norm](), tanh=tanh)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                spread = size**-0.5 if name.endswith("fn") else 0.3
                parameter.add_(spread * torch.randn_like(parameter))
        modules.append(module.to(DEVICE))
    return modules


def results(modules: list[HyperConnection], streams: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Read, write and read, write: what they give, and every gradient for given gradients of that."""
    first, second = modules
    streams = streams.to(dtype).requires_grad_()
    outputs = [
        (torch.randn(*streams.shape[:2], streams.shape[-1], generator=seed(k))).to(DEVICE, dtype) for k in (1, 2)
    ]
    outputs = [output.requires_grad_() for output in outputs]
    x0, carry = first.width_connection(streams)
    x1, carry = second(carry.write(outputs[0]))
    after = carry.write(outputs[1]).written()
    made = [x0, x1, after]
    grads = [torch.randn(y.shape, generator=seed(3 + k)).to(DEVICE, dtype) for k, y in enumerate(made)]
    parameters = [p for module in modules for p in module.parameters()]
    found = torch.autograd.grad(made, [streams, *outputs, *parameters], grads)
    return [*(y.detach() for y in made), *found]


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


@pytest.mark.parametrize("n", few(range(1, 9), 1, 2, 4))
@pytest.mark.parametrize(("norm", "tanh"), [("static", True), ("rms", True), ("rms", False), ("layer", True)])
def test_every_number_of_streams(n, norm, tanh):
    check(n, 64, 7, norm=norm, tanh=tanh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", few((1, 2, 3, 4, 8), 4))
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
    """And per-sample gradients, as autograd has them through the algebra in float64."""
    streams = torch.randn(2, 3, 2, 16, generator=seed(0)).to(DEVICE)
    found = []
    for dtype in (torch.float32, torch.float64):
        modules = [module.to(dtype) for module in connections(2, 16, norm, True)]
        if dtype == torch.float64:
            for module in modules:
                module.coefficient_parameters = lambda dtype: None

        def loss(streams, modules=modules):
            first, second = modules
            x, carry = first.width_connection(streams)
            x, carry = second(carry.write(x.sin()))
            return carry.write(x.sin()).written().cos().sum()

        values = streams.to(dtype).requires_grad_()
        leaves = [values, *(p for module in modules for p in module.parameters())]
        grads = torch.autograd.grad(loss(values), leaves, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
        each = torch.func.vmap(torch.func.grad(loss))(values.detach().unsqueeze(1))
        found.append([*second, each])
    for mine, exact in zip(*found, strict=True):
        rtol, atol = KERNELS_FLOAT32.values()
        torch.testing.assert_close(mine.double(), exact, rtol=rtol, atol=atol * exact.abs().max().item())


def test_no_token():
    for value in results(connections(4, 64, "rms", True), torch.empty(1, 0, 4, 64, device=DEVICE), torch.float32):
        assert not value.isnan().any()


@pytest.mark.parametrize("kind", NOT_CONTIGUOUS)
def test_not_contiguous(kind):
    check(4, 64, 7, streams=NOT_CONTIGUOUS[kind]())


def test_streams_that_lie_too_far_apart_for_32_bits():
    far = torch.empty_strided((1, 7, 4, 64), (7 * 64, 64, 2**30, 1), device="meta")
    assert triton_kernels._tokens(far[:, :, :2], 2).stride() == (64, 2**30, 1)
    assert triton_kernels._tokens(far, 2).is_contiguous()


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
    """As under autocast: float32 streams, bfloat16 branches."""
    first, second = connections(4, 64, "rms", True)
    streams = torch.randn(1, 5, 4, 64, device=DEVICE, requires_grad=True)
    _, carry = first.width_connection(streams)
    output = torch.randn(1, 5, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    x, carry = second(carry.write(output))
    after = carry.write(output).written()
    assert (x.dtype, after.dtype) == (torch.float32, torch.float32)
    after.sum().backward()
    assert (streams.grad.dtype, output.grad.dtype) == (torch.float32, torch.bfloat16)


def test_the_kernels_ran(monkeypatch):
    """When they are asked for, three launches a layer forward, and five backward, two of them for projections."""
    launched = []
    for name in ("_forward", "_backward", "_projection"):
        kernel = getattr(triton_kernels, name)

        class Spy:
            def __init__(self, kernel, name):
                self.kernel, self.name = kernel, name

            def __getitem__(self, grid):
                launched.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(triton_kernels, name, Spy(kernel, name))
    model = hc_llama(num_hidden_layers=2).to(DEVICE)
    tokens = torch.arange(5, device=DEVICE)[None]
    loss = model(tokens, labels=tokens).loss
    assert launched == ["_forward"] * 6
    loss.backward()
    assert sorted(launched[6:]) == ["_backward"] * 6 + ["_projection"] * 4


@pytest.mark.parametrize("dtype", few((torch.float32, torch.bfloat16, torch.float16), torch.bfloat16))
@pytest.mark.parametrize(
    ("n", "connection"), few([(4, "dhc"), (4, "shc"), (1, "dhc"), (8, "dhc")], (4, "dhc"), (4, "shc"))
)
def test_conversion_stays_exact(n, connection, dtype):
    from transformers import LlamaForCausalLM

    from hf_hyperconn import convert_model

    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config()).to(DEVICE, dtype)
    converted = convert_model(base, hc_mult=n, connection=connection)
    tokens = torch.randint(3, 90, (2, 4), device=DEVICE)
    assert torch.equal(converted(tokens).logits, base(tokens).logits)


@pytest.mark.slow
def test_gradient_checkpointing():
    model = hc_llama(num_hidden_layers=2).to(DEVICE).train()
    tokens = torch.randint(3, 90, (1, 5), device=DEVICE)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)


def test_autocast():
    model = hc_llama(num_hidden_layers=2).to(DEVICE)
    tokens = torch.randint(3, 90, (1, 5), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert model.model.layers[0].attn_hc.static_alpha.grad.dtype == torch.float32
    set_hc_implementation("torch")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        other = model(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, other, rtol=1e-2, atol=1e-2)


def test_operators_are_sound():
    """PyTorch's own check of custom operators: schemas, fake tensors, and tracing with dynamic shapes."""
    first, streams = connections(3, 64, "layer", True)[0], torch.randn(2, 5, 3, 64, device=DEVICE)
    parameters = first.coefficient_parameters(torch.float32)
    tensors, (eps, centred, tanh) = tuple(t.detach() for t in parameters[:6]), parameters[6:]
    output = torch.randn(2, 5, 64, device=DEVICE)

    def check_operator(each, arguments):
        torch.library.opcheck(each.operator, arguments, test_utils=("test_schema", "test_faketensor"))

    forward, backward = triton_kernels._step_forward, triton_kernels._step_backward
    check_operator(forward, (streams, None, None, *tensors, eps, centred, tanh))
    _, _, coefficients, predicted, deviation, mean = forward(streams, None, None, *tensors, eps, centred, tanh)
    check_operator(forward, (streams, coefficients, output, *tensors, eps, centred, tanh))
    saved = (coefficients, predicted, deviation, mean)
    grads = (torch.randn_like(streams), output, torch.randn(2, 5, 3, device=DEVICE))
    arguments = (streams, coefficients, output, *tensors[2:], *saved, centred, tanh, *grads)
    check_operator(backward, arguments)
    arguments = (streams, coefficients, output, deviation, mean, coefficients)
    check_operator(triton_kernels._projection_backward, arguments)


class Seen(TorchDispatchMode):
    """Remembers the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_operators_are_called_where_they_are_seen():
    """Elsewhere the kernels are launched without them; both ways give equal bits."""
    modules, found = connections(3, 64, "rms", True), []
    streams = torch.randn(1, 5, 3, 64, generator=seed(0)).to(DEVICE)
    with Seen() as seen:
        found.append(results(modules, streams.clone(), torch.float32))
    found.append(results(modules, streams.clone(), torch.float32))
    for operator in ("step_forward", "step_backward", "projection_backward"):
        assert any(name.endswith(operator) for name in seen.names), operator
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


def test_modes_of_other_threads_end_when_they_like():
    (first, _), streams = connections(3, 64, "rms", True), torch.randn(1, 5, 3, 64, device=DEVICE)
    ends, begun = threading.Event(), threading.Event()

    def elsewhere():
        with Seen():
            begun.set()
            assert ends.wait(60)

    other = threading.Thread(target=elsewhere)
    other.start()
    assert begun.wait(60)
    with Seen() as seen:
        ends.set()
        other.join()
        first.width_connection(streams)
    assert any(name.endswith("step_forward") for name in seen.names)


def test_the_first_kernel_is_tried_unseen():
    """An exported program would hold what is seen."""
    with Seen() as seen:
        assert step._try_kernels(torch.device(DEVICE)) is None
    assert seen.names == []


def test_memory_that_was_full_is_no_reason(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(step, "_failures", {})
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "_forward_results", full)
        with pytest.raises(torch.OutOfMemoryError):
            step._why_kernels_fail(torch.device(DEVICE))
    assert step._why_kernels_fail(torch.device(DEVICE)) is None


@pytest.mark.parametrize("connection", ["dhc", "mhc"])
def test_traces(connection):
    model = hc_llama(num_hidden_layers=1, connection=connection).to(DEVICE).eval()
    model.set_attn_implementation("eager")
    tokens = torch.arange(6, device=DEVICE)[None]
    with torch.no_grad():
        torch.testing.assert_close(traced_logits(model, tokens), model(tokens).logits, **COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["static", "rms", "layer"])
def test_compiles_whole(norm):
    """`torch.compile(fullgraph=True)` sees through the operators, forward and backward."""
    modules = connections(3, 64, norm, True)
    streams = torch.randn(2, 5, 3, 64, device=DEVICE)

    def run(streams, output):
        first, second = modules
        x0, carry = first.width_connection(streams)
        x1, carry = second(carry.write(output))
        return x0, x1, carry.write(x1).written()

    torch.compiler.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"  # Inductor would run the interpreter's kernels itself
    inputs = [streams.clone().requires_grad_(), torch.randn(2, 5, 64, device=DEVICE, requires_grad=True)]
    grads = []
    for function in (run, torch.compile(run, fullgraph=True, backend=backend)):
        made = function(*inputs)
        grads.append([*made, *torch.autograd.grad([y.cos().sum() for y in made], inputs)])
    for mine, other in zip(*grads, strict=True):
        if DEVICE == "cuda" and norm == "layer":  # whose bias times fn Inductor sums in another order
            torch.testing.assert_close(mine, other, **COMPILED)
        else:
            assert torch.equal(mine, other)


def test_export():
    """A model exports with the kernels inside, as operators."""
    model = hc_llama(num_hidden_layers=1).to(DEVICE).eval()
    model.set_attn_implementation("eager")  # of which an exported model has the same kernel
    tokens = torch.arange(6, device=DEVICE)[None]
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": tokens, "use_cache": False})
        graphs = [module.graph for module in program.graph_module.modules()]
        assert any("step_forward" in str(node.target) for graph in graphs for node in graph.nodes)
        assert torch.equal(program.module()(input_ids=tokens, use_cache=False).logits, model(tokens).logits)


@ON_GPU
def test_no_recompilation_for_another_length():
    modules = connections(4, 2048, "rms", True)
    results(modules, torch.randn(1, 4096, 4, 2048, device=DEVICE), torch.bfloat16)
    kernels = (triton_kernels._forward, triton_kernels._backward, triton_kernels._projection)
    before = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    for tokens in (1, 2, 16, 100, 1025):
        results(modules, torch.randn(1, tokens, 4, 2048, device=DEVICE), torch.bfloat16)
    after = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    assert after == before


@ON_GPU
def test_cuda_graphs():
    modules = connections(4, 2048, "rms", True)
    streams = torch.randn(1, 64, 4, 2048, device=DEVICE, dtype=torch.bfloat16)

    def run():
        first, second = modules
        x, carry = first.width_connection(streams)
        x, carry = second(carry.write(x))
        return carry.write(x).written()

    with torch.no_grad():
        expected = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
        assert torch.equal(captured, expected)
    assert step.implementation(streams) == "triton"
