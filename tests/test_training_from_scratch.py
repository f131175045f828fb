"""Keel, DyT and Derf learn text beside Pre-Norm, and Keel in a depth at which Post-Norm does not."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM

pytestmark = pytest.mark.slow

WIDTH, LENGTH, BATCH, WARM_UP = 32, 64, 8, 20
UNIGRAM = 3.1  # nats a byte that a model of English knows which only counts bytes


def fields(layers: int, initializer_range: float) -> dict:
    return {
        "vocab_size": 256,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": initializer_range,
    }


def build(kind: str, layers: int, initializer_range: float = 0.02):
    torch.manual_seed(0)
    common = fields(layers, initializer_range)
    if kind == "pre-norm":
        return LlamaForCausalLM(LlamaConfig(**common))
    if kind in ("dyt", "derf"):
        return HCLlamaForCausalLM(HCLlamaConfig(**common, norm=kind, connection="shc", hc_mult=1))
    model = HCLlamaForCausalLM(HCLlamaConfig(**common, connection="keel", hc_mult=1))
    if kind == "post-norm":  # x = Norm(x + F(x)) everywhere, and no norm in F
        for layer in model.model.layers:
            for connection in (layer.attn_hc, layer.mlp_hc):
                connection.alpha = 1.0
                if isinstance(connection.norm, nn.Identity):
                    connection.norm = type(model.model.norm)(WIDTH)
            layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
    return model


def train(model, text: str, steps: int, lr: float = 3e-3) -> list[float]:
    """Losses of AdamW with warm-up and clipping, on bytes of `text`."""
    data, generator = torch.tensor(list(text.encode())), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=generator).tolist()
        batch = torch.stack([data[start : start + LENGTH] for start in starts])
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / WARM_UP)
        loss = model(batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def at_the_end(losses: list[float]) -> float:
    return sum(losses[-10:]) / 10


@pytest.fixture(scope="module")
def beside(text) -> float:
    return at_the_end(train(build("pre-norm", 4, 0.2), text, 200))


@pytest.mark.parametrize("kind", ["keel", "dyt", "derf"])
def test_two_hundred_steps_beside_pre_norm(kind, text, beside):
    """Embeddings of unit size: DyT's alpha is made for them, and 0.02 times the root of this width is far less."""
    losses = train(build(kind, 4, 0.2), text, 200)
    assert losses[0] > 5
    assert at_the_end(losses) < UNIGRAM - 0.5
    assert at_the_end(losses) < beside + 0.15


@pytest.mark.tail
def test_keel_trains_in_a_depth_at_which_post_norm_does_not(text):
    keel, post_norm = (at_the_end(train(build(kind, 48), text, 120)) for kind in ("keel", "post-norm"))
    assert post_norm > UNIGRAM - 0.1
    assert keel < UNIGRAM - 0.4
