"""The operators that launch the kernels of dynamic connections: where they are seen, traced, compiled and exported."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hyperconn.models import computing
from hf_hyperconn.models import hc_triton as triton_kernels
from hf_hyperconn.models.attention_residuals import _run_one as run_one_attention
from hf_hyperconn.models.hc_step import _run_one
from hf_hyperconn.models.hyper_connections import HyperConnection
from hf_hyperconn.models.manifold_hyper_connections import ManifoldHyperConnection
from hf_hyperconn.models.manifold_hyper_connections import _run_one as run_one_manifold
from hf_hyperconn.models.mhc_triton import depth_backward, depth_forward
from tests.conftest import hc_llama, traced_logits
from tests.tolerances import COMPILED
from tests.triton.common import DEVICE, ON_GPU, check_export, eager_and_compiled, seed
from tests.triton.steps import connections, results


def test_operators_are_sound():
    """PyTorch's own check of custom operators: schemas, fake tensors, and tracing with dynamic shapes."""
    first, streams = connections(3, 64, "layer", True)[0], torch.randn(2, 5, 3, 64, device=DEVICE)
    parameters = first.coefficient_parameters(torch.float32)
    tensors, (eps, centred, tanh) = tuple(t.detach() for t in parameters[:8]), parameters[8:]
    folded = tuple(t.detach() for t in parameters.folded()[:6])
    output = torch.randn(2, 5, 64, device=DEVICE)

    def check_operator(operator, arguments):
        torch.library.opcheck(operator.operator, arguments, test_utils=("test_schema", "test_faketensor"))

    forward, backward = triton_kernels._step_forward, triton_kernels._step_backward
    check_operator(forward, (streams, None, None, None, *folded, eps, centred, tanh))
    _, values, beta = forward(streams, None, None, None, *folded, eps, centred, tanh)
    write = streams, values, beta, output
    check_operator(forward, (*write, *folded, eps, centred, tanh))
    grads = (torch.randn_like(streams), output, torch.randn(2, 5, 3, device=DEVICE))
    arguments = (*write, *folded[2:], values, centred, tanh, *grads)
    check_operator(backward, arguments)
    of_tokens = backward(*arguments)[1]
    check_operator(triton_kernels._parameters_backward, (*write, values, of_tokens, *tensors[2:6], centred))


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
    for operator in ("step_forward", "step_backward", "parameters_backward"):
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


@pytest.mark.parametrize("run_one", [_run_one, run_one_manifold, run_one_attention])
def test_the_first_kernel_is_tried_unseen(run_one):
    """An exported program would hold what is seen."""
    with Seen() as seen:
        assert computing._try_kernels(torch.device(DEVICE), run_one) is None
    assert seen.names == []


def test_memory_that_was_full_is_no_reason(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(computing, "_failures", {})
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "_forward_results", full)
        with pytest.raises(torch.OutOfMemoryError):
            computing._why_kernels_fail(torch.device(DEVICE), _run_one)
    assert computing._why_kernels_fail(torch.device(DEVICE), _run_one) is None


@pytest.mark.parametrize("connection", [{}, {"connection": "mhc"}, {"connection": "attnres", "hc_mult": 1}])
def test_traces(connection):
    model = hc_llama(num_hidden_layers=1, **connection).to(DEVICE).eval()
    model.set_attn_implementation("eager")
    tokens = torch.arange(6, device=DEVICE)[None]
    with torch.no_grad():
        torch.testing.assert_close(traced_logits(model, tokens), model(tokens).logits, **COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["static", "rms", "layer"])
def test_compiles_whole(norm):
    """`torch.compile(fullgraph=True)` sees through the operators, forward and backward."""
    modules = connections(3, 64, norm, True)
    for mine, other in zip(*eager_and_compiled(modules, of=[]), strict=True):
        if DEVICE == "cuda" and norm == "layer":  # whose bias times fn Inductor sums in another order
            torch.testing.assert_close(mine, other, **COMPILED)
        else:
            assert torch.equal(mine, other)


def test_export():
    """A model exports with the kernels inside, as operators."""
    check_export(hc_llama(num_hidden_layers=1), "step_forward")


@ON_GPU
def test_no_recompilation_for_another_length():
    modules = connections(4, 2048, "rms", True)
    results(modules, torch.randn(1, 4096, 4, 2048, device=DEVICE), torch.bfloat16)
    names = "_forward", "_backward", "_parameters", "_total"
    kernels = [getattr(triton_kernels, name) for name in names]
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
    assert computing.chosen_implementation(streams, _run_one) == "triton"


@pytest.mark.parametrize("shape", [(24,), (1, 3, 24), (2, 1, 24)])
@pytest.mark.parametrize("mixes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_branch_output_is_broadcast_before_a_kernel_reads_it(shape, mixes):
    """Whatever lies behind it in memory."""

    def computed(expands: bool) -> list[torch.Tensor]:
        parts = [ManifoldHyperConnection(24, 2, k) if mixes else HyperConnection(24, 2, k) for k in range(2)]
        first, second = (part.to(DEVICE) for part in parts)
        output = torch.randn(shape, generator=seed(0)).to(DEVICE).requires_grad_()
        streams = torch.randn(2, 3, 2, 24, generator=seed(1)).to(DEVICE)
        _, carry = first.width_connection(streams)
        x, carry = second(carry.write(output.expand(2, 3, 24) if expands else output))
        made = carry.write(x).written()
        made.square().sum().backward()
        return [made, output.grad]

    for found, expected in zip(computed(False), computed(True), strict=True):
        assert torch.equal(found, expected)


def test_operators_refuse_a_branch_output_of_another_shape():
    streams, output = torch.zeros(2, 3, 2, 24, device=DEVICE), torch.zeros(24, device=DEVICE)
    values, beta = torch.zeros(6, device=DEVICE), torch.zeros(2, 3, 2, device=DEVICE)
    message = r"must be of shape \(2, 3, 24\) \(got \(24,\)\)"
    with pytest.raises(ValueError, match=message):
        triton_kernels._step_forward(streams, values, beta, output, *[None] * 6, 0.0, False, False)
    with pytest.raises(ValueError, match=message):
        triton_kernels._step_backward(None, values, beta, output, *[None] * 5, False, False, streams, None, None)
    write, mix = torch.zeros(2, 3, 2, device=DEVICE), torch.zeros(2, 3, 2, 2, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        depth_forward(streams, write, mix, True, output)
    with pytest.raises(ValueError, match=message):
        depth_backward(streams, write, output)


def test_an_output_that_overflows_leaves_streams_that_are_not_written():
    connection = HyperConnection(24, 3, 0, written=(0, 2)).to(DEVICE)
    streams = torch.randn(1, 2, 3, 24, generator=seed(0)).to(DEVICE, torch.float16)
    output = torch.ones(1, 2, 24, device=DEVICE, dtype=torch.float16)
    output[0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    output.requires_grad_()
    _, carry = connection.width_connection(streams)
    written = carry.write(output).written()
    assert torch.equal(written[:, :, 1], streams[:, :, 1])
    assert torch.equal(written[:, :, 0], streams[:, :, 0] + output)
    written.clamp(-64000, 64000).float().sum().backward()
    assert connection.static_beta.grad.isfinite().all()
