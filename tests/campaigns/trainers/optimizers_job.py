"""Train with an optimizer of another package, by Transformers' Trainer or this package's."""

import torch
from job import ARGUMENTS, LOSSES, OPTIONS, SAVED, load, record, rows, write_answer
from transformers import Trainer, TrainingArguments

CONNECTIONS = ("_hc.", "hc_head.")


def muon(model) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of layers, without those of connections, and AdamW for the rest."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and ".layers." in name and not any(part in name for part in CONNECTIONS)
        (matrices if is_matrix else rest).append(parameter)
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


def by_trainer() -> tuple[list[float], torch.nn.Module]:
    chosen, settings = Trainer, {}
    if OPTIONS.get("by") == "HCTrainer":
        from hf_hyperconn import HCTrainer as chosen

        settings = {"hc_lr": 1e-2} if OPTIONS["has_connections"] else {}
    record()
    trainer = chosen(load(), TrainingArguments(**ARGUMENTS), train_dataset=rows(), **settings)
    trainer.train()
    return LOSSES, trainer.model


def by_muon() -> tuple[list[float], torch.nn.Module]:
    model, losses = load(), []
    optimizers = muon(model)
    for row in rows()[:4]:
        ids = torch.tensor([row["input_ids"]])
        loss = model(ids, labels=ids).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def main() -> None:
    losses, model = by_muon() if OPTIONS.get("by") == "Muon" else by_trainer()
    model.save_pretrained(SAVED)
    write_answer(["galore-torch", "apollo-torch", "schedulefree", "torch"], losses, model)


if __name__ == "__main__":
    main()
