"""What tests of adapted and quantised models share."""

import torch

from . import conftest

CONNECTIONS = ["attn_hc", "mlp_hc"]


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits


def train(model, ids, steps: int = 3) -> list[float]:
    """Losses of a few steps on what requires gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return conftest.train(model.train(), optimizer, [ids] * steps)
