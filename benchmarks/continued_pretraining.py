"""Continue a base's pretraining with and without hyper-connections, by the recipe, on the standard library's source.

    python -m benchmarks.continued_pretraining            # about 15 minutes on 2 cores
    python -m benchmarks.continued_pretraining --render   # only writes table and plot, from benchmarks/results

A byte-level Llama is pretrained by examples/continue_pretraining.py on nine files in ten; then it and its conversion
to DHCx4 go on, from that same checkpoint, on the same rows in the same order, once for each seed. Of the tenth, the
small ones are what both are evaluated on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import RESULTS, fill, markdown, write
from hf_hyperconn.conversion.demo import LENGTH, byte_llama, byte_tokenizer, standard_library

REPOSITORY = RESULTS.parents[1]
DOCS = REPOSITORY / "docs" / "training.md"
PLOT = RESULTS / "continued_pretraining.png"
NAME = "continued_pretraining.json"

BATCH, SEEDS = 16, (1, 2, 3)
PRETRAINING_STEPS, STEPS, EVALUATIONS = 1000, 250, 5
HELD_OUT_SIZE = 20_000  # bytes of a held-out file at most, so that evaluation does not take longer than training
MODELS = {"Llama": "none", "Llama DHC×4": "dhc"}


def prepare(place: Path) -> tuple[list[str], list[str]]:
    """Write an untrained base with its tokenizer; returns the files to train on and those held out."""
    byte_llama(eos_token_id=0).save_pretrained(place / "untrained")
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(place / "untrained")
    training, held_out = standard_library()
    small = [str(path) for path in held_out if path.stat().st_size < HELD_OUT_SIZE]
    return list(map(str, training)), small


def train(model: Path, out: Path, files: tuple[list[str], list[str]], **settings: object) -> dict:
    """Run the recipe; returns what it logged, and how long it took."""
    training, held_out = files
    settings = {
        "model": model,
        "output_dir": out,
        "sequence_length": LENGTH,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "per_device_eval_batch_size": 64,
        "use_cpu": True,
        "bf16": False,
        "eval_strategy": "steps",
        "save_strategy": "no",
        "logging_steps": 10,
        "report_to": "none",
        **settings,
    }
    command = [sys.executable, "examples/continue_pretraining.py", "examples/configs/recipe.yaml"]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command += ["--train_files", *training, "--held_out_files", *held_out]
    started = time.perf_counter()
    subprocess.run(
        command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": "."}
    )
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {
        "seconds": round(next(entry["train_runtime"] for entry in log if "train_runtime" in entry), 1),
        "seconds_with_loading": round(time.perf_counter() - started, 1),
        "held_out": [(entry["step"], round(entry["eval_loss"], 5)) for entry in log if "eval_loss" in entry],
        "training": [(entry["step"], round(entry["loss"], 5)) for entry in log if "loss" in entry],
        "connections": [
            {name: round(value, 6) for name, value in entry.items() if name.startswith("hc/")}
            | {"step": entry["step"]}
            for entry in log
            if "hc/stream_cosine" in entry
        ],
    }


def measure() -> dict:
    """Everything, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        files = prepare(place)
        pretraining = train(
            place / "untrained",
            place / "base",
            files,
            connection="none",
            learning_rate=3e-3,
            max_steps=PRETRAINING_STEPS,
            eval_steps=PRETRAINING_STEPS,
            seed=0,
        )
        print(f"base: held-out loss {pretraining['held_out'][-1][1]:.4f}", flush=True)
        runs = []
        for seed in SEEDS:
            for name, connection in MODELS.items():
                run = train(
                    place / "base",
                    place / f"{connection}-{seed}",
                    files,
                    connection=connection,
                    hc_start="copies",
                    learning_rate=3e-4,
                    hc_lr=3e-3,
                    max_steps=STEPS,
                    eval_steps=STEPS // EVALUATIONS,
                    eval_on_start=True,
                    seed=seed,
                )
                runs.append({"model": name, "seed": seed, **run})
                print(f"{name}, seed {seed}: {run['held_out'][-1][1]:.4f} in {run['seconds']:.0f} s", flush=True)
    return {"settings": {"length": LENGTH, "batch": BATCH, "steps": STEPS}, "pretraining": pretraining, "runs": runs}


def table(result: dict) -> str:
    """Return Markdown: held-out loss before and after, by model and seed, and the difference between the models."""
    seeds = sorted({run["seed"] for run in result["runs"]})
    last = {(run["model"], run["seed"]): run["held_out"][-1][1] for run in result["runs"]}
    head = ["held-out loss", "converted", *(f"seed {seed}" for seed in seeds), "mean", "time"]
    rows = []
    for name in MODELS:
        runs = [run for run in result["runs"] if run["model"] == name]
        cells = [f"{runs[0]['held_out'][0][1]:.4f}", *(f"{last[name, seed]:.4f}" for seed in seeds)]
        cells += [f"{statistics.mean(last[name, seed] for seed in seeds):.4f}"]
        cells += [f"{statistics.median(run['seconds'] for run in runs):.0f} s"]
        rows.append([name, *cells])
    base, hc = MODELS
    differences = [last[hc, seed] - last[base, seed] for seed in seeds]
    cells = ["", *(f"{difference:+.4f}" for difference in differences), f"{statistics.mean(differences):+.4f}", ""]
    return markdown(head, [*rows, ["difference", *cells]])


def plot(result: dict) -> None:
    """Held-out loss over steps, and how alike the streams are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, cosines) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, connection), color, line in zip(MODELS.items(), ("0.6", "#08306b"), ("-", "--"), strict=True):
        for i, run in enumerate(run for run in result["runs"] if run["model"] == name):
            losses.plot(*zip(*run["held_out"], strict=True), line, color=color, label=None if i else name)
            if connection != "none":
                steps = [figures["step"] for figures in run["connections"]]
                different = [1 - figures["hc/stream_cosine"] for figures in run["connections"]]
                cosines.plot(steps, different, color=color, label=f"seed {run['seed']}")
    losses.set(xlabel="step", ylabel="held-out loss", title="Continued from the same checkpoint, one line a seed")
    losses.legend()
    cosines.set(xlabel="step", ylabel="1 - cosine similarity of two streams", title="The streams separate")
    figure.savefig(PLOT, dpi=120)


def render(text: str) -> str:
    """Return the page with its table made anew from benchmarks/results."""
    result = json.loads((RESULTS / NAME).read_text())
    return fill(text, "continued pretraining", result, table(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only write the table and the plot")
    if not parser.parse_args().render:
        write(NAME, measure())
    plot(json.loads((RESULTS / NAME).read_text()))
    DOCS.write_text(render(DOCS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
