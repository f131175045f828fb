"""Steps: the hand-written backward against autograd, what it keeps, and streams that are computed again."""

import importlib
import pkgutil
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_hyperconn import convert_model, set_hc_implementation
from hf_hyperconn.models import hc_step as step
from hf_hyperconn.models.hc_step import StepCarry
from hf_hyperconn.models.hc_torch import BY_MATRIX_PRODUCTS, BY_SUMS, CoefficientParameters
from hf_hyperconn.models.hyper_connections import HyperConnection
from hf_hyperconn.models.norm_forms import form_of

from .conftest import hc_llama
from .families import FAMILIES
from .marks import few
from .sub_layer import branch, randomized
from .tiny import tiny
from .tolerances import FLOAT32, LARGE_MEANS

D = 24
NORMS = {
    "rms": lambda: nn.RMSNorm(D, eps=1e-6),
    "layer": lambda: nn.LayerNorm(D),
    "static": lambda: None,
}


@pytest.fixture(autouse=True)
def auto_implementation() -> Iterator[None]:
    yield
    set_hc_implementation("auto")


def connections(n: int, norm: str, tanh: bool = True, *, by_autograd: bool = False, count: int = 3):
    """Consecutive connections with random parameters."""
    modules = []
    for k in range(count):
        torch.manual_seed(5 + k)
        module = randomized(HyperConnection(D, n, k, norm=NORMS[norm](), tanh=tanh), 0.3)
        if by_autograd:
            module.coefficient_parameters = lambda dtype: None
        modules.append(module)
    return modules


def run(modules: list[HyperConnection], streams: torch.Tensor) -> torch.Tensor:
    """As a decoder layer does it: each depth connection together with the next width connection."""
    branch_input, carry = modules[0].width_connection(streams)
    for module in modules[1:]:
        branch_input, carry = module(carry.write(branch(branch_input)))
    return carry.write(branch(branch_input)).written()


def results(modules: list[HyperConnection], streams: torch.Tensor) -> list[torch.Tensor]:
    """The streams after all sub-layers, and every gradient of a function of them."""
    streams = streams.clone().requires_grad_()
    after = run(modules, streams)
    after.cos().sum().backward()
    return [after.detach(), streams.grad, *(p.grad for module in modules for p in module.parameters())]


@pytest.mark.parametrize("matrix", [True, False])
@pytest.mark.parametrize("n", few(range(1, 9), 1, 2, 3, 4))
@pytest.mark.parametrize(("norm", "tanh"), [("static", True), ("rms", True), ("rms", False), ("layer", True)])
def test_equals_autograd(n, norm, tanh, matrix, monkeypatch):
    """The same streams and gradients as differentiating the algebra of `hyper_connections.py`, in float64."""
    monkeypatch.setattr(step, "uses_matrix_products", lambda device: matrix)
    streams = torch.randn(2, 5, n, D, dtype=torch.float64)
    ours = results([module.double() for module in connections(n, norm, tanh)], streams)
    expected = results([module.double() for module in connections(n, norm, tanh, by_autograd=True)], streams)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9 * other.abs().max().item())


@pytest.mark.parametrize("mean", [10, 100])
@pytest.mark.parametrize("kernels", [BY_MATRIX_PRODUCTS, BY_SUMS], ids=["matrix", "sums"])
def test_large_means_do_not_cancel(kernels, mean):
    """Coefficients and gradients by a LayerNorm, as near to float64 as the norm itself is."""
    torch.manual_seed(0)
    module = randomized(HyperConnection(D, 2, 0, norm=nn.LayerNorm(D)), 0.3)
    streams = mean + 0.01 * torch.randn(1, 5, 2, D)
    grads = [torch.randn(1, 5, 2, D), torch.randn(1, 5, D), torch.randn(1, 5, 2)]

    def run(dtype):
        parameters = module.to(dtype).coefficient_parameters(dtype).folded()
        parameters = CoefficientParameters(*(value.detach() for value in parameters[:6]), *parameters[6:])
        arguments = (streams.to(dtype), None, None, parameters)
        _, result = kernels.step_forward(*arguments)
        of = kernels.step_backward(*arguments, result, *(grad.to(dtype) for grad in grads), True)
        return result.coefficients, of.streams, of.parameters.fn

    for mine, exact in zip(run(torch.float32), run(torch.float64), strict=True):
        scale = exact.abs().max().item()
        torch.testing.assert_close(mine.double() / scale, exact / scale, **LARGE_MEANS[mean])


@pytest.mark.parametrize("model_type", ["olmo", "starcoder2"])
def test_a_fresh_conversion_of_large_means_is_exact(model_type):
    base = deepcopy(tiny(model_type))
    with torch.no_grad():
        embeddings = base.get_input_embeddings().weight
        embeddings.copy_(100 + 0.01 * torch.randn_like(embeddings))
        tokens = torch.arange(3, 9)[None]
        expected = base(tokens).logits
        assert expected.isfinite().all()
        assert torch.equal(convert_model(base)(tokens).logits, expected)


