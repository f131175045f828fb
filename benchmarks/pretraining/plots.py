"""Figures of the finished runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.drawing import draw_curves, draw_forest, panels, save
from hf_hyperconn.analysis.plots import changes_figure

from .report import Finished, difference, label, only, plain
from .runs import FAMILIES, HC, HC_LR, PAIR, PLAIN, Run, Scale, is_drawn, is_usual

ROW = 0.32  # inches
TITLES = {"scratch": "from scratch", "continued": "continued"}


def draw(found: Mapping[str, Finished], size: Scale, folder: Path) -> None:
    """Every figure of docs/results_small.md, of what is finished by study."""
    for study, of_study in found.items():
        if usual := only(of_study, FAMILIES[0]):
            plot_differences(usual, size, study, folder / f"results_{size.name}_{study}.png")
    everything = {**found["scratch"], **found["continued"]}
    plot_losses(everything, size, folder / f"results_{size.name}_losses.png")
    plot_matrices(everything, size, folder)


def plot_differences(found: Finished, size: Scale, study: str, path: Path) -> None:
    """Draw each setting's final loss against the plain model's after the same tokens, with its interval."""
    rows = {}
    for setting, results in found.items():
        apart = None if setting.model == PLAIN else difference(results, found.get(plain(setting), {}))
        if apart is not None:
            rows[label(setting, size)] = (apart.mean, apart.half_width)
    rows = dict(sorted(rows.items(), key=lambda row: row[1][0]))
    figure, (ax,) = panels(1, width=9, height=1.3 + ROW * len(rows))
    draw_forest(ax, rows, "difference in nats a byte; left is better")
    figure.suptitle(f"Held-out loss against the plain model, six layers {TITLES[study]}: mean and 95 % interval")
    save(figure, path)


def plot_losses(found: Finished, size: Scale, path: Path) -> None:
    """Draw held-out loss over tokens of the pair and of the longer plain run, a panel a study and family.

    From scratch the second half of each run: what comes before is too steep for differences to be seen.
    """
    drawn: dict[str, list[Run]] = {}
    for setting in found:
        compared = setting.model == PLAIN or (has_usual_rate(setting) and not setting.noise)
        if setting.model in PAIR and is_usual(setting) and compared:
            drawn.setdefault(f"{setting.family}, {TITLES[setting.study]}", []).append(setting)
    figure, axes = panels(len(drawn))
    for ax, (title, settings) in zip(axes, drawn.items(), strict=True):
        curves = {}
        for setting in sorted(settings, key=lambda setting: setting.steps):
            first = setting.steps / 2 if setting.study == "scratch" else 0
            name = setting.model if setting.model == HC else label(setting, size)
            curves[name] = [
                [
                    (point["step"] * result["tokens_a_step"] / 1e6, point["loss"])
                    for point in result["curve"]
                    if point["step"] >= first
                ]
                for result in found[setting].values()
            ]
        draw_curves(ax, curves)
        ax.set(xlabel="million tokens", ylabel="held-out loss, nats a byte", title=title)
    save(figure, path)


def plot_matrices(found: Finished, size: Scale, folder: Path) -> None:
    """Draw the weights with which sub-layers read: before, after and their difference, a figure a study."""
    for setting, results in only(found, FAMILIES[0]).items():
        for result in results.values():
            if is_drawn(replace(setting, seed=1)) and "matrices" in result and has_usual_rate(setting):
                figure = changes_figure(*(torch.tensor(matrix) for matrix in result["matrices"].values()))
                figure.suptitle(f"{label(setting, size)}, {TITLES[setting.study]}")
                save(figure, folder / f"results_{size.name}_matrices_{setting.study}.png")


def has_usual_rate(setting: Run) -> bool:
    """Return whether connections have the recipe's rate when continued, and from scratch that of the other weights."""
    return setting.hc_lr == (HC_LR if setting.study == "continued" else 1)
