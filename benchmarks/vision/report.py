"""Tables of the vision study's finished runs, into docs/results_small.md.

    python -m benchmarks.vision.report

Intervals are those of benchmarks.pretraining.report.
"""

import statistics
from collections.abc import Iterable, Mapping

from benchmarks.pretraining.report import SMALL, difference, interval
from benchmarks.pretraining.runs import PLAIN, Run
from benchmarks.timing import markdown, with_tables

from .studies import DIT, STUDIES, TASKS, VIT, Task, classifying, continued, denoising, for_longer, longer, rates
from .train import CURVES, result_of

BySeed = Mapping[int, dict]
"""The results of one setting, by their seeds."""


def results(runs: Iterable[Run]) -> dict[Run, dict]:
    """What is finished of those runs.

    Raises `ValueError` when models of one task were not all trained on the same images.
    """
    found = {run: result for run in runs if (result := result_of(run)) is not None}
    for data in {run.text for run in found}:
        if len({result["images"]["sha256"] for run, result in found.items() if run.text == data}) > 1:
            raise ValueError(f"results in {CURVES} come from several versions of the images {data!r}.")
    return found


def tuning() -> str:
    """Return Markdown: the held-out loss of the plain models at each learning rate, of one seed."""
    found = {(run.family, run.learning_rate): result["held_out_loss"] for run, result in results(rates()).items()}
    tried = sorted({rate for task in TASKS.values() for rate in task.tried})
    rows = [
        [family, *(f"{found[family, rate]:.4f}" if (family, rate) in found else "" for rate in tried)]
        for family in TASKS
        if any(family == each for each, _ in found)
    ]
    return markdown(["", *(f"{rate:g}" for rate in tried)], rows)


def name_of(run: Run, task: Task) -> str:
    """Return a row's name: the model, and what is not as usual."""
    usual = task.steps[run.study]
    return run.model + f", {run.steps / usual:g}× the steps" * (run.steps != usual)


def comparison(runs: list[Run], task: Task) -> str:
    """Return Markdown: every model against the plain one, over seeds, and new ones against it after the same time."""
    by_name: dict[str, dict[int, dict]] = {}
    after_longer = [run for run in for_longer() if run.family == task.family and run.study == runs[-1].study]
    for run, result in results([*runs, *after_longer]).items():
        if run.study != "base":
            by_name.setdefault(name_of(run, task), {})[run.seed] = result
    plain = by_name.get(PLAIN, {})
    plain_for_longer = by_name.get(name_of(longer(task, seed=1), task), {})
    has_accuracy = any("held_out_accuracy" in result for of_seeds in by_name.values() for result in of_seeds.values())
    measured = ["seeds", "held-out loss", "against plain, same images", "detectable", "same time"]
    accuracies = ["accuracy", "against plain"] * has_accuracy
    rows = []
    for name, of_seeds in by_name.items():
        has_connections = not name.startswith(PLAIN)
        apart = difference(of_seeds, plain) if has_connections else None
        same_time = difference(of_seeds, plain_for_longer) if has_connections else None
        row = [name, str(len(of_seeds)), f"{_mean(of_seeds, 'held_out_loss'):.4f}", str(apart or "")]
        row += [f"{apart.detectable:.4f}" if apart and apart.detectable else "", str(same_time or "")]
        if has_accuracy:
            row.append(f"{100 * _mean(of_seeds, 'held_out_accuracy'):.1f} %")
            row.append(_points(of_seeds, plain) if has_connections else "")
        rows.append([*row, _cpu(of_seeds)])
    return markdown(["", *measured, *accuracies, "a step"], rows)


def state() -> str:
    """Return how many runs are done, of each study."""
    listed = {name: study() for name, study in STUDIES.items()}
    done = {name: sum(result_of(run) is not None for run in runs) for name, runs in listed.items()}
    if all(done[name] == len(runs) for name, runs in listed.items()):
        return "All runs are done."
    parts = ", ".join(f"{done[name]} of {len(runs)} of `{name}`" for name, runs in listed.items())
    return f"Not all runs are done: {parts}. What is missing has no row, or fewer seeds."


def _mean(of_seeds: BySeed, name: str) -> float:
    return statistics.mean(result[name] for result in of_seeds.values())


def _points(of_seeds: BySeed, plain: BySeed) -> str:
    """Return how much higher the accuracy is, in hundredths, over the seeds that both have."""
    seeds = sorted(of_seeds.keys() & plain.keys())
    if not seeds:
        return ""
    ours, theirs = ([100 * results[seed]["held_out_accuracy"] for seed in seeds] for results in (of_seeds, plain))
    apart = interval([one - other for one, other in zip(ours, theirs, strict=True)])
    return f"{apart.mean:+.1f}" + (f" ± {apart.half_width:.1f}" if apart.half_width is not None else "")


def _cpu(of_seeds: BySeed) -> str:
    taken = [result["cpu_seconds_a_step"] for result in of_seeds.values() if "cpu_seconds_a_step" in result]
    return f"{1000 * statistics.median(taken):.0f} ms" if taken else ""


def render(page: str) -> str:
    """Return the page with its tables made anew from the finished runs."""
    tables = {"vision state": state(), "vision tuning": tuning(), "vision ViT": comparison(classifying(), VIT)}
    tables |= {"vision continued": comparison(continued(), VIT), "vision DiT": comparison(denoising(), DIT)}
    return with_tables(page, tables)


def main() -> None:
    SMALL.write_text(render(SMALL.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
