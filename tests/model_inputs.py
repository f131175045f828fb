"""What models take: text, images, sounds. Imports neither this package nor its tests."""

import inspect
from collections.abc import Iterator

import torch


def kinds_of_inputs(model, prompts) -> Iterator[dict[str, torch.Tensor]]:
    """What a model may take, for rows of tokens, padded on the left; noise for what it sees or hears."""
    config, rows, longest = model.config, len(prompts), max(map(len, prompts))
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(model.dtype)

    def field(*names, default=None):
        return next((value for name in names if (value := getattr(config, name, None)) is not None), default)

    taken = inspect.signature(model.forward).parameters
    begun = {"decoder_input_ids": torch.tensor([ids[:5] for ids in prompts])} if config.is_encoder_decoder else {}
    image = noise(rows, field("num_channels", "in_channels", "in_chans", default=3), 16, 16)
    if "grid_thw" in taken:
        size = field("num_channels", "in_channels", "in_chans", default=3) * field("patch_size", default=4) ** 2
        patches = noise(16 * rows, size * field("temporal_patch_size", default=1))
        grid = {"grid_thw": torch.tensor([[1, 4, 4]] * rows)}
        grid |= {"merge_sizes": torch.tensor([2] * rows)} if "merge_sizes" in taken else {}
        yield {next(iter(taken)): patches, **grid}
        yield {
            next(iter(taken)): patches.view(16 * rows, -1, field("patch_size", default=4), field("patch_size")),
            **grid,
        }
    elif "input_ids" in taken:
        text = {
            "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
            "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
        }
        if hasattr(model, "logit_scale") and hasattr(config, "vision_config"):  # it compares texts with images
            yield {**text, "pixel_values": image}
        yield {**text, **begun}
    if "pixel_values" in taken:
        yield {"pixel_values": image}
    for name in {"pixel_values", "pixel_values_videos"} & taken.keys():
        yield {name: noise(rows, field("num_frames", "frames_per_clip", default=4), 3, 16, 16)}
    if "input_features" in taken:
        features = field("num_mel_bins", "input_feat_per_channel", "feature_size", "hidden_size")
        yield {"input_features": noise(rows, features, 2 * field("max_source_positions", default=32)), **begun}
        yield {"input_features": noise(rows, 64, features), **begun}
    if "input_values" in taken:
        yield {"input_values": noise(rows, 8000), **begun}
        yield {"input_values": noise(rows, 1, 8000), **begun}


def kind_that_runs(model, prompts) -> int:
    """Which of the kinds of inputs a model takes.

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
