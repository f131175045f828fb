"""What the tests of all fused kernels share."""

from collections.abc import Callable

import pytest
import torch

from hf_hyperconn import set_hc_implementation
from tests.tolerances import AUTOCAST_BFLOAT16, KERNELS_BFLOAT16, KERNELS_FLOAT16, KERNELS_FLOAT32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: KERNELS_FLOAT32, torch.bfloat16: KERNELS_BFLOAT16, torch.float16: KERNELS_FLOAT16}
SIZES = [64, 576, 1000, 2048, 4096, 5129]
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")

# streams of 4 x 64 that lie in memory in some other way
NOT_CONTIGUOUS = {
    "expanded, as the first streams are": lambda: torch.randn(1, 7, 1, 64).expand(1, 7, 4, 64),
    "strided": lambda: torch.randn(1, 14, 6, 128)[:, ::2, 1:5, :64],
    "transposed": lambda: torch.randn(7, 64, 4, 1).permute(3, 0, 2, 1),
    "in batches that do not merge": lambda: torch.randn(5, 3, 4, 64).transpose(0, 1),
}


def seed(k: int) -> torch.Generator:
    """A generator of its own for each k."""
    return torch.Generator().manual_seed(k)


def eager_and_compiled(modules, of: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What two connections make, and the gradients of streams, output and `of`: eagerly, and compiled whole."""

    def run(streams, output):
        first, second = modules
        x0, carry = first.width_connection(streams)
        x1, carry = second(carry.write(output))
        return x0, x1, carry.write(x1).written()

    torch.compiler.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"  # Inductor would run the interpreter's kernels itself
    inputs = [torch.randn(2, 5, *shape, 64, device=DEVICE, requires_grad=True) for shape in ((3,), ())]
    found = []
    for function in (run, torch.compile(run, fullgraph=True, backend=backend)):
        made = function(*inputs)
        found.append([*made, *torch.autograd.grad([y.cos().sum() for y in made], [*inputs, *of])])
    return found


def check_export(model, operator: str) -> None:
    """A model exports with the kernels inside, as operators, of which one is named."""
    model = model.to(DEVICE).eval()
    model.set_attn_implementation("eager")  # of which an exported model has the same kernel
    tokens = torch.arange(6, device=DEVICE)[None]
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": tokens, "use_cache": False})
        graphs = [module.graph for module in program.graph_module.modules()]
        assert any(operator in str(node.target) for graph in graphs for node in graph.nodes)
        assert torch.equal(program.module()(input_ids=tokens, use_cache=False).logits, model(tokens).logits)


def launches_of(kernels: tuple[str, ...], module, monkeypatch) -> list[str]:
    """The names of kernels in the order of their launches from a module, which go into this list from here on."""
    launches = []

    class Spy:
        def __init__(self, kernel, name):
            self.kernel, self.name = kernel, name

        def __getitem__(self, grid):
            launches.append(self.name)
            return self.kernel[grid]

    for name in kernels:
        monkeypatch.setattr(module, name, Spy(getattr(module, name), name))
    return launches


def check_second_derivatives(make: Callable[[torch.dtype], list]) -> None:
    """And per-sample gradients, as autograd has them through the algebra in float64.

    make: makes two connections in a dtype; by the algebra in float64.
    """
    streams = torch.randn(2, 3, 2, 16, generator=seed(0)).to(DEVICE)
    found = []
    for dtype in (torch.float32, torch.float64):
        first, second = make(dtype)

        def loss(streams, first=first, second=second):
            x, carry = first.width_connection(streams)
            x, carry = second(carry.write(x.sin()))
            return carry.write(x.sin()).written().cos().sum()

        values = streams.to(dtype).requires_grad_()
        leaves = [values, *first.parameters(), *second.parameters()]
        grads = torch.autograd.grad(loss(values), leaves, create_graph=True)
        of_grads = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
        of_samples = torch.func.vmap(torch.func.grad(loss))(values.detach().unsqueeze(1))
        found.append([*of_grads, of_samples])
    for mine, exact in zip(*found, strict=True):
        rtol, atol = KERNELS_FLOAT32.values()
        torch.testing.assert_close(mine.double(), exact, rtol=rtol, atol=atol * exact.abs().max().item())


def check_branch_outputs_of_another_dtype(modules, of_streams: torch.dtype, of_outputs: torch.dtype) -> None:
    """As under autocast, whose streams are float32 and branches bfloat16; or the reverse."""
    first, second = modules
    streams = torch.randn(1, 5, 4, 64, device=DEVICE, dtype=of_streams, requires_grad=True)
    _, carry = first.width_connection(streams)
    output = torch.randn(1, 5, 64, device=DEVICE, dtype=of_outputs, requires_grad=True)
    x, carry = second(carry.write(output))
    after = carry.write(output).written()
    assert (x.dtype, after.dtype) == (torch.float32, torch.float32)
    after.sum().backward()
    assert (streams.grad.dtype, output.grad.dtype) == (of_streams, of_outputs)


def check_gradient_checkpointing(model) -> None:
    """Gradients of a checkpointed model are those of the model."""
    model = model.to(DEVICE).train()
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


def check_autocast(model) -> None:
    """Under autocast, kernels and plain torch give one loss, and parameters float32 gradients."""
    model = model.to(DEVICE)
    tokens = torch.randint(3, 90, (1, 5), device=DEVICE)
    losses = []
    for name in ("triton", "torch"):
        set_hc_implementation(name)
        model.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            losses.append(model(tokens, labels=tokens).loss)
        losses[-1].backward()
        assert {p.grad.dtype for p in model.model.layers[0].attn_hc.parameters()} == {torch.float32}
    torch.testing.assert_close(*losses, **AUTOCAST_BFLOAT16)
