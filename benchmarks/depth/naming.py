"""Names of the deep study's runs, in words for a table, and the best run of a name."""

from benchmarks.pretraining.runs import WARM_UP, Run, Scale
from benchmarks.pretraining.train import result_of

from .scales import DEEP

TEXT, BETA2 = "books", 0.95  # the usual ones
REWARM = 50  # the first steps of a run that starts from a trunk
LAYERS = {"Qwen3": "QK-norm (Qwen3)", "GLM-4": "sandwich norms (GLM-4)"}  # those of Llama with more norms


def name_of(run: Run, size: Scale = DEEP) -> str:
    """Return a row's name: the model, and what is not as usual."""
    words, usual = [run.model], size.steps["trunk" if run.decay else run.study] - run.at
    words += [LAYERS.get(run.family, run.family)] * (run.family != "Llama")
    words += [f"{run.steps / usual:g}× the steps"] * (run.steps != usual)
    words += ["projections undivided"] * run.undivided + ["projections divided"] * run.divided
    words += ["norm of the embedding"] * (run.embedding_norm and not run.skips)
    words += ["norm of the embedding in side streams"] * run.side_norm
    words += ["skips from the normed embedding" if run.embedding_norm else "skips from the embedding"] * run.skips
    words += ["Muon"] * run.muon + [f"beta2 of {run.beta2:g}"] * (run.beta2 != BETA2)
    words += [f"warm-up of {run.warm_up} steps"] * (run.warm_up != (REWARM if run.at else round(WARM_UP * run.steps)))
    words += ["constant rate"] * (run.decay > 0) + [f"from step {run.at}"] * (run.at > 0)
    words += ["side streams of the embedding alone"] * run.alone
    words += ["added to the stream"] * run.added
    words += [f"{run.fixed} fixed"] * bool(run.fixed)
    words += [f"second stream written {run.lane:g} times"] * (run.lane != 1)
    words += [f"LoRA of rank {run.rank}"] * (run.rank > 0)
    words += [run.text] * (run.text != TEXT)
    words += [f"{run.layers} layers"] * (run.layers > 0)
    return ", ".join(words)


def best(name: str, tried: list[Run], size: Scale = DEEP) -> Run | None:
    """Return the run of that name with the lowest loss of those tried; None until all of them are there."""
    tried = [run for run in tried if run.study != "base" and name_of(run, size) == name]
    found = {run: result_of(run, size) for run in tried}
    if None in found.values():
        return None
    return min(tried, key=lambda run: found[run]["held_out_loss"])


def best_of(tried: list[Run], size: Scale = DEEP) -> list[Run]:
    """Return the best run of each name, but for names with runs that are missing."""
    names = dict.fromkeys(name_of(run, size) for run in tried if run.study != "base")
    return [run for name in names if (run := best(name, tried, size)) is not None]
