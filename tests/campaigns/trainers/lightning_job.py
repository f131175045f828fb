"""Train docs/trainers.md's module by Lightning, save its checkpoint, and load that into a module anew."""

import lightning
import torch
from job import LOSSES, OPTIONS, PLACE, SAVED, STEPS, rows, write_answer


def main() -> None:
    """Train."""
    names = {}
    exec(OPTIONS["code"], names)
    step = names["Module"].training_step

    def training_step(self, *arguments):
        loss = step(self, *arguments)
        LOSSES.append(loss.item())
        return loss

    names["Module"].training_step = training_step
    module = names["Module"]()
    batches = [{name: torch.tensor(value) for name, value in row.items()} for row in rows()]
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=OPTIONS["precision"],
        max_steps=STEPS,
        logger=False,
        default_root_dir=PLACE,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=2))
    trainer.save_checkpoint(PLACE / "last.ckpt")
    loaded = names["Module"].load_from_checkpoint(PLACE / "last.ckpt", weights_only=False)
    loaded.model.to(module.model.dtype).save_pretrained(SAVED)
    write_answer(["lightning"], model=module.model)


if __name__ == "__main__":
    main()
