"""Train by DeepSpeed, through Transformers' Trainer, this package's, or accelerate alone."""

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from job import ARGUMENTS, LOSSES, OPTIONS, SAVED, STEPS, load, record, rows, write_answer
from transformers import Trainer, TrainingArguments

SECTIONS = {
    **OPTIONS.get("sections", {}),
    "zero_optimization": {"stage": OPTIONS["stage"], "stage3_gather_16bit_weights_on_model_save": True},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
}
PACKAGES = ["deepspeed", "accelerate"]


def check(model) -> None:
    """Raise `RuntimeError` unless DeepSpeed trains a model, at the stage: accelerate leaves it out with `cpu=True`."""
    if not isinstance(model, deepspeed.DeepSpeedEngine) or model.zero_optimization_stage() != OPTIONS["stage"]:
        raise RuntimeError(f"{type(model).__name__} is not DeepSpeed at ZeRO-{OPTIONS['stage']}")


def by_trainer() -> None:
    """Train, and resume halfway."""
    if OPTIONS["by"] == "HCTrainer":
        from hf_hyperconn import HCTrainer as Chosen

        settings = {"hc_lr": 1e-2} if OPTIONS["has_connections"] else {}
    else:
        Chosen, settings = Trainer, {}
    record()
    arguments = {**ARGUMENTS, "save_strategy": "steps", "save_steps": STEPS // 2}
    for checkpoint in (None, f"{arguments['output_dir']}/checkpoint-{STEPS // 2}"):
        set_seed(0)
        zero = TrainingArguments(**arguments, deepspeed=SECTIONS)  # before the model, which ZeRO-3 splits on loading
        trainer = Chosen(load(dtype=torch.float32), zero, train_dataset=rows(), **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
    check(trainer.model_wrapped)
    trainer.save_model(SAVED)
    write_answer(PACKAGES, LOSSES[:STEPS], trainer.model_wrapped, resumed=LOSSES[STEPS:])


def by_accelerate() -> None:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=SECTIONS))
    model = load(dtype=torch.float32)
    batches = [{name: torch.tensor(value) for name, value in row.items()} for row in rows()]
    loader = torch.utils.data.DataLoader(batches, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), loader)
    check(model)
    losses = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(SAVED, state_dict=state)
    write_answer(PACKAGES, losses, model)


if __name__ == "__main__":
    by_accelerate() if OPTIONS["by"] == "accelerate" else by_trainer()
    torch.distributed.destroy_process_group()
