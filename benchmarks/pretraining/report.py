"""Tables and plots of the finished runs, into docs/results.md.

    python -m benchmarks.pretraining.report

Differences are taken within a seed, between runs that saw the same rows in the same order. Their interval holds the
mean with 95 % certainty if they are normally distributed (Student's t). Beside it stands the smallest mean difference
that so many seeds would have shown in 80 of 100 cases.
"""

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scipy import stats

from benchmarks.timing import between_marks

from .runs import FAMILIES, PAIR, SCALES, STUDIES, WARM_UP, Run, Scale
from .train import CURVES

DOCS = CURVES.parents[2] / "docs" / "results.md"
FIGURES = DOCS.parent / "figures"
CERTAINTY, POWER = 0.95, 0.8
PLAIN, HC = PAIR
ANY_SEED = 0

# a model from scratch, and what it is compared with beside the plain one
CONTRASTS = (
    ("DHC×2", "DHC×1"),
    ("DHC×4", "DHC×2"),
    ("DHC×8", "DHC×4"),
    ("DHC×2", "SHC×2"),
    ("DHC×4", "SHC×4"),
    ("DHC×4", "DHC×4 without tanh"),
    ("DHC×4", "mHC×4"),
    ("DHC×4", "iHC×4"),
)

Finished = Mapping[Run, Mapping[int, dict]]
"""The results of each setting (a run with `ANY_SEED` for its seed), by their seed."""


@dataclass(frozen=True)
class Difference:
    """Of held-out losses over seeds, in nats a byte.

    mean, half_width: the interval is mean ± half_width; None with a single seed.
    detectable: the smallest mean that would have been found.
    """

    mean: float
    half_width: float | None
    detectable: float | None

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.mean:+.4f}"
        return f"{self.mean:+.4f} ± {self.half_width:.4f}"


def interval(differences: list[float]) -> Difference:
    """Mean and interval of differences, one a seed."""
    mean, freedom = statistics.mean(differences), len(differences) - 1
    if not freedom:
        return Difference(mean, None, None)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    quantile = stats.t.ppf((1 + CERTAINTY) / 2, freedom)
    return Difference(mean, quantile * error, (quantile + stats.t.ppf(POWER, freedom)) * error)


def difference(results: Mapping[int, dict], reference: Mapping[int, dict]) -> Difference | None:
    """How much lower or higher the held-out loss is, over the seeds that both have; None when there is none."""
    seeds = results.keys() & reference.keys()
    differences = [results[seed]["held_out_loss"] - reference[seed]["held_out_loss"] for seed in sorted(seeds)]
    return interval(differences) if differences else None


def finished(runs: Iterable[Run], folder: Path = CURVES) -> Finished:
    """The results of those runs that are finished."""
    found: dict[Run, dict[int, dict]] = {}
    for run in runs:
        path = folder / f"{run.id}.json"
        if path.exists():
            found.setdefault(replace(run, seed=ANY_SEED), {})[run.seed] = json.loads(path.read_text(encoding="utf-8"))
    return found


def plain(setting: Run, slower: float = 1.0) -> Run:
    """The setting of the plain model that saw the same tokens as this one, or that many times more."""
    steps = round(slower * setting.steps)
    warm_up = setting.warm_up if slower == 1.0 else round(WARM_UP * steps)
    return replace(setting, model=PLAIN, hc_lr=1.0, noise=0.0, steps=steps, warm_up=warm_up)


def is_usual(setting: Run) -> bool:
    """Whether all weights are trained, with warm-up, on the text that the base knows."""
    return setting.text == "python" and setting.warm_up > 0 and not setting.rank


def label(setting: Run, size: Scale) -> str:
    """A row's name: the model, and what is not as usual."""
    usual = size.steps[setting.study]
    words = [setting.model]
    words += [f"{setting.steps / usual:g}× the steps"] * (setting.steps != usual)
    words += [f"connections at {setting.hc_lr:g}× the learning rate"] * (setting.hc_lr != 1)
    words += [f"LoRA of rank {setting.rank}"] * bool(setting.rank)
    words += [f"noise of {setting.noise:g}"] * bool(setting.noise)
    words += ["no warm-up"] * (setting.warm_up == 0)
    words += ["C++ headers"] * (setting.text == "headers")
    return ", ".join(words)


