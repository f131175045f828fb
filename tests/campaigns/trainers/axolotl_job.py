"""Train by axolotl's command and the YAML of the examples."""

import json
from pathlib import Path

import yaml
from job import ARGUMENTS, FOLDER, OPTIONS, PLACE, SAVED, TEXTS, record, write_answer

TAKEN = ("max_steps", "learning_rate", "logging_steps", "bf16")


def main() -> None:
    """Train."""
    record()
    from axolotl.cli.train import do_cli  # replaces what Transformers' Trainer is made of

    data = PLACE / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    settings = yaml.safe_load(Path(OPTIONS["yaml"]).read_text(encoding="utf-8"))
    settings |= {name: ARGUMENTS[name] for name in TAKEN}
    settings |= {"base_model": FOLDER, "datasets": [{"path": str(data), "type": "completion"}], "output_dir": SAVED}
    settings |= {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "lr_scheduler": "constant", "use_cpu": True}
    settings |= {"dataset_prepared_path": str(PLACE / "prepared"), "save_strategy": "no", **OPTIONS["settings"]}
    written = PLACE / "axolotl.yaml"
    written.write_text(yaml.safe_dump(settings), encoding="utf-8")
    do_cli(str(written))
    write_answer(["axolotl", "transformers"])


if __name__ == "__main__":
    main()
