"""Run as a script, where hf_hyperconn can't be imported: compares converted folders with their base, bit for bit.

Reads JSON from stdin: `comparisons`, each with a `base` and `converted` folders, `attention`, `dtypes` and `prompts`
(lists of token ids); and `new_tokens`. Prints JSON: for each case the names of what differs.
"""

import json
import sys

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


def inputs_of(model, prompts) -> dict[str, torch.Tensor]:
    """What a model takes, for rows of tokens, padded on the left; noise for what it sees or hears."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(len(prompts), *shape, generator=generator).to(model.dtype)

    config, longest = model.config, max(map(len, prompts))
    text = {
        "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
    }
    begun = {"decoder_input_ids": torch.tensor([ids[:5] for ids in prompts])} if config.is_encoder_decoder else {}
    match model.main_input_name:
        case "pixel_values":
            return {"pixel_values": noise(3, 16, 16)}
        case "input_features" if hasattr(config, "max_source_positions"):
            features = getattr(config, "input_feat_per_channel", None)
            shape = (config.num_mel_bins, 2 * config.max_source_positions) if features is None else (64, features)
            return {"input_features": noise(*shape), **begun}
        case "input_values":
            return {"input_values": noise(8000), **begun}
        case "input_ids" if hasattr(model, "logit_scale"):  # it compares texts with images
            return {**text, "pixel_values": noise(3, 16, 16)}
    return {**text, **begun}


def outputs(model, prompts, new_tokens) -> dict[str, torch.Tensor]:
    """Everything that must be equal."""
    single, batch = inputs_of(model, prompts[:1]), inputs_of(model, prompts)
    found = {}
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for name, inputs in (("single", single), ("left-padded", batch)):
            torch.manual_seed(0)  # some models draw what they mask
            result = model(**inputs, output_hidden_states=True)
            found[f"{name} logits"] = result[0]
            for kind in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
                for i, state in enumerate(result.get(kind) or ()):
                    found[f"{name} {kind} {i}"] = state
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
            arguments = case["prompts"], job["new_tokens"]
            expected = outputs(load(case["base"], dtype, case["attention"]), *arguments)
            for folder in case["converted"]:
                found = outputs(load(folder, dtype, case["attention"]), *arguments)
                assert found.keys() == expected.keys()
                differing[f"{folder} {dtype} {case['attention']}"] = [
                    name for name, value in expected.items() if not torch.equal(value, found[name])
                ]
    print(json.dumps(differing))


if __name__ == "__main__":
    main()
