"""What the vision study trains: a ViT that classifies CIFAR-10's images, and a DiT that takes noise off MNIST's.

The runs of the study are those of benchmarks/pretraining: `text` names the images, `family` is "ViT" or "DiT".
"""

from dataclasses import dataclass

from benchmarks.pretraining.runs import HC_LR, MODELS, PLAIN, SEEDS, WARM_UP, Run

WITH_CONNECTIONS = ("SHC×2", "DHC×2")


@dataclass(frozen=True)
class Task:
    """What one kind of model is trained for.

    data: the name of its images.
    shape: of the model. batch: images of a step.
    steps: of a run from scratch, of the base that is continued, and of a continuation.
    tried: learning rates for the plain model from scratch; taken: the best of them (a test compares with the
        results), and that of a continuation.
    slower: how many steps the plain model makes in the time of one with connections, at least.
    held_out: images that curves are evaluated on, and that a model is at its end.
    """

    family: str
    data: str
    shape: dict[str, int]
    batch: int
    steps: dict[str, int]
    tried: tuple[float, ...]
    taken: dict[str, float]
    slower: float
    held_out: tuple[int, int]


VIT = Task(
    "ViT",
    "cifar10",
    shape={
        "patch_size": 8,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 2,
    },
    batch=64,
    steps={"scratch": 600, "base": 900, "continued": 200},
    tried=(2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
    taken={"scratch": 5e-4, "continued": 3e-4},
    slower=2.3,
    held_out=(500, 5000),
)
DIT = Task(
    "DiT",
    "mnist",
    shape={"patch_size": 4, "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 6},
    batch=32,
    steps={"scratch": 600},
    tried=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    taken={"scratch": 1.6e-2},
    slower=1.8,
    held_out=(500, 5000),
)
TASKS = {task.family: task for task in (VIT, DIT)}


def rates() -> list[Run]:
    """Return the plain models from scratch with each learning rate."""
    return [_run(task, "scratch", PLAIN, 1, learning_rate=rate) for task in TASKS.values() for rate in task.tried]


def classifying() -> list[Run]:
    """New ViTs with all seeds."""
    return [_run(VIT, "scratch", model, seed) for seed in SEEDS for model in (PLAIN, *WITH_CONNECTIONS)]


def continued() -> list[Run]:
    """Return a plain base, and what goes on from it with all seeds, converted and as it is."""
    settings = [(PLAIN, {}), *((model, {"hc_lr": HC_LR}) for model in WITH_CONNECTIONS)]
    runs = [_run(VIT, "continued", model, seed, **each) for seed in SEEDS for model, each in settings]
    return [base(), *runs]


def denoising() -> list[Run]:
    """New DiTs with all seeds."""
    return [_run(DIT, "scratch", model, seed) for seed in SEEDS for model in (PLAIN, "SHC×2")]


def for_longer() -> list[Run]:
    """Return the plain models for as long as those with connections take, with all seeds."""
    return [longer(task, seed) for task in TASKS.values() for seed in SEEDS]


STUDIES = {
    "rates": rates,
    "classifying": classifying,
    "continued": continued,
    "denoising": denoising,
    "for-longer": for_longer,
}


def base() -> Run:
    """Return the ViT that is continued."""
    return _run(VIT, "base", PLAIN, 0, learning_rate=VIT.taken["scratch"])


def longer(task: Task, seed: int) -> Run:
    """Return the plain model with as many steps as it makes in the time of one with connections."""
    return _run(task, "scratch", PLAIN, seed, steps=round(task.slower * task.steps["scratch"]))


def fields(run: Run) -> dict | None:
    """Return the fields of a run's hyper-connections; None for the plain model."""
    return MODELS[run.model]


def _run(task: Task, study: str, model: str, seed: int, **settings) -> Run:
    steps = settings.get("steps", task.steps[study])
    usual = {
        "steps": steps,
        "warm_up": round(WARM_UP * steps),
        "learning_rate": task.taken.get(study),
        "start": base().id if study == "continued" else None,
    }
    return Run(study=study, model=model, seed=seed, family=task.family, text=task.data, **{**usual, **settings})
