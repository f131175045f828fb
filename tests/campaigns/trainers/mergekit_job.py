"""Merge two models that were made of one base by mergekit's command.

The losses are those of a merge of models whose connections are those of the start. `saved` is a merge of models with
trained connections.
"""

import shlex
from pathlib import Path

import torch
import yaml
from job import FOLDER, OPTIONS, PLACE, SAVED, STEPS, load, rows, tokenizer, write_answer
from mergekit.scripts import run_yaml

CONNECTIONS = ("_hc.", "hc_head.")
BATCHES = [torch.tensor([row["input_ids"]]) for row in rows()]


def is_of_connection(name: str) -> bool:
    return any(part in name for part in CONNECTIONS)


def make(seed: int, are_connections_trained: bool) -> str:
    """Save a model with other weights than the base's, the same ones in a base and its conversion."""
    model, folder = load(), PLACE / f"{seed} {are_connections_trained}"
    for index, (_, parameter) in enumerate(item for item in model.named_parameters() if not is_of_connection(item[0])):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    trained = [parameter for name, parameter in model.named_parameters() if is_of_connection(name)]
    if are_connections_trained and trained:
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        for ids in BATCHES[seed * STEPS : (seed + 1) * STEPS]:
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def merge(models: list[str], folder: str) -> None:
    """Write a folder by docs/trainers.md's command and the YAML of the examples, with these models and the method."""
    command = shlex.split(OPTIONS["command"])
    config = yaml.safe_load((Path(OPTIONS["repository"]) / command[1]).read_text(encoding="utf-8"))
    for entry, model in zip(config["models"], models, strict=True):
        entry["model"] = model
    config |= {"merge_method": OPTIONS["method"], "dtype": OPTIONS["dtype"]}
    if OPTIONS["method"] == "slerp":
        config |= {"base_model": models[0], "parameters": {"t": 0.5}}
    elif OPTIONS["method"] == "ties":
        config |= {"base_model": str(PLACE / FOLDER), "parameters": {"density": 0.5}}
    written = PLACE / "merge.yaml"
    written.write_text(yaml.safe_dump(config), encoding="utf-8")
    run_yaml.main([str(written), folder, *command[3:]], standalone_mode=False)


def main() -> None:
    merged = str(PLACE / "merged")
    merge([make(seed, are_connections_trained=False) for seed in (0, 1)], merged)
    model = load(folder=merged).eval()
    with torch.no_grad():
        losses = [model(ids, labels=ids).loss.item() for ids in BATCHES[:STEPS]]
    merge([make(seed, are_connections_trained=True) for seed in (0, 1)], SAVED)
    write_answer(["mergekit"], losses, load(folder=SAVED), compared=losses)


if __name__ == "__main__":
    main()
