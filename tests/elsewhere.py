"""Run as a script, where hf_hyperconn can't be imported: compares converted folders with their base, bit for bit.

Reads JSON from stdin: `comparisons`, each with a `base` and `converted` folders, `attention`, `dtypes` and `prompts`
(lists of token ids); and `new_tokens`. Prints JSON: for each case the names of what differs.
"""

import json
import sys

sys.modules["hf_hyperconn"] = None

import torch  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402


def finds(auto, config):
    """Whether an Auto class finds the class that a folder was saved from."""
    own = (getattr(config, "auto_map", None) or {}).get(auto.__name__, "").rpartition(".")[2]
    found = auto._model_mapping.get(type(config), None)
    return config.architectures == [own or getattr(found, "__name__", "")]


def load(folder, dtype, attention):
    """The model of a folder, by its own code."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    auto = next((auto for auto in (AutoModelForCausalLM, AutoModelForMultimodalLM) if finds(auto, config)), AutoModel)
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation=attention, trust_remote_code=True).eval()


def outputs(model, prompts, new_tokens) -> dict[str, torch.Tensor]:
    """Everything that must be equal."""
    longest = max(map(len, prompts))
    single = {"input_ids": torch.tensor(prompts[:1])}
    single["attention_mask"] = torch.ones_like(single["input_ids"])
    batch = {
        "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
    }
    pixels = torch.randn(len(prompts), 3, 16, 16, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    if model.main_input_name == "pixel_values":
        single = batch = {"pixel_values": pixels[:2]}
    elif hasattr(model, "logit_scale"):  # it compares texts with images
        single, batch = {**single, "pixel_values": pixels[:1]}, {**batch, "pixel_values": pixels}
    found = {}
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for name, inputs in (("single", single), ("left-padded", batch)):
            torch.manual_seed(0)  # some models draw what they mask
            result = model(**inputs, output_hidden_states=True)
            found[f"{name} logits"] = result[0]
            for i, state in enumerate(result.get("hidden_states") or ()):
                found[f"{name} hidden state {i}"] = state
        if not model.can_generate():
            return found
        for use_cache in (True, False):
            found[f"greedy, cache {use_cache}"] = model.generate(**single, **settings, use_cache=use_cache)
        found["greedy, left-padded"] = model.generate(**batch, **settings)
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
