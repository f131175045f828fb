"""Plots of the finished runs."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot

from hf_hyperconn.analysis.plots import plot_connections

from .report import Finished, has_streams, label, only, plain
from .runs import FAMILIES, PAIR, PLAIN, Run, Scale, is_drawn, is_usual


def draw(found: Mapping[str, Finished], size: Scale, folder: Path) -> None:
    """Every figure of docs/results_small.md, of what is finished by study."""
    for study, of_study in found.items():
        if usual := only(of_study, FAMILIES[0]):
            plot_differences(usual, size, study, folder / f"results_{size.name}_{study}.png")
    everything = {**found["scratch"], **found["continued"]}
    plot_losses(everything, size, folder / f"results_{size.name}_losses.png")
    plot_matrices(everything, size, folder / f"results_{size.name}_matrices.png")


def plot_differences(found: Finished, size: Scale, title: str, path: Path) -> None:
    """Held-out loss against the plain model over tokens, from the lowest seed to the highest; how streams separate."""
    figure, (losses, cosines) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    settings = [setting for setting in found if setting.model != PLAIN and plain(setting) in found]
    for place, setting in enumerate(settings):
        results, reference = found[setting], found[plain(setting)]
        seeds = sorted(results.keys() & reference.keys())
        if not seeds:
            continue
        steps = [point["step"] for point in results[seeds[0]]["curve"]]
        tokens = [step * results[seeds[0]]["tokens_a_step"] / 1e6 for step in steps]
        style = {"color": pyplot.cm.tab10(place % 10), "linestyle": ("-", "--")[place // 10]}
        apart = [_apart(results[seed]["curve"], reference[seed]["curve"]) for seed in seeds]
        losses.plot(tokens, _over_seeds(statistics.mean, apart), label=label(setting, size), **style)
        ends = (_over_seeds(extreme, apart) for extreme in (min, max))
        losses.fill_between(tokens, *ends, color=style["color"], alpha=0.12, linewidth=0)
        if has_streams(setting):
            alike = [[point["hc/stream_cosine"] for point in results[seed]["curve"]] for seed in seeds]
            different = [max(1 - value, 1e-7) for value in _over_seeds(statistics.mean, alike)]
            cosines.plot(tokens, different, label=label(setting, size), **style)
    losses.axhline(0, color="black", linewidth=0.8)
    losses.set(xlabel="million tokens", ylabel="held-out loss less the plain model's, nats a byte")
    losses.set(title=f"{title}: mean, and from the lowest seed to the highest")
    cosines.set(xlabel="million tokens", ylabel="1 - cosine of two streams, last sub-layer", yscale="log")
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_losses(found: Finished, size: Scale, path: Path) -> None:
    """Held-out loss over tokens of the pair and of the longer plain run, a panel a study and family, a line a seed.

    From scratch the second half of each run: what comes before is too steep for differences to be seen.
    """
    panels: dict[str, list[Run]] = {}
    for setting in found:
        if setting.model in PAIR and is_usual(setting):
            panels.setdefault(f"{setting.family}, {setting.study}", []).append(setting)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), layout="constrained", squeeze=False)
    for ax, (title, settings) in zip(axes[0], panels.items(), strict=True):
        for place, setting in enumerate(settings):
            for each, result in enumerate(found[setting].values()):
                first = setting.steps / 2 if setting.study == "scratch" else 0
                points = [point for point in result["curve"] if point["step"] >= first]
                tokens = [point["step"] * result["tokens_a_step"] / 1e6 for point in points]
                values = [point["loss"] for point in points]
                style = {"color": pyplot.cm.tab10(place), "linewidth": 0.9}
                ax.plot(tokens, values, label=None if each else label(setting, size), **style)
        ax.set(xlabel="million tokens", ylabel="held-out loss, nats a byte", title=title)
        ax.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_matrices(found: Finished, size: Scale, path: Path) -> None:
    """What sub-layers read, before and after, of the settings whose runs hold it."""
    drawn = [
        (label(setting, size), setting, result["matrices"])
        for setting, results in found.items()
        for result in results.values()
        if is_drawn(replace(setting, seed=1)) and "matrices" in result
    ]
    if not drawn:
        return
    figure, axes = pyplot.subplots(len(drawn), 2, figsize=(10, 4.2 * len(drawn)), layout="constrained", squeeze=False)
    for row, (name, setting, matrices) in zip(axes, drawn, strict=True):
        for ax, (when, matrix) in zip(row, matrices.items(), strict=True):
            plot_connections(torch.tensor(matrix), ax, title=f"{setting.study}, {name}\n{when}")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _apart(curve: list[dict], reference: list[dict]) -> list[float]:
    return [point["loss"] - other["loss"] for point, other in zip(curve, reference, strict=True)]


def _over_seeds(reduce: Callable[[Iterable[float]], float], curves: list[list[float]]) -> list[float]:
    return [reduce(values) for values in zip(*curves, strict=True)]
