"""Whether two checkpoints load and compute the same, found in a child process."""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from .children import run
from .starts import ids

EQUAL, BASE_REFUSED, REFUSED, INCOMPLETE, DIFFERENT = range(10, 15)
FOUND = {
    REFUSED: "Transformers does not load it, though it loads the base",
    INCOMPLETE: "the base lacks tensors, or has others",
    DIFFERENT: "its logits are not the base's",
}
SIZES = ("size mismatch", "mismatched", "ran out of", "allocate", "MemoryError")  # words of errors about sizes


def compare_loaded(base: Path, converted: Path, place: Path) -> str | None:
    """What is wrong with a conversion beside its base; None when nothing is, or the base itself does not run.

    place: a folder to log in.
    """
    ended = run(lambda: _compare(base, converted), place / "models", seconds=120)
    if ended.code == BASE_REFUSED:
        said = ended.stderr.strip().splitlines()[-1]
        return f"the base has not the sizes of its config: {said[:100]}" if any(w in said for w in SIZES) else None
    if ended.code == EQUAL:
        return None
    return FOUND.get(ended.code) or f"comparing it ended with {ended.code}: {ended.stderr.strip()[-200:]}"


@torch.no_grad()
def _compare(base: Path, converted: Path) -> int:
    settings = {"use_safetensors": True, "output_loading_info": True, "trust_remote_code": False}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(base, **settings)
        expected = model(ids()).logits
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {' '.join(str(error).split())}\n".encode(errors="replace"))
        return BASE_REFUSED
    if report["missing_keys"] or report["unexpected_keys"]:
        return INCOMPLETE
    try:
        logits = AutoModelForCausalLM.from_pretrained(converted, **settings)[0](ids()).logits
    except Exception as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        return REFUSED
    same = torch.equal(logits.view(torch.uint8), expected.view(torch.uint8))
    return EQUAL if same or torch.equal(logits.nan_to_num(7), expected.nan_to_num(7)) else DIFFERENT
