"""The smallest comparison that tells: new Llamas of 24 layers, plain, with skips, and with streams that mix.

    python -m benchmarks.depth.evidence [--text FILE]

Skips from the embedding take 1.07 times as long as the plain model, the history start of DHC×4 1.24 times or more.
Each is trained with three seeds, two runs at a time, in less than 20 minutes on two cores, on the source code of
Python, PyTorch and Transformers or on a text of yours. Prints their losses and draws them in
build/pretraining/evidence, where finished runs lie, too: the same command goes on after an interruption. --write puts
them into docs/results.md, with the plain model at other learning rates, which takes a few minutes more.
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.pretraining.report import DOCS, difference
from benchmarks.pretraining.runs import PLAIN, WARM_UP, Run
from benchmarks.pretraining.train import WORK, train
from benchmarks.pretraining.train import result_of as done
from benchmarks.timing import RESULTS, markdown, with_tables, write

from .plots import draw
from .scales import DEEP
from .studies import BEST_SKIPS, DRAWN_RATE, HISTORY, SKIPS
from .text import given

SIZE = replace(DEEP, name="evidence", held_out=(64, 256))
STEPS = 250
SEEDS = (1, 2, 3)
OTHER_RATES = (2e-3, 3e-3, 6e-3)  # of the plain model, with the first seed
FIGURES = DOCS.parent / "figures"
RESULT, FIGURE = "evidence.json", "results_evidence.png"
KEPT = ("model", "seed", "learning_rate", "steps", "tokens_a_step", "corpus", "held_out_loss", "curve")


def runs(text: str) -> list[Run]:
    """Return every model with every seed."""
    usual = {"study": "scratch", "learning_rate": DRAWN_RATE, "text": text}
    plain = Run(model=PLAIN, seed=0, steps=STEPS, warm_up=round(WARM_UP * STEPS), **usual)
    models = (plain, replace(plain, **BEST_SKIPS), replace(plain, model=HISTORY))
    return [replace(run, seed=seed) for seed in SEEDS for run in models]


def other_rates(text: str) -> list[Run]:
    """Return the plain model at other learning rates."""
    return [replace(runs(text)[0], learning_rate=rate) for rate in OTHER_RATES]


def result_of(run: Run, text: Path | None, held_out: Path | None) -> dict:
    """Return the result of a run, which is made if it isn't there."""
    result = done(run, SIZE, WORK) or train(run, size=SIZE, text=given(text, held_out, SIZE.vocabulary), folder=WORK)
    curve = [{"step": point["step"], "loss": point["loss"]} for point in result["curve"]]
    return {**{name: result[name] for name in KEPT}, "curve": curve}


def plain_by_rate(results: list[dict]) -> str:
    """Return Markdown: the plain model's loss at each learning rate, with the first seed."""
    of_rates = {
        result["learning_rate"]: result
        for result in results
        if result["model"] == PLAIN and result["seed"] == SEEDS[0]
    }
    rates = sorted(of_rates)
    row = [f"{PLAIN}, seed {SEEDS[0]}", *(f"{of_rates[rate]['held_out_loss']:.4f}" for rate in rates)]
    return markdown(["", *(f"{rate:g}" for rate in rates)], [row])


def by_model(results: list[dict]) -> dict[str, dict[int, dict]]:
    """Return the results of each model at the rate that all have, by seed."""
    found: dict[str, dict[int, dict]] = {}
    for result in results:
        if result["learning_rate"] == DRAWN_RATE:
            found.setdefault(result["model"], {})[result["seed"]] = result
    return found


def table(results: list[dict]) -> str:
    """Return Markdown: the losses of each model by seed, and its mean difference from those in earlier rows."""
    models = by_model(results)
    compared, rows = (PLAIN, SKIPS), []
    for place, (model, of_seeds) in enumerate(models.items()):
        losses = [f"{result['held_out_loss']:.4f}" for result in of_seeds.values()]
        apart = [str(difference(of_seeds, models[other])) for other in compared[:place]]
        rows.append([model, *losses, *apart, *[""] * (len(compared) - len(apart))])
    return markdown(["", *(f"seed {seed}" for seed in models[PLAIN]), *(f"against {name}" for name in compared)], rows)


def render(page: str) -> str:
    """Return the page with the table of the committed results."""
    results = json.loads((RESULTS / RESULT).read_text(encoding="utf-8"))["runs"]
    return with_tables(page, {"evidence": table(results), "evidence rates": plain_by_rate(results)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file to train on; by default source code")
    parser.add_argument("--held-out", type=Path, help="a file to evaluate on; by default the end of the other")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results and docs/results.md")
    options = parser.parse_args()
    corpus = given(options.text, options.held_out, SIZE.vocabulary)
    name = f"{options.text.stem if options.text else 'source'}_{corpus.sha256[:8]}"
    listed = runs(name) + (other_rates(name) if options.write else [])
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawned, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        begun = [pool.submit(result_of, run, options.text, options.held_out) for run in listed]
        for done, future in enumerate(as_completed(begun), start=1):
            result = future.result()
            name, seed, loss = result["model"], result["seed"], result["held_out_loss"]
            print(f"{done}/{len(listed)} {name}, seed {seed}: {loss:.4f}", flush=True)
    results = [future.result() for future in begun]
    print(table(results))
    figure = FIGURES / FIGURE if options.write else WORK / SIZE.name / FIGURE
    draw({model: list(of_seeds.values()) for model, of_seeds in by_model(results).items()}, figure)
    print(f"Drawn in {figure}.")
    if options.write:
        write(RESULT, {"runs": results})
        DOCS.write_text(render(DOCS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
