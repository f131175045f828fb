"""What models take: text, images, sounds. Imports neither this package nor its tests."""

import inspect
from collections.abc import Callable, Iterator

import torch

MEL_BINS = 8  # of the tiny models' sounds, where a config in a config says it


def kinds_of_inputs(model, prompts) -> Iterator[dict[str, torch.Tensor]]:
    """Yield kinds of inputs for rows of tokens, padded on the left; noise stands for images and sounds."""
    config, rows, longest = model.config, len(prompts), max(map(len, prompts))
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(model.dtype)

    def field(*names, default=None):
        return next((value for name in names if (value := getattr(config, name, None)) is not None), default)

    taken = inspect.signature(model.forward).parameters
    begun = {"decoder_input_ids": torch.tensor([ids[:5] for ids in prompts])} if config.is_encoder_decoder else {}
    text = {
        "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
    }
    senses = [*_seen(taken, rows, noise, field), *({**heard, **begun} for heard in _heard(taken, rows, noise, field))]
    if "input_ids" in taken and "grid_thw" not in taken:
        if hasattr(model, "logit_scale") and hasattr(config, "vision_config"):  # it compares texts with images
            yield from ({**text, **each} for each in senses)
        yield {**text, **begun}
    yield from senses
    if "input_ids" in taken:
        if "image_embeds_position_mask" in taken:
            text["image_embeds_position_mask"] = torch.arange(longest).expand(rows, -1) < field("latent_query_num")
        yield from ({**text, **each} for each in senses)


def _seen(taken, rows: int, noise: Callable, field: Callable) -> Iterator[dict[str, torch.Tensor]]:
    """Return images and videos, by the arguments that a model has for them."""
    channels, patch = field("num_channels", "in_channels", "in_chans", default=3), field("patch_size", default=4)
    if "grid_thw" in taken:
        patches = noise(16 * rows, channels * patch**2 * field("temporal_patch_size", "patch_temporal", default=1))
        grid = {"grid_thw": torch.tensor([[1, 4, 4]] * rows)}
        grid |= {"merge_sizes": torch.tensor([2] * rows)} if "merge_sizes" in taken else {}
        yield {next(iter(taken)): patches, **grid}
        yield {next(iter(taken)): patches.view(16 * rows, -1, patch, patch), **grid}
    if "spatial_shapes" in taken:
        shapes = {"spatial_shapes": torch.tensor([[4, 4]] * rows), "pixel_attention_mask": torch.ones(rows, 16)}
        yield {"pixel_values": noise(rows, 16, channels * patch**2), **shapes}
    if "target_sizes" in taken:
        strip = noise(1, channels, patch, 16 * rows * patch)  # of all images, patch after patch
        yield {"pixel_values": strip, "target_sizes": torch.tensor([[4, 4]] * rows)}
    if "flattened_patches" in taken and field("patch_embed_hidden_size"):  # the first two values say where a patch is
        patches = noise(rows, 16, 2 + field("patch_embed_hidden_size"))
        patches[..., :2] = 1
        yield {"flattened_patches": patches}
    if "pixel_values" in taken:
        yield {"pixel_values": noise(rows, channels, 16, 16)}
    for name in ("pixel_values", "pixel_values_videos"):
        if name in taken:
            yield {name: noise(rows, field("num_frames", "frames_per_clip", default=4), 3, 16, 16)}


def _heard(taken, rows: int, noise: Callable, field: Callable) -> Iterator[dict[str, torch.Tensor]]:
    """Return sounds, by the arguments that a model has for them."""
    if "input_features" in taken:
        names = "feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size", "hidden_size"
        features, mask = field(*names, default=MEL_BINS), "input_features_mask"
        for shape in ((features, 2 * field("max_source_positions", default=32)), (64, features), (64, MEL_BINS)):
            heard = {"input_features": noise(rows, *shape)}
            yield heard
            if mask in taken:
                yield {**heard, mask: torch.ones(rows, max(shape), dtype=torch.long)}
    if "input_values" in taken:
        for shape in ((8000,), (1, 8000), (64, field("num_mel_bins", default=MEL_BINS))):
            yield {"input_values": noise(rows, *shape)}


def kind_that_runs(model, prompts) -> int:
    """Return the number of the kind of inputs that a model takes.

    Raises what the last of them raised, where it takes none.
    """
    failed: Exception = ValueError("nothing is known that it takes")
    for kind, inputs in enumerate(kinds_of_inputs(model, prompts)):
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:
            failed = error
            continue
        return kind
    raise failed
