"""Tables of the deep study's finished runs, into docs/results.md and docs/results_rates.md, and its figure.

    python -m benchmarks.depth.report

Intervals are those of benchmarks.pretraining.report.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.pretraining.report import CURVES, DOCS, difference
from benchmarks.pretraining.runs import PLAIN, WARM_UP, Run, Scale
from benchmarks.pretraining.train import result_of
from benchmarks.timing import markdown, with_tables

from .naming import name_of
from .plots import draw
from .scales import DEEP, SMALL, WIDE
from .studies import (
    AT_A_BILLION,
    DRAWN,
    DRAWN_RATE,
    FEW_SEEDS,
    HISTORY,
    SATURATED_BEST,
    SKIPS,
    adapter_rates,
    adapters,
    added,
    as_at_a_billion,
    continued,
    deeper,
    growth,
    lean,
    long,
    longer,
    mixtures,
    muon,
    other_text,
    other_text_rates,
    parts,
    rates,
    rivals,
    saturated,
    scratch,
    scratch_hc_rates,
    scratch_long,
    scratch_long_rates,
    scratch_rates,
    skips,
    trunk,
    when,
    wide_rates,
)

FIGURE = DOCS.parent / "figures" / "results_deep.png"
RATES = DOCS.with_name("results_rates.md")


def results(runs: list[Run], size: Scale = DEEP) -> dict[Run, dict]:
    """What is finished of those runs.

    Raises `ValueError` when what has the same text's name was not trained on the same one.
    """
    found = {run: result for run in runs if (result := result_of(run, size)) is not None}
    for name in {run.text for run in found}:
        if len(texts := {result["corpus"]["sha256"] for run, result in found.items() if run.text == name}) > 1:
            raise ValueError(f"results in {CURVES / size.name} for {name} come from {len(texts)} texts.")
    return found


def tuning(runs: list[Run]) -> str:
    """Return Markdown: the held-out loss of each method at each pair of learning rates, of one seed."""
    found = {
        (name_of(run), run.learning_rate, run.hc_lr if run.model != PLAIN else None): result["held_out_loss"]
        for run, result in results(runs).items()
        if run.study != "base"
    }
    pairs = sorted({(rate, hc_lr) for _, rate, hc_lr in found if hc_lr is not None})
    rows = [
        [model, *(_loss(found.get((model, rate, None), found.get((model, rate, hc_lr)))) for rate, hc_lr in pairs)]
        for model in dict.fromkeys(model for model, *_ in found)
    ]
    return markdown(["", *(f"{rate:g}, {hc_lr:g}×" for rate, hc_lr in pairs)], rows) if pairs else ""


def by_rate(runs: list[Run], size: Scale = DEEP, *, tells_hc_lr: bool = False) -> str:
    """Return Markdown: the held-out loss of each model at each learning rate, of one seed.

    tells_hc_lr: whether a model with another multiple of it for its connections has a row of its own.
    """
    found: dict[str, dict[float, float]] = {}
    for run, result in results(runs, size).items():
        if run.study != "base":
            name = name_of(run, size)
            name += f", connections {run.hc_lr:g}×" if tells_hc_lr and run.model != PLAIN else ""
            found.setdefault(name, {})[run.learning_rate] = result["held_out_loss"]
    tried = sorted({rate for losses in found.values() for rate in losses})
    rows = [[name, *(_loss(losses.get(rate)) for rate in tried)] for name, losses in found.items()]
    return markdown(["", *(f"{rate:g}" for rate in tried)], rows) if rows else ""


def by_start(runs: list[Run]) -> str:
    """Return Markdown: the loss of each model at each rate, by the part of a trunk's steps after which it started."""
    found: dict[str, dict[float, float]] = {}
    steps = trunk().steps
    for run, result in results(runs).items():
        times = run.steps / (steps - run.at)
        name = f"{run.model}, {run.learning_rate:g}" + f", {times:g}× the steps left" * (times != 1)
        found.setdefault(name, {})[run.at / steps] = result["held_out_loss"]
    parts = sorted({part for losses in found.values() for part in losses})
    rows = [[name, *(_loss(losses.get(part)) for part in parts)] for name, losses in found.items()]
    return markdown(["", *(f"{part:.0%}" for part in parts)], rows) if rows else ""


def by_seed(runs: list[Run]) -> str:
    """Return Markdown: the loss of each model by seed, and how far the history start is from it, by its optimizer.

    The history start stands in two columns: as it is, and with a norm of the embedding if there are such runs.
    """
    found: dict[Run, dict[int, dict]] = {}
    for run, result in results(runs).items():
        found.setdefault(replace(run, seed=0), {})[run.seed] = result
    history = {(run.muon, run.embedding_norm): seeds for run, seeds in found.items() if run.model == HISTORY}
    seeds, rows = sorted({run.seed for run in runs}), []
    for run, of_seeds in found.items():
        compared = of_seeds if run.model in (PLAIN, SKIPS) else {}
        apart = [difference(history.get((run.muon, norm), {}), compared) for norm in (False, True)]
        losses = [_loss(of_seeds.get(seed, {}).get("held_out_loss")) for seed in seeds]
        rows.append([name_of(run), *losses, *(str(each or "") for each in apart)])
    titles = ["", *(f"seed {seed}" for seed in seeds), "history start against it", "with the norm"]
    return filled(titles, rows) if rows else ""


