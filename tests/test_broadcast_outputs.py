"""Branch outputs that an addition broadcasts, and that overflow."""

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from hf_hyperconn import convert_model
from hf_hyperconn.models.attention_residuals import AttentionResidual
from hf_hyperconn.models.connection import Connection
from hf_hyperconn.models.embedding_skip import EmbeddingSkip
from hf_hyperconn.models.hyper_connections import HyperConnection
from hf_hyperconn.models.keel_connection import KeelConnection
from hf_hyperconn.models.manifold_hyper_connections import ManifoldHyperConnection

CONNECTIONS = {
    "shc": lambda k: HyperConnection(8, 2, k),
    "dhc": lambda k: HyperConnection(8, 2, k, norm=nn.LayerNorm(8)),
    "mhc": lambda k: ManifoldHyperConnection(8, 2, k),
    "attnres": lambda k: AttentionResidual(8, k),
    "skip": lambda k: EmbeddingSkip(8, k),
    "keel": lambda k: KeelConnection(8, k, 2, norm=nn.LayerNorm(8)),
}
SHAPES = [(8,), (1,), (3, 8), (1, 3, 8), (4, 1, 8), (4, 3, 1)]


def computed(make, shape: tuple[int, ...], expands: bool) -> list[torch.Tensor]:
    """What two connections write, and the gradient of the first output; expands: whether to expand it before."""
    first, second = make(0), make(1)
    with torch.no_grad():
        for number, parameter in enumerate([*first.parameters(), *second.parameters()]):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(shape, generator=generator).requires_grad_()
    x = torch.randn(4, 3, 8, generator=generator)
    _, carry = first(first.take(first.expand_streams(x)))
    read, carry = second(carry.write(output.expand(4, 3, 8) if expands else output))
    made = carry.write(read).written()
    made.square().sum().backward()
    return [made.detach(), output.grad]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", CONNECTIONS.values(), ids=CONNECTIONS)
def test_a_branch_output_may_be_broadcast(make, shape):
    for found, expected in zip(computed(make, shape, False), computed(make, shape, True), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("make", [CONNECTIONS["shc"], CONNECTIONS["attnres"]])
def test_one_that_is_larger_than_the_streams_is_refused(make):
    connection: Connection = make(0)
    _, carry = connection(connection.take(connection.expand_streams(torch.randn(1, 3, 8))))
    with pytest.raises(RuntimeError, match="must match"):
        carry.write(torch.randn(4, 3, 8))


class Normed(nn.LayerNorm):
    """A norm that no step knows."""

    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("norm", [None, nn.LayerNorm, Normed])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("records", [True, False])
def test_an_output_that_overflows_leaves_streams_that_are_not_written(norm, dtype, records):
    connection = HyperConnection(8, 3, 0, norm=norm and norm(8), written=(0, 2))
    streams = torch.randn(1, 2, 3, 8).to(dtype)
    output = torch.ones(1, 2, 8, dtype=dtype)
    output[0, 0, 0] = torch.inf if dtype == torch.float16 else 1
    with torch.set_grad_enabled(records):
        _, carry = connection(connection.take(streams))
        written = carry.write(output).written()
    assert torch.equal(written[:, :, 1], streams[:, :, 1])
    assert torch.equal(written[:, :, 0], streams[:, :, 0] + output)


def test_the_gradient_of_what_is_clamped_is_finite():
    connection = HyperConnection(8, 2, 0, written=(0,))
    streams = torch.randn(1, 2, 2, 8).half()
    output = torch.full((1, 2, 8), torch.inf).half().requires_grad_()
    _, carry = connection(connection.take(streams))
    carry.write(output).written().clamp(-64000, 64000).float().sum().backward()
    assert connection.static_beta.grad.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("start", ["copies", "history"])
@pytest.mark.parametrize("connection", ["shc", "dhc"])
def test_t5_in_float16_clamps_what_overflows(connection, start):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    base = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval().half()
    mlp = base.encoder.block[0].layer[1].DenseReluDense
    mlp.wo.weight.fill_(1.0)
    mlp.wi.weight.mul_(3000)
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    expected = base(**inputs).logits
    assert expected.isfinite().all()
    assert mlp(base.encoder.block[0].layer[1].layer_norm(100 * torch.randn(1, 9, 32).half())).isinf().any()
    found = convert_model(base, connection=connection, hc_mult=3, hc_start=start)(**inputs).logits
    assert torch.equal(found, expected)
