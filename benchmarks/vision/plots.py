"""The figure of the vision study: what sub-layers read of those before them, after training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")

from matplotlib import pyplot

from hf_hyperconn.analysis.plots import plot_connections


def draw(matrices: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Unfolded matrices, by title, side by side."""
    columns = min(len(matrices), 3)
    rows = -(-len(matrices) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.2 * columns, 4.4 * rows), layout="constrained", squeeze=False
    )
    for ax in axes.flat[len(matrices) :]:
        ax.remove()
    for ax, (title, matrix) in zip(axes.flat, matrices.items(), strict=False):
        plot_connections(torch.tensor(matrix), ax, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
