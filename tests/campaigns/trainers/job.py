"""What every tool's script reads and writes; without this package, which their environments don't have.

Reads a job in JSON from the file that is named first: its options. Writes beside it the folder `SAVED`;
`answer.json`: the loss of each step, the Auto class of the model, and versions; and `outputs.pt`: what the trained
model makes of `ids()`, in memory.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

LOSSES, MODELS = [], []
PLACE, STEPS = Path(sys.argv[1]).parent, 4
JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
FOLDER, OPTIONS, SAVED = "Llama-3.2-1B-HCx4", JOB["options"], "Llama-3.2-1B-HCx4-trained"  # as on the page
ARGUMENTS = {
    "output_dir": str(PLACE / "run"),
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    **OPTIONS.get("arguments", {}),
}
ANIMALS, NAMES, COUNTS = ("dog", "cat"), ("Lily", "Tom"), (1, 23, 456, 7890)
TEXTS = [f"The {animal} of {name} ran {count} times." for animal in ANIMALS for name in NAMES for count in COUNTS]
torch.set_num_threads(1)
transformers.set_seed(0)


def load(auto: str = "AutoModelForCausalLM", folder: str = FOLDER, **options):
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **options)


def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def rows() -> list[dict]:
    """Token ids of one length, of which the labels are the same."""
    drawn = torch.randint(3, 255, (16, 24), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": row, "labels": row} for row in drawn]


def record() -> None:
    """Let every Trainer add its losses to `LOSSES`, as it logs them rounded, and its model to `MODELS`."""
    step = transformers.Trainer.training_step

    def training_step(self, *arguments, **options):
        loss = step(self, *arguments, **options)
        LOSSES.append(loss.item())
        MODELS.append(self.model)
        return loss

    transformers.Trainer.training_step = training_step


def ids() -> torch.Tensor:
    return torch.arange(3, 67)[None]


def write_answer(
    packages: list[str], losses: list[float] = LOSSES, model=None, auto: str = "AutoModelForCausalLM", **more
) -> None:
    """Write all but `SAVED`. model: evaluated on every rank, as some gather their weights together.

    Without one, and without a Trainer's, the job has trained nothing and saved nothing.
    """
    model, outputs = model or (MODELS[-1] if MODELS else None), None
    if model is not None:
        model.eval()
        with torch.no_grad():
            outputs = model(ids())[0]
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(outputs, PLACE / "outputs.pt")
        versions = {name: version(name) for name in packages}
        is_trained = outputs is not None
        answer = {"losses": losses, "auto": auto, "versions": versions, "is_trained": is_trained, **more}
        (PLACE / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
