"""Run as a script, where hf_hyperconn can't be imported: compares converted folders with their base, bit for bit.

Arguments: an attention implementation, the base's folder, the converted folders. Prints JSON: for each case the names
of what differs.
"""

import json
import sys

sys.modules["hf_hyperconn"] = None

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

PROMPTS = ["Once upon a time, there was a", "The big dog", "One day, Lily went to the park with her mom and"]


def outputs(folder, dtype, attention) -> dict[str, torch.Tensor]:
    """Everything that must be equal."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, trust_remote_code=True
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[2], padding_side="left", pad_token="<unk>")
    single, batch = tokenizer(PROMPTS[:1], return_tensors="pt"), tokenizer(PROMPTS, return_tensors="pt", padding=True)
    found = {}
    with torch.no_grad():
        for name, inputs in (("single", single), ("left-padded", batch)):
            result = model(**inputs, output_hidden_states=True)
            found[f"{name} logits"] = result.logits
            for i, state in enumerate(result.hidden_states):
                found[f"{name} hidden state {i}"] = state
        for use_cache in (True, False):
            settings = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": False, "use_cache": use_cache}
            found[f"greedy, cache {use_cache}"] = model.generate(**single, **settings, pad_token_id=0)
        found["greedy, left-padded"] = model.generate(**batch, max_new_tokens=100, do_sample=False, pad_token_id=0)
    return found


def main() -> None:
    attention, base, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    differing = {}
    for dtype in ("float32", "bfloat16", "float16"):
        expected = outputs(base, dtype, attention)
        for folder in folders:
            found = outputs(folder, dtype, attention)
            assert found.keys() == expected.keys()
            assert found["greedy, cache True"].shape[1] >= 100
            differing[f"{folder} {dtype} {attention}"] = [
                name for name, value in expected.items() if not torch.equal(value, found[name])
            ]
    print(json.dumps(differing))


if __name__ == "__main__":
    main()
