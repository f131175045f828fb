"""Settings of DeepSpeed that would cast connections to 16 bits, or train them like all else."""

from typing import Any

import torch
from torch import nn

from ..errors import HyperConnError
from ..models.sub_layers import is_of_connection


def use_autocast(plugin: Any) -> None:
    """Replace DeepSpeed's bfloat16 training, which casts every parameter, by its autocast.

    plugin: accelerate's plugin, with DeepSpeed's config.

    Raises `HyperConnError` for float16, in which DeepSpeed's training by autocast did not learn.
    """
    config = plugin.deepspeed_config
    if config.get("fp16", {}).get("enabled") is True:
        raise HyperConnError(
            "DeepSpeed's fp16 casts every parameter, and connections can't learn in 16 bits. Use bf16=True, or train "
            "in float32."
        )
    if config.get("bf16", {}).get("enabled") is True:
        config["bf16"]["enabled"] = False
        config["torch_autocast"] = {"dtype": "bfloat16", **config.get("torch_autocast", {}), "enabled": True}
        plugin.hf_ds_config._dtype = torch.float32  # of the inputs


def refuse_cast_by_zero_init(model: nn.Module) -> None:
    """Raise `HyperConnError` when DeepSpeed's ZeRO-3 has loaded the connections of a model in 16 bits."""
    for name, parameter in model.named_parameters():
        if is_of_connection(name) and hasattr(parameter, "ds_shape") and parameter.dtype.itemsize < 4:
            raise HyperConnError(
                f"DeepSpeed has loaded {name} in {str(parameter.dtype).removeprefix('torch.')}, where it can't learn: "
                f"1.003 is 1. Leave bf16 and fp16 out of TrainingArguments, and write in DeepSpeed's config, instead "
                f'of its sections bf16 and fp16: "torch_autocast": {{"enabled": true, "dtype": "bfloat16"}}'
            )


def refuse_shared_settings(config: dict[str, Any], hc_lr: float | None) -> None:
    """Raise `HyperConnError` for an optimizer or a scheduler in a config without settings for connections.

    config: DeepSpeed's config; its sections give all parameters one learning rate and one weight decay.
    """
    if str(config.get("optimizer", {}).get("type")).lower() == "muon":
        raise HyperConnError(
            "DeepSpeed's Muon orthogonalizes all that has two dimensions, coefficients of connections too. Remove "
            "the section optimizer from DeepSpeed's config."
        )
    sections = [name for name in ("optimizer", "scheduler") if name in config]
    decays = "optimizer" in config and config["optimizer"].get("params", {}).get("weight_decay", 0) != 0
    if sections and (hc_lr is not None or decays):
        raise HyperConnError(
            f"DeepSpeed's config has a section {' and a section '.join(sections)}, which "
            f"{'gives' if len(sections) == 1 else 'give'} all parameters one learning rate and one weight decay. "
            f"Remove it, so that HCTrainer gives the connections theirs; or, without hc_lr and with a "
            f"weight_decay of 0, keep it."
        )
