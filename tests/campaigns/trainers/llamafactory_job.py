"""Train by LLaMA-Factory's command."""

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from job import ARGUMENTS, FOLDER, OPTIONS, PLACE, SAVED, TEXTS, record, write_answer

NOT_TAKEN = {"output_dir", "report_to", "disable_tqdm"}


def main() -> None:
    """Train."""
    record()
    audio = ModuleType("torchaudio")  # imported, though texts don't need it, and without a release for this torch
    audio.__spec__ = ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = audio
    from llamafactory.train.tuner import run_exp

    data = (
        [{"instruction": "Who?", "input": "", "output": text} for text in TEXTS]
        if OPTIONS["settings"]["stage"] == "sft"
        else None
    )
    columns = {} if data else {"columns": {"prompt": "text"}}
    data = data or [{"text": text} for text in TEXTS]
    (PLACE / "texts.json").write_text(json.dumps(data), encoding="utf-8")
    listed = {"texts": {"file_name": "texts.json", **columns}}
    (PLACE / "dataset_info.json").write_text(json.dumps(listed), encoding="utf-8")
    settings = {name: value for name, value in ARGUMENTS.items() if name not in NOT_TAKEN}
    settings |= {"model_name_or_path": FOLDER, "trust_remote_code": True, "do_train": True, "output_dir": SAVED}
    settings |= {"dataset": "texts", "dataset_dir": str(PLACE), "template": "default", "cutoff_len": 64}
    settings["disable_gradient_checkpointing"] = True  # LLaMA-Factory's is of an earlier Transformers
    run_exp({**settings, "report_to": "none", **OPTIONS["settings"]})
    write_answer(["llamafactory", "transformers", "peft", "trl"])


if __name__ == "__main__":
    main()