def table(found: Finished, size: Scale) -> str:
    """Markdown: a row for each setting, against the plain model after the same tokens and after the same time."""
    rows = []
    for setting, results in found.items():
        same_tokens = None if setting.model == PLAIN else difference(results, found.get(plain(setting), {}))
        longer = found.get(plain(setting, size.slower[setting.family]), {})
        same_time = difference(results, longer) if setting.model == HC else None
        loss = statistics.mean(result["held_out_loss"] for result in results.values())
        ends = [result["curve"][-1] for result in results.values()]
        apart = statistics.mean(1 - end.get("hc/stream_cosine", 1.0) for end in ends)
        rows.append(
            [
                label(setting, size),
                str(len(results)),
                f"{loss:.4f}",
                str(same_tokens or ""),
                f"{same_tokens.detectable:.4f}" if same_tokens and same_tokens.detectable else "",
                str(same_time or ""),
                f"{apart:.3g}" if setting.model != PLAIN else "",
                _time(results, found.get(plain(setting), {})),
            ]
        )
    head = [
        "",
        "seeds",
        "held-out loss",
        "against plain, same tokens",
        "detectable",
        "same time",
        "streams apart",
        "step",
    ]
    return _markdown(head, rows)


def _time(results: Mapping[int, dict], reference: Mapping[int, dict]) -> str:
    """The time of a step as a multiple of the plain model's, when both were run the same way."""
    seeds = [
        seed for seed in results if seed in reference and results[seed]["compiled"] == reference[seed]["compiled"]
    ]
    if not seeds:
        return ""
    ratios = [results[seed]["seconds_a_step"] / reference[seed]["seconds_a_step"] for seed in seeds]
    return f"{statistics.median(ratios):.2f}×"


def contrasts(found: Finished) -> str:
    """Markdown: the models from scratch against one another."""
    by_model = {setting.model: results for setting, results in found.items() if plain(setting) in found}
    rows = []
    for model, other in CONTRASTS:
        apart = difference(by_model.get(model, {}), by_model.get(other, {}))
        if apart is not None:
            rows.append(
                [f"{model} against {other}", str(apart), f"{apart.detectable:.4f}" if apart.detectable else ""]
            )
    return _markdown(["", "held-out loss", "detectable"], rows)


def families(found: Finished, size: Scale) -> str:
    """Markdown: what DHC×4 gains in a mixture of experts, against what it gains in a dense model."""
    gains = {}
    for family in FAMILIES:
        settings = [setting for setting in found if setting.family == family and setting.model == HC]
        for setting in settings:
            ours, theirs = found[setting], found.get(plain(setting), {})
            gains[family] = {s: ours[s]["held_out_loss"] - theirs[s]["held_out_loss"] for s in ours if s in theirs}
    dense, mixture = (gains.get(family, {}) for family in FAMILIES)
    seeds = sorted(dense.keys() & mixture.keys())
    if not seeds:
        return ""
    apart = interval([mixture[seed] - dense[seed] for seed in seeds])
    rows = [[family, str(interval([gains[family][seed] for seed in seeds]))] for family in FAMILIES]
    return _markdown(["DHC×4 against plain", "held-out loss"], [*rows, ["OLMoE against Llama", str(apart)]])


def tuned(setting: Run) -> str:
    """What a learning rate was chosen for."""
    return "from scratch" if setting.start is None else "adapters" if setting.rank else "continued"


def starts(found: Finished, size: Scale) -> str:
    """Markdown: the held-out loss of continued models before their first step, on the rows of the curves."""
    rows = [
        [label(setting, size), f"{results[1]['curve'][0]['loss']:.5f}"]
        for setting, results in found.items()
        if is_usual(setting) and setting.steps == size.steps["continued"]
    ]
    return _markdown(["", "held-out loss before the first step"], rows)


