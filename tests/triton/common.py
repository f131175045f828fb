"""What the tests of all fused kernels share."""

import pytest
import torch

from tests.tolerances import KERNELS_BFLOAT16, KERNELS_FLOAT16, KERNELS_FLOAT32

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
