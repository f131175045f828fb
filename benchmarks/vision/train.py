"""One training run: its model, its loop."""

import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from benchmarks.lines import put, result_in
from benchmarks.pretraining.resuming import Kept
from benchmarks.pretraining.runs import Run
from benchmarks.pretraining.train import (
    CLIP,
    EVALUATIONS,
    LAST_LEARNING_RATE,
    batches,
    has_matrices,
    optimizer_of,
    refuse_another_base,
)
from benchmarks.timing import RESULTS, device_name
from hf_hyperconn import convert_model
from hf_hyperconn.analysis.study import study
from hf_hyperconn.training.monitor import hc_figures

from .images import Images
from .studies import TASKS, Task, fields
from .tasks import KINDS

CURVES, WORK = RESULTS / "vision", RESULTS.parents[1] / "build" / "vision"


def path_of(run: Run) -> Path:
    """Return the file that has a line for the run when it is done."""
    return CURVES / f"{run.study}.jsonl"


def result_of(run: Run) -> dict | None:
    """Return a run's result; None until it is done."""
    return result_in(path_of(run), run.id)


def is_done(run: Run) -> bool:
    """Return whether the run's result is there, and of the base, which others start from, its weights."""
    return result_of(run) is not None and (run.study != "base" or (WORK / run.id).exists())


def train(
    run: Run, images: Images, deadline: float = float("inf"), tasks: Mapping[str, Task] = TASKS
) -> dict[str, object]:
    """Do a run, or what is left of it, and write its result, which is returned.

    deadline: of `time.monotonic`; the run is kept when it passes.

    Raises `OutOfTime` then.
    """
    size = tasks[run.family]
    task = KINDS[run.family](size, images)
    torch.manual_seed(run.seed)
    model = build(run, task)
    optimizer = optimizer_of(model, run)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, run.warm_up, run.steps, min_lr_rate=LAST_LEARNING_RATE
    )
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    kept = Kept(WORK / f"{run.id}.pt", parts, deadline)
    state = kept.load() or {"step": 0, "curve": [], "times": []}
    every = batches(torch.arange(len(images.training[1])), size.batch, run.seed)
    for step, chosen in itertools.islice(enumerate(every), state["step"], run.steps):
        if step % (run.steps // EVALUATIONS) == 0:
            state["curve"].append(evaluate(model, task, step))
        torch.manual_seed(1_000_000 * run.seed + step)  # models of a seed draw the same, also those that go on
        started = time.process_time()
        task.loss(model, chosen).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state["times"].append(time.process_time() - started)
        state["step"] = step + 1
        kept.keep(state)
    state["curve"].append(evaluate(model, task, run.steps))
    end = measure(model, task, size.held_out[1])
    result = {
        **asdict(run),
        "device": device_name(),
        "torch": torch.__version__,
        "images": images.describe(),
        "trained_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "images_a_step": size.batch,
        "cpu_seconds_a_step": round(statistics.median(state["times"]), 4),
        **{f"held_out_{name}": value for name, value in end.items()},
        "curve": state["curve"],
    }
    if run.seed == 1 and has_matrices(model.config):
        matrices = study(model, [task.shown]).matrices
        result["matrix"] = [[round(value, 4) for value in row] for row in matrices.inputs.tolist()]
    if run.study == "base":
        refuse_another_base(result_of(run), WORK / run.id, result)
        model.save_pretrained(WORK / run.id)
    put(path_of(run), run.id, result)
    kept.path.unlink(missing_ok=True)
    return result


def build(run: Run, task) -> nn.Module:
    """Return the model that a run trains: new, or its start's, converted if it has hyper-connections."""
    if run.start is None:
        return task.new(run).train()
    base = task.load(WORK / run.start)
    return (base if fields(run) is None else convert_model(base, **fields(run))).train()


def evaluate(model: nn.Module, task, step: int) -> dict[str, float]:
    """Return a point of the curve: held-out loss, and what the connections do."""
    figures = hc_figures(model, task.shown) if has_matrices(model.config) else {}
    rounded = {name: round(value, 6) for name, value in figures.items()}
    return {"step": step, **measure(model, task, task.task.held_out[0]), **rounded}


@torch.no_grad()
def measure(model: nn.Module, task, number: int) -> dict[str, float]:
    """What a task evaluates on a number of held-out images."""
    model.eval()
    figures = task.evaluate(model, number)
    model.train()
    return {name: round(value, 5) for name, value in figures.items()}
