"""The look of every figure of the benchmarks: colors, lines with their seeds' band, labels at the lines, files."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's, which color-blind readers tell apart
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_hyperconn",
}
LINE_HEIGHT = 0.055  # of a label, as a part of the axis


def panels(rows: int, width: float = 6.4, height: float = 4.2) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with panels one below the other, each of that size in inches.

    Side by side, their letters would be too small on a page.
    """
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, 1, figsize=(width, height * rows), layout="constrained", squeeze=False)
    return figure, axes[:, 0]


def draw_curves(ax: Axes, curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]]) -> None:
    """Draw a line for each name, the mean over seeds, in a band from the lowest seed to the highest.

    curves: points (x, y) of each seed, by name.
    """
    ends = {}
    for name, color in zip(curves, COLORS, strict=False):
        x = [point[0] for point in curves[name][0]]
        values = list(zip(*([point[1] for point in seed] for seed in curves[name]), strict=True))
        mean = [statistics.mean(of_seeds) for of_seeds in values]
        ax.plot(x, mean, color=color, linewidth=1.8)
        ax.fill_between(x, [*map(min, values)], [*map(max, values)], color=color, alpha=0.15, linewidth=0)
        ends[name] = (x[-1], mean[-1], color)
    _label_ends(ax, ends)


def draw_forest(ax: Axes, rows: Mapping[str, tuple[float, float | None]], xlabel: str) -> None:
    """Draw a point with its interval for each name, from the top; a single seed has no interval.

    rows: mean and half of the interval's width, by name.
    """
    names = list(rows)
    for place, (mean, half_width) in enumerate(rows.values()):
        ax.errorbar(mean, place, xerr=half_width, fmt="o", color=COLORS[1], capsize=3, markersize=5)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, and as SVG beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(STYLE):
        figure.savefig(path.with_suffix(".png"), dpi=130)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    pyplot.close(figure)


def _label_ends(ax: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each name beside its line's end, moved up where labels would touch."""
    low, high = ax.get_ylim()
    lowest = low
    for name, (x, y, color) in sorted(ends.items(), key=lambda item: item[1][1]):
        lowest = max(y, lowest)
        ax.annotate(
            name,
            (x, y),
            (1.02, (lowest - low) / (high - low)),
            textcoords="axes fraction",
            color=color,
            va="center",
            annotation_clip=False,
        )
        lowest += LINE_HEIGHT * (high - low)
