"""Run as a script, where hf_hyperconn can't be imported: compares converted folders with their base, bit for bit.

Reads JSON from stdin: `comparisons`, each with a `base` and `converted` folders, `attention`, `dtypes` and `prompts`
(lists of token ids); and `new_tokens`. Prints JSON: for each case the names of what differs.
"""

import inspect
import json
import sys
from collections.abc import Iterator
from itertools import islice

sys.modules["hf_hyperconn"] = None

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.utils import logging  # noqa: E402


def finds(auto, config):
    """Whether an Auto class finds the class that a folder was saved from."""
    own = (getattr(config, "auto_map", None) or {}).get(auto.__name__, "").rpartition(".")[2]
    found = auto._model_mapping.get(type(config), None)
    return config.architectures == [own or getattr(found, "__name__", "")]


def load(folder, dtype, attention):
    """The model of a folder, by its own code."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    generative = AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM
    auto = next((auto for auto in generative if finds(auto, config)), AutoModel)
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation=attention, trust_remote_code=True).eval()


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
    """Which of the kinds of inputs a model takes; the last, if none."""
    for kind, inputs in enumerate(kinds_of_inputs(model, prompts)):
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:
            failed = error
            continue
        return kind
    raise failed


def outputs(model, prompts, new_tokens, kind) -> dict[str, torch.Tensor]:
    """Everything that must be equal."""
    single, batch = (next(islice(kinds_of_inputs(model, each), kind, None)) for each in (prompts[:1], prompts))
    found = {}
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for name, inputs in (("single", single), ("left-padded", batch)):
            torch.manual_seed(0)  # some models draw what they mask
            result = model(**inputs, output_hidden_states=True)
            found[f"{name} logits"] = result[0]
            for states in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
                for i, state in enumerate(result.get(states) or ()):
                    found[f"{name} {states} {i}"] = state
        if not model.can_generate():
            return found
        single, batch = ({k: v for k, v in each.items() if k != "decoder_input_ids"} for each in (single, batch))
        for use_cache in (True, False):
            found[f"greedy, cache {use_cache}"] = model.generate(**single, **settings, use_cache=use_cache)
        found["greedy, left-padded"] = model.generate(**batch, **settings)
        if model.config.is_encoder_decoder:
            found["beams"] = model.generate(**batch, **settings, num_beams=3)
    return found


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    differing = {}
    for case in job["comparisons"]:
        for dtype in case["dtypes"]:
            base = load(case["base"], dtype, case["attention"])
            arguments = case["prompts"], job["new_tokens"], kind_that_runs(base, case["prompts"])
            expected = outputs(base, *arguments)
            for folder in case["converted"]:
                found = outputs(load(folder, dtype, case["attention"]), *arguments)
                assert found.keys() == expected.keys()
                differing[f"{folder} {dtype} {case['attention']}"] = [
                    name for name, value in expected.items() if not torch.equal(value, found[name])
                ]
    print(json.dumps(differing))


if __name__ == "__main__":
    main()
