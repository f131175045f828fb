"""Tiny random transformers of diffusers, and what they take."""

from collections.abc import Callable
from functools import cache

import diffusers
import torch
from diffusers import DiTTransformer2DModel, ModelMixin, PixArtTransformer2DModel, SD3Transformer2DModel

SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3, "sample_size": 8, "in_channels": 4}


@cache
def dit() -> DiTTransformer2DModel:
    """A DiT for 1000 classes, as `DiTPipeline` has them; tests must not change it."""
    return _random(DiTTransformer2DModel, **SIZES, out_channels=8)


@cache
def pixart() -> PixArtTransformer2DModel:
    """A PixArt; tests must not change it."""
    return _random(PixArtTransformer2DModel, **SIZES, out_channels=8, cross_attention_dim=16, caption_channels=12)


@cache
def krea2() -> ModelMixin:
    """A Krea 2, which newer releases of diffusers have; tests must not change it."""
    text = {"text_hidden_dim": 16, "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 2}
    text |= {"text_intermediate_size": 16, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
    sizes = {name: value for name, value in SIZES.items() if name != "sample_size"} | {"num_key_value_heads": 1}
    sizes |= {"intermediate_size": 32, "timestep_embed_dim": 16, "axes_dims_rope": (4, 2, 2)}
    return _random(diffusers.Krea2Transformer2DModel, **sizes, **text)


def sd3() -> SD3Transformer2DModel:
    """A Stable Diffusion 3."""
    return _random(
        SD3Transformer2DModel,
        **SIZES,
        out_channels=4,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
    )


def _random(model_class: type[ModelMixin], **settings) -> ModelMixin:
    torch.manual_seed(0)
    model = model_class(**settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs_of(model: ModelMixin) -> dict[str, torch.Tensor]:
    """Noisy latents of two images, how noisy they are, and a class or a text for each."""
    generator = torch.Generator().manual_seed(1)
    if "text_hidden_dim" in model.config:
        shapes = {"hidden_states": (2, 6, 4), "encoder_hidden_states": (2, 3, 2, 16), "timestep": (2,)}
        tensors = {name: torch.randn(shape, generator=generator).to(model.dtype) for name, shape in shapes.items()}
        return {**tensors, "position_ids": torch.zeros(9, 3)}
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8, generator=generator).to(model.dtype)}
    inputs["timestep"] = torch.tensor([5, 900])
    if model.config.get("norm_type") == "ada_norm_zero":
        return {**inputs, "class_labels": torch.tensor([1, 10])}
    return {**inputs, "encoder_hidden_states": torch.randn(2, 5, 12, generator=generator).to(model.dtype)}


@torch.no_grad()
def sample(model: Callable) -> torch.Tensor:
    """What a model makes of its inputs."""
    return model(**inputs_of(model)).sample
