"""A program that can't import hf_hyperconn, see `isolated.py`: compares folders with their base, bit for bit.

Reads JSON from stdin: `comparisons`, each with a `base` and `converted` folders, `attention`, `dtypes` and `prompts`
(lists of token ids), possibly the `module` of a base's class that isn't exported and the `part` that is run alone; and
`new_tokens`. Prints JSON: for each case the names of what differs.
"""

import json
import sys
from importlib import import_module
from itertools import islice

import torch
from model_inputs import kind_that_runs, kinds_of_inputs
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.utils import logging


def finds(auto, config):
    """Return whether an Auto class finds the class that a folder was saved from."""
    own = (getattr(config, "auto_map", None) or {}).get(auto.__name__, "").rpartition(".")[2]
    class_ = auto._model_mapping.get(type(config), None)
    return config.architectures == [own or getattr(class_, "__name__", "")]


def load(folder, dtype, attention, module="transformers"):
    """Return the model of a folder, by its own code; module: where a base's class is that no Auto class finds."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    generative = AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM
    auto = next((auto for auto in generative if finds(auto, config)), AutoModel)
    if type(config) not in auto._model_mapping and not hasattr(config, "auto_map"):  # of a part of other models
        auto = getattr(import_module(module), config.architectures[0])
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation=attention, trust_remote_code=True).eval()


def part_of(model, part):
    """Return a model in the base model of a model, or all of it."""
    return getattr(model.base_model, part) if part else model


def outputs(model, prompts, new_tokens, kind) -> dict[str, torch.Tensor]:
    """Return everything that must be equal."""
    single, batch = (next(islice(kinds_of_inputs(model, each), kind, None)) for each in (prompts[:1], prompts))
    tensors = {}
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for name, inputs in (("single", single), ("left-padded", batch)):
            torch.manual_seed(0)  # some models draw what they mask
            result = model(**inputs, output_hidden_states=True)
            tensors[f"{name} logits"] = result[0]
            for states in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
                for i, state in enumerate(result.get(states) or ()):
                    tensors[f"{name} {states} {i}"] = state
        if not model.can_generate():
            return tensors
        single, batch = ({k: v for k, v in each.items() if k != "decoder_input_ids"} for each in (single, batch))
        for use_cache in (True, False):
            tensors[f"greedy, cache {use_cache}"] = model.generate(**single, **settings, use_cache=use_cache)
        tensors["greedy, left-padded"] = model.generate(**batch, **settings)
        if model.config.is_encoder_decoder:
            tensors["beams"] = model.generate(**batch, **settings, num_beams=3)
    return tensors


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    differing = {}
    for case in job["comparisons"]:
        for dtype in case["dtypes"]:
            part, module = case.get("part"), case.get("module", "transformers")
            base = part_of(load(case["base"], dtype, case["attention"], module), part)
            arguments = case["prompts"], job["new_tokens"], kind_that_runs(base, case["prompts"])
            expected = outputs(base, *arguments)
            for folder in case["converted"]:
                actual = outputs(part_of(load(folder, dtype, case["attention"]), part), *arguments)
                assert actual.keys() == expected.keys()
                differing[f"{folder} {dtype} {case['attention']}"] = [
                    name for name, value in expected.items() if not torch.equal(value, actual[name])
                ]
    print(json.dumps(differing))


if __name__ == "__main__":
    main()