def test_layers_take_steps(monkeypatch):
    """A decoder layer with a usual norm takes three steps: read, write and read, write."""
    seen = []
    forward = BY_MATRIX_PRODUCTS.step_forward
    spied = BY_MATRIX_PRODUCTS._replace(
        step_forward=lambda s, c, f, parameters: (
            seen.append((c is not None, parameters is not None)),
            forward(s, c, f, parameters),
        )[1]
    )
    monkeypatch.setattr(step, "BY_MATRIX_PRODUCTS", spied)
    set_hc_implementation("torch")
    model = hc_llama()
    model(torch.arange(5)[None])
    assert seen == [(False, True), (True, True), (True, False)] * model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_few_rows(dtype):
    """For its backward, a sub-layer keeps its streams and its branch's output: N + 1 rows, and little more."""
    n, size, tokens = 4, 1024, 64
    module = HyperConnection(size, n, 0, norm=nn.RMSNorm(size, eps=1e-6))
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    streams = torch.randn(1, tokens, n, size, dtype=dtype, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.numel() >= tokens:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        branch_input, carry = module.width_connection(streams)
        carry.write(branch_input).written()
    folded = 4 * size * (n + 2)  # the norm's weight times the projection
    rows = (sum(kept.values()) - folded) / (tokens * size * dtype.itemsize)
    assert n + 1 <= rows <= 6


def test_frozen_projections_cost_no_gradient(monkeypatch):
    wanted = []
    backward = BY_MATRIX_PRODUCTS.step_backward
    spied = BY_MATRIX_PRODUCTS._replace(step_backward=lambda *a: (wanted.append(a[-1]), backward(*a))[1])
    monkeypatch.setattr(step, "BY_MATRIX_PRODUCTS", spied)
    (module,) = connections(2, "rms", count=1)
    module.requires_grad_(False)
    streams = torch.randn(1, 3, 2, D, requires_grad=True)
    run([module], streams).sum().backward()
    assert streams.grad is not None
    assert not any(wanted)


def test_unknown_norms_go_by_autograd():
    class Other(nn.Module):
        def forward(self, x):
            return x / (1 + x.abs().mean(-1, keepdim=True))

    assert form_of(Other(), D) is None
    module = HyperConnection(D, 2, 0, norm=Other())
    _, carry = module.width_connection(torch.randn(1, 3, 2, D))
    assert not isinstance(carry, StepCarry)
    # a known norm may follow an unknown one, and the reverse
    known = connections(2, "rms", count=1)[0]
    streams = torch.randn(1, 3, 2, D)
    branch_input, carry = module.width_connection(streams)
    branch_input, carry = known(carry.write(branch_input))
    branch_input, carry = module(carry.write(branch_input))
    assert carry.write(branch_input).written().shape == streams.shape


def norm_classes() -> list[type[nn.Module]]:
    """Every norm class of every model of Transformers."""
    found = {}
    for package in pkgutil.iter_modules(transformers.models.__path__):
        try:
            module = importlib.import_module(f"transformers.models.{package.name}.modeling_{package.name}")
        except ImportError:
            continue
        for name, cls in vars(module).items():
            if isinstance(cls, type) and issubclass(cls, nn.Module) and name.endswith("Norm"):
                found[f"{cls.__module__}.{name}"] = cls
    return list(found.values())


@pytest.mark.slow
def test_folded_norms_are_the_norms_of_transformers():
    """Whatever `form_of` claims to know, it computes; of all norm classes that Transformers has."""
    known = 0
    for cls in norm_classes():
        try:
            norm = cls(D)
        except Exception:  # another signature: not a norm of hidden states
            continue
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(torch.randn_like(parameter))
        form = form_of(norm, D)
        if form is None:
            continue
        known += 1
        weight, bias = form.parameters_of(norm)
        x = torch.randn(3, D)
        mean = x.mean(-1, keepdim=True) if form.centred else 0
        expected = (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + form.eps)
        expected = expected if weight is None else expected * weight
        expected = expected if bias is None else expected + bias
        torch.testing.assert_close(norm(x), expected, **FLOAT32, msg=lambda text, cls=cls: f"{cls}: {text}")
    assert known > 50


def test_all_families_with_usual_norms_take_steps():
    for model_type in FAMILIES:
        model = convert_model(tiny(model_type))
        assert all(
            m.coefficient_parameters(torch.float32) is not None
            for m in model.modules()
            if isinstance(m, HyperConnection)
        )


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["rms", "static", "layer"])
def test_compiles_whole(norm):
    """`torch.compile(fullgraph=True)` sees through steps, forward and backward."""
    modules = connections(3, norm)
    streams = torch.randn(2, 5, 3, D)
    expected = results(modules, streams)
    for module in modules:
        module.zero_grad()
    torch.compiler.reset()
    copy = streams.clone().requires_grad_()
    after = torch.compile(run, fullgraph=True)(modules, copy)
    after.cos().sum().backward()
    found = [after.detach(), copy.grad, *(p.grad for module in modules for p in module.parameters())]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * (1 + other.abs().max().item()))


@pytest.mark.slow
def test_compiled_layers_take_steps(monkeypatch):
    def plain(*args):
        raise AssertionError("the plain way was taken")

    monkeypatch.setattr(HyperConnection, "read_and_mix", plain)
    model = hc_llama(num_hidden_layers=1)
    torch.compiler.reset()
    model.compile(backend="eager", fullgraph=True)
    model(torch.arange(5)[None]).logits.sum().backward()


@pytest.fixture
def one_rank():
    """A device mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("connection", "n"), [("dhc", 4), ("mhc", 4), ("attnres", 1), ("skip", 2)])
@pytest.mark.parametrize("wrapped", ["layers", "connections"])
def test_of_a_sharded_model(wrapped, connection, n, one_rank):
    """FSDP2 hands every module's inputs on as new tensors."""

    def gradients(model):
        torch.manual_seed(0)
        loss = model(torch.randint(0, 60, (2, 9)), labels=torch.randint(0, 60, (2, 9))).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain, model = (hc_llama(num_hidden_layers=4, connection=connection, hc_mult=n).train() for _ in range(2))
    for layer in model.model.layers:
        for module in [layer.attn_hc, layer.mlp_hc] if wrapped == "connections" else []:
            fully_shard(module, mesh=one_rank)
        fully_shard(layer, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    for mine, other in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(mine.full_tensor() if isinstance(mine, DTensor) else mine, other)
