"""Pictures of a `Study`. Each `plot_` function draws on an Axes, a new one by default, and returns it.

Sub-layers are counted from 1, as in the paper's figures.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure

from ..models.sub_layers import SUB_LAYERS
from .arrangements import parallel, post_norm, sequential, two_hop
from .statistics import PERCENTILES, StreamStatistics
from .study import Study
from .unfolding import ConnectionMatrices, unfold

Panel = Callable[[Axes], object]

ATTENTION = "#1b7837"
# dark to light, so that they differ in grey too
COLORS = ("#08306b", "#d6604d", "#4daf4a", "#fdb863")
LINES = ("-", "--", "-.", ":")


def plot_connections(
    matrix: torch.Tensor,
    ax: Axes | None = None,
    *,
    limit: float | None = None,
    title: str = "",
    attention: Iterable[int] | None = None,
) -> Axes:
    """Draw an unfolded matrix C: what each sub-layer reads, by its writer.

    matrix: `[K, K + 1]`, or `[K + 1, K + 1]` with the output's row.
    limit: absolute value at the ends of the colors; by default the largest in the matrix.
    attention: the sub-layers to mark as such, counted from zero; by default every second one, from the first.

    Negative weights bear a stroke, to be told from positive ones in grey too.
    """
    ax, (rows, size) = _axes(ax), matrix.shape
    step = max(1, ceil((size - 1) / 8))
    possible = torch.ones(matrix.shape, dtype=torch.bool).tril()
    image = ax.imshow(
        matrix.double().masked_fill(~possible, float("nan")).numpy(),
        cmap="RdBu_r",
        norm=CenteredNorm(0, limit or float(matrix.abs().max()) or 1.0),
        interpolation="nearest",
    )
    readers, writers = range(0, size - 1, step), range(step, size, step)
    ax.set_xticks([0, *writers], ["emb", *map(str, writers)])
    ax.set_yticks(
        [*readers, *range(size - 1, rows)],
        [*(str(row + 1) for row in readers), "out"][: len(readers) + rows - size + 1],
    )
    ax.tick_params(axis="x", pad=10, length=0)
    marked = range(0, size - 1, 2) if attention is None else [*attention]
    mark: dict[str, Any] = {
        "transform": ax.get_xaxis_transform(),
        "color": ATTENTION,
        "linewidth": 3,
        "clip_on": False,
    }
    for sub_layer in marked:
        ax.plot([sub_layer + 1] * 2, [-0.03, 0], **mark)
    rows_of_negative, columns_of_negative = (matrix < 0).numpy().nonzero()
    ax.plot(columns_of_negative, rows_of_negative, "_", color="black", markersize=min(8, 160 / size))
    ax.set(xlim=(-0.5, size - 0.5), ylim=(rows - 0.5, -0.5))
    green = " (green: attention)" if marked else ""
    ax.set(xlabel=f"written by sub-layer{green}", ylabel="read by sub-layer", title=title)
    ax.figure.colorbar(image, ax=ax, shrink=0.8)
    return ax


def plot_similarity(percentiles: torch.Tensor, ax: Axes | None = None, *, label: str = "", index: int = 0) -> Axes:
    """Draw the cosine similarity of neighboring sub-layers' inputs; call again to add a model.

    percentiles: `LayerSimilarity.result`.
    index: of the model in the picture, for its color and line.
    """
    ax, x = _axes(ax), range(2, len(percentiles) + 2)
    low, median, high = percentiles.T.numpy()
    ax.fill_between(x, low, high, color=COLORS[index % 4], alpha=0.2, linewidth=0)
    ax.plot(x, median, LINES[index % 4], color=COLORS[index % 4], label=label or None)
    ax.set(xlabel="sub-layer", ylabel="cosine similarity with the input before\n(median, 5th to 95th percentile)")
    ax.set_title("How much the input changes from sub-layer to sub-layer")
    if label:
        ax.legend()
    _widen(ax)
    return ax


def plot_streams(streams: StreamStatistics, ax: Axes | None = None) -> Axes:
    """Draw the cosine similarity of the streams by sub-layer, and the gain of mixing on an axis of its own.

    A single stream has a gain alone.
    """
    ax, x = _axes(ax), range(1, len(streams.similarity) + 1)
    ax.set(xlabel="sub-layer")
    if streams.similarity.isnan().all():
        ax.set_yticks([])
    else:
        ax.plot(x, streams.similarity.numpy(), color=COLORS[0], label="similarity of two streams")
        ax.set(ylabel="cosine similarity")
        _widen(ax)
    gain = ax.twinx()
    gain.plot(x, streams.gain.numpy(), LINES[1], color=COLORS[1], label="gain of mixing (right)")
    gain.set(ylabel="largest row sum of ∏ A_r", ylim=(0, 1.05 * float(streams.gain.max())))
    ax.legend(handles=[*ax.lines, *gain.lines], loc="lower left")
    ax.set_title("Whether the streams differ")
    return ax


def plot_shares(shares: torch.Tensor, ax: Axes | None = None, *, title: str = "") -> Axes:
    """Draw the shares of the streams `[K, N]`, stacked."""
    ax, below = _axes(ax), torch.zeros(len(shares), dtype=shares.dtype)
    x = range(1, len(shares) + 1)
    for stream, share in enumerate(shares.T):
        grey = 0.25 + 0.6 * stream / max(shares.shape[1] - 1, 1)
        ax.bar(x, share.numpy(), bottom=below.numpy(), width=1, color=str(grey), label=f"stream {stream + 1}")
        below = below + share
    ax.set(xlabel="sub-layer", ylabel="share", ylim=(0, 1), title=title)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, frameon=False, columnspacing=1)
    return ax


def plot_coefficients(percentiles: torch.Tensor, ax: Axes | None = None, *, title: str = "") -> Axes:
    """Draw percentiles of one kind of coefficients over tokens and streams, `[K, 5]`, as boxes with whiskers."""
    ax = _axes(ax)
    names = dict(zip(("whislo", "q1", "med", "q3", "whishi"), range(len(PERCENTILES)), strict=True))
    boxes = [{name: float(row[i]) for name, i in names.items()} for row in percentiles]
    median = {"color": COLORS[1], "linewidth": 2}
    ax.bxp(boxes, positions=range(1, len(boxes) + 1), widths=0.7, showfliers=False, medianprops=median)
    step = max(1, ceil(len(boxes) / 8))
    ax.set_xticks(range(1, len(boxes) + 1, step), map(str, range(1, len(boxes) + 1, step)))
    ax.set(xlabel="sub-layer", title=title)
    _widen(ax)
    return ax


def connections_figure(matrices: ConnectionMatrices) -> Figure:
    """Draw C^(0) with its spread over tokens, and C^(i) of every stream, in common colors."""
    return _grid(_connections(matrices), columns=3)


def reference_figure(layers: int = 6) -> Figure:
    """Draw the matrices of known architectures: Pre-Norm, Post-Norm, parallel blocks, two hops."""
    # two vectors of mean zero and equal size, of which neither tells of the other
    of_equal_size = post_norm(torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([1.0, -1.0, 1.0, -1.0]))
    panels: list[Panel] = []
    for title, matrices, readout in (
        ("Pre-Norm", lambda k: sequential(1, k), "mean"),
        ("Post-Norm (x and T(x) of equal size)", lambda k: of_equal_size, "mean"),
        ("Parallel blocks", lambda k: parallel(2, k), "sum"),
        ("Two hops", lambda k: two_hop(2, k), "mean"),
    ):
        matrix = unfold(map(matrices, range(len(SUB_LAYERS) * layers)), readout).inputs
        # a norm follows: only the direction of a row counts
        shown = matrix / matrix.abs().amax(-1, keepdim=True)
        panels.append(partial(plot_connections, shown, limit=1.0, title=title))
    return _grid(panels, columns=2)


def similarity_figure(percentiles: dict[str, torch.Tensor]) -> Figure:
    """Draw the similarity of neighboring inputs of several models, by name."""
    figure = plt.figure(layout="constrained")
    _similarity(percentiles, figure.add_subplot())
    return figure


def streams_figure(streams: StreamStatistics) -> Figure:
    """Draw the similarity of the streams and the gain of mixing, and which streams are read and written."""
    return _grid(_streams(streams), columns=3)


def coefficients_figure(coefficients: dict[str, torch.Tensor]) -> Figure:
    """Draw the distributions of coefficients by kind, `CoefficientMeter.result`."""
    return _grid(_coefficients(coefficients), columns=2)


def sheet_figure(found: Study, similarity: dict[str, torch.Tensor]) -> Figure:
    """Draw the matrices, similarity, streams and coefficients on one sheet.

    similarity: of neighboring inputs of several models, by name.
    """
    panels: list[Panel] = [*_connections(found.matrices), partial(_similarity, similarity)]
    panels += [*_streams(found.streams), *_coefficients(found.coefficients)]
    return _grid(panels, columns=3)


def _connections(matrices: ConnectionMatrices) -> list[Panel]:
    titled = [("What each sub-layer reads, C⁽⁰⁾", matrices.inputs)]
    if matrices.tokens:
        titled.append(("Its standard deviation over tokens", matrices.inputs_deviation))
    titled += [(f"In stream {i + 1}", stream) for i, stream in enumerate(matrices.streams)]
    limit = max(float(matrix.abs().max()) for _, matrix in titled)
    return [
        partial(plot_connections, matrix, limit=limit, title=title, attention=matrices.attention)
        for title, matrix in titled
    ]


def _similarity(percentiles: dict[str, torch.Tensor], ax: Axes) -> None:
    for index, (name, of_model) in enumerate(percentiles.items()):
        plot_similarity(of_model, ax, label=name, index=index)


def _streams(streams: StreamStatistics) -> list[Panel]:
    return [
        partial(plot_streams, streams),
        partial(plot_shares, streams.read_share, title="Which streams are read"),
        partial(plot_shares, streams.write_share, title="Which streams are written"),
    ]


def _coefficients(coefficients: dict[str, torch.Tensor]) -> list[Panel]:
    titles = {
        "read": "Reads, A_m",
        "keep": "What a stream keeps, diagonal of A_r",
        "mix": "What it takes from others, rest of A_r",
        "write": "Writes, b",
    }
    return [partial(plot_coefficients, values, title=titles[kind]) for kind, values in coefficients.items()]


def _axes(ax: Axes | None) -> Axes:
    return plt.figure(layout="constrained").add_subplot() if ax is None else ax


def _widen(ax: Axes, height: float = 0.01) -> None:
    """Show at least `height` of the values, so that rounding is not blown up to a curve."""
    low, high = ax.get_ylim()
    if high - low < height:
        ax.set_ylim((low + high - height) / 2, (low + high + height) / 2)


def _grid(panels: Sequence[Panel], columns: int) -> Figure:
    rows = ceil(len(panels) / columns)
    figure = plt.figure(figsize=(5 * min(columns, len(panels)), 4.2 * rows), layout="constrained")
    for place, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(rows, columns, place))
    return figure