def tuning(found: Finished) -> str:
    """Markdown: the plain models' held-out loss by learning rate."""
    rows = [
        [f"{setting.family}, {tuned(setting)}", f"{setting.learning_rate:g}", f"{results[1]['held_out_loss']:.4f}"]
        for setting, results in found.items()
        if setting.study != "base"
    ]
    return _markdown(["", "learning rate", "held-out loss"], rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def tables(size: Scale, folder: Path = CURVES) -> dict[str, str]:
    """Markdown of every table of the page, by its name, for the runs that are finished."""
    found = by_study(size, folder)
    made = {f"{size.name} tuning": tuning(finished(STUDIES["tuning"](size), folder))}
    for study in ("scratch", "continued"):
        for kind in dict.fromkeys((setting.family, setting.text) for setting in found[study]):
            part = {s: results for s, results in found[study].items() if (s.family, s.text) == kind}
            made[" ".join((size.name, study, *kind))] = table(part, size)
    dense = {setting: results for setting, results in found["scratch"].items() if setting.family == FAMILIES[0]}
    made[f"{size.name} contrasts"] = contrasts(dense)
    made[f"{size.name} starts"] = starts(found["continued"], size)
    made[f"{size.name} families"] = families(found["scratch"], size)
    return made


def by_study(size: Scale, folder: Path = CURVES) -> dict[str, Finished]:
    """What is finished from scratch, and continued; but for other learning rates than the best."""
    listed = [run for study in ("scratch", "continued", "variants") for run in STUDIES[study](size)]
    return {
        study: finished([run for run in listed if run.study == study], folder) for study in ("scratch", "continued")
    }


def render(text: str, folder: Path = CURVES) -> str:
    """The page with its tables made anew from the finished runs of every scale that has a mark for them."""
    for size in SCALES.values():
        for name, body in tables(size, folder).items():
            text = between_marks(text, name, body)
    return text


def plot_differences(found: Finished, size: Scale, title: str, path: Path) -> None:
    """Held-out loss against the plain model over tokens, with a band over seeds; and how streams separate."""
    pyplot = _pyplot()
    figure, (losses, cosines) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    settings = [setting for setting in found if setting.model != PLAIN and plain(setting) in found]
    for place, setting in enumerate(settings):
        results, reference = found[setting], found[plain(setting)]
        seeds = sorted(results.keys() & reference.keys())
        steps = [point["step"] for point in results[seeds[0]]["curve"]]
        tokens = [step * results[seeds[0]]["tokens_a_step"] / 1e6 for step in steps]
        style = {"color": pyplot.cm.tab10(place % 10), "linestyle": ("-", "--")[place // 10]}
        apart = [_apart(results[seed]["curve"], reference[seed]["curve"]) for seed in seeds]
        losses.plot(tokens, _over_seeds(statistics.mean, apart), label=label(setting, size), **style)
        ends = (_over_seeds(extreme, apart) for extreme in (min, max))
        losses.fill_between(tokens, *ends, color=style["color"], alpha=0.12, linewidth=0)
        if "hc/stream_cosine" in results[seeds[0]]["curve"][0]:
            alike = [[point["hc/stream_cosine"] for point in results[seed]["curve"]] for seed in seeds]
            different = [max(1 - value, 1e-7) for value in _over_seeds(statistics.mean, alike)]
            cosines.plot(tokens, different, label=label(setting, size), **style)
    losses.axhline(0, color="black", linewidth=0.8)
    losses.set(xlabel="million tokens", ylabel="held-out loss less the plain model's, nats a byte", title=title)
    cosines.set(xlabel="million tokens", ylabel="1 - cosine of two streams, last sub-layer", yscale="log")
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_losses(found: Finished, size: Scale, path: Path) -> None:
    """Held-out loss over tokens of the pair and of the longer plain run, a panel a study and family, a line a seed."""
    pyplot = _pyplot()
    panels: dict[str, list[Run]] = {}
    for setting in found:
        if setting.model in PAIR and is_usual(setting):
            panels.setdefault(f"{setting.family}, {setting.study}", []).append(setting)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), layout="constrained", squeeze=False)
    for ax, (title, settings) in zip(axes[0], panels.items(), strict=True):
        for place, setting in enumerate(settings):
            for each, result in enumerate(found[setting].values()):
                tokens = [point["step"] * result["tokens_a_step"] / 1e6 for point in result["curve"]]
                values = [point["loss"] for point in result["curve"]]
                style = {"color": pyplot.cm.tab10(place), "linewidth": 0.9}
                ax.plot(tokens, values, label=None if each else label(setting, size), **style)
        ax.set(xlabel="million tokens", ylabel="held-out loss, nats a byte", title=title)
        ax.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_matrices(found: Finished, size: Scale, path: Path) -> None:
    """What sub-layers read, before and after, of the settings whose runs hold it."""
    from hf_hyperconn.analysis.plots import plot_connections

    pyplot = _pyplot()
    drawn = [
        (label(setting, size), setting, result["matrices"])
        for setting, results in found.items()
        for result in results.values()
        if "matrices" in result and is_usual(setting) and not setting.noise and setting.hc_lr < 30
    ]
    figure, axes = pyplot.subplots(len(drawn), 2, figsize=(10, 4.2 * len(drawn)), layout="constrained", squeeze=False)
    for row, (name, setting, matrices) in zip(axes, drawn, strict=True):
        for ax, (when, matrix) in zip(row, matrices.items(), strict=True):
            plot_connections(torch.tensor(matrix), ax, title=f"{setting.study}, {setting.family} {name}: {when}")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _apart(curve: list[dict], reference: list[dict]) -> list[float]:
    return [point["loss"] - other["loss"] for point, other in zip(curve, reference, strict=True)]


def _over_seeds(reduce, curves: list[list[float]]) -> list[float]:
    return [reduce(values) for values in zip(*curves, strict=True)]


def main() -> None:
    DOCS.write_text(render(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    for size in SCALES.values():
        found = by_study(size)
        for study, of_study in found.items():
            usual = {s: results for s, results in of_study.items() if s.family == FAMILIES[0] and s.text == "python"}
            if usual:
                plot_differences(usual, size, study, FIGURES / f"results_{size.name}_{study}.png")
        everything = {**found["scratch"], **found["continued"]}
        if everything:
            plot_losses(everything, size, FIGURES / f"results_{size.name}_losses.png")
        if any("matrices" in result for results in everything.values() for result in results.values()):
            plot_matrices(everything, size, FIGURES / f"results_{size.name}_matrices.png")


if __name__ == "__main__":
    main()