def comparison(runs: list[Run], size: Scale = DEEP) -> str:
    """Return Markdown: every method at its best learning rates against the plain model at its own, over seeds."""
    by_name: dict[str, dict[int, dict]] = {}
    settings: dict[str, Run] = {}
    for run, result in results(runs, size).items():
        if run.study != "base":
            by_name.setdefault(name_of(run, size), {})[run.seed] = result
            settings[name_of(run, size)] = run
    rows = []
    for name, of_seeds in by_name.items():
        run, apart, longer_apart, at_a_billion = settings[name], None, None, None
        usual = {"undivided": False, "divided": False, "alone": False, "lane": 1.0}
        plain = replace(run, model=PLAIN, warm_up=round(WARM_UP * run.steps), **usual)
        if name_of(plain, size) != name:
            apart, longer_apart, at_a_billion = (
                difference(of_seeds, by_name.get(name_of(each, size), {}))
                for each in (plain, longer(plain), as_at_a_billion(plain))
            )
            if run.model == PLAIN:
                longer_apart = at_a_billion = None
        rows.append(
            [
                name,
                f"{run.learning_rate:g}" + (f", {run.hc_lr:g}×" if run.hc_lr != 1 else ""),
                str(len(of_seeds)),
                f"{statistics.mean(result['held_out_loss'] for result in of_seeds.values()):.4f}",
                str(apart or ""),
                f"{apart.detectable:.4f}" if apart and apart.detectable else "",
                str(longer_apart or ""),
                str(at_a_billion or ""),
            ]
        )
    titles = ["", "learning rates", "seeds", "held-out loss", "against plain, same tokens", "detectable"]
    titles += [f"against plain, {times:g}× the steps" for times in (DEEP.slower["Llama"], AT_A_BILLION)]
    return filled(titles, rows)


def filled(titles: list[str], rows: list[list[str]]) -> str:
    """Return Markdown of the columns that any row fills."""
    places = [place for place in range(len(titles)) if any(row[place] for row in rows)]
    return markdown([titles[place] for place in places], [[row[place] for place in places] for row in rows])


def costs() -> str:
    """Return Markdown: how long a step takes, on two machines, and what it keeps for its backward."""
    titles, columns = [""], []
    for name, title, unit in (
        ("times.json", "a step, {}", "ms"),
        ("times_xeon.json", "a step, {}", "ms"),
        ("memory.json", "kept for the backward", "MiB"),
    ):
        measured = json.loads((CURVES / DEEP.name / name).read_text(encoding="utf-8"))
        figures = measured["Llama"]
        titles.append(title.format(measured["device"].partition(",")[0]))
        columns.append({model: f"{each:.0f} {unit}, {each / figures[PLAIN]:.2f}×" for model, each in figures.items()})
    return markdown(titles, [[model, *(column.get(model, "") for column in columns)] for model in columns[-1]])


def render(page: Path) -> str:
    """Return a page with its tables made anew from the finished runs; an empty table keeps its place."""
    tables = {name: table for name, table in PAGES[page]().items() if table}
    return with_tables(page.read_text(encoding="utf-8"), tables)


def main_tables() -> dict[str, str]:
    """Return the tables of docs/results.md, by their marks."""
    return {
        "deep scratch": comparison([*scratch(), *(run for run in lean() if not run.muon)]),
        "deep scratch long": by_seed(scratch_long()),
        "deep skips": by_seed(skips()),
        "deep muon": comparison([*muon(), *(run for run in lean() if run.muon)]),
        "deep when": by_start(when()),
        "deep costs": costs(),
        "deep continued": comparison(continued()),
        "deep saturated rates": by_rate([run for run in saturated() if run.seed == FEW_SEEDS[0]], SMALL),
        "deep saturated": comparison([run for run in saturated() if run.learning_rate == SATURATED_BEST[0]], SMALL),
    }


def rate_tables() -> dict[str, str]:
    """Return the tables of docs/results_rates.md, by their marks."""
    compared = [run for run in scratch_rates() if name_of(run) in (PLAIN, HISTORY)]
    return {
        "deep scratch tuning": by_rate(scratch_rates()),
        "deep scratch connections": tuning(scratch_hc_rates()),
        "deep rivals": by_rate(compared + rivals()),
        "deep parts": by_rate(parts()),
        "deep scratch long tuning": by_rate(scratch_long_rates()),
        "deep deeper": by_rate(deeper()),
        "deep mixtures": by_rate(mixtures()),
        "deep wide": by_rate(wide_rates(), WIDE),
        "deep tuning": tuning([*rates(), *added()]),
        "deep long": by_rate(long()),
        "deep other text tuning": by_rate(other_text_rates(), tells_hc_lr=True),
        "deep other text": comparison(other_text()),
        "deep adapters tuning": by_rate(adapter_rates(), tells_hc_lr=True),
        "deep adapters": comparison(adapters()),
        "deep growth": by_rate(growth(), SMALL),
    }


PAGES = {DOCS: main_tables, RATES: rate_tables}


def main() -> None:
    new = [run for run in (*scratch(), *skips()) if run.learning_rate == DRAWN_RATE]
    curves: dict[str, list[dict]] = {}
    for run, result in results(new).items():
        if (name := name_of(run)) in (*DRAWN, SKIPS):
            curves.setdefault(name, []).append(result)
    draw(curves, FIGURE)
    for page in PAGES:
        page.write_text(render(page), encoding="utf-8")


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
