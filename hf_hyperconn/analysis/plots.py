"""Pictures of a `Study`. Each `plot_` function draws on an Axes, a new one by default, and returns it.

Sub-layers are counted from 1, as in the paper's figures.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure

from ..models.sub_layers import SUB_LAYERS
from .arrangements import parallel, post_norm, sequential, two_hop
from .statistics import PERCENTILES, StreamStatistics
from .study import Study
from .unfolding import ConnectionMatrices, unfold

Panel = Callable[[Axes], object]

ATTENTION = "#1b7837"
# dark to light, so that they differ in gray too
COLORS = ("#08306b", "#d6604d", "#4daf4a", "#fdb863")
LINES = ("-", "--", "-.", ":")


def plot_connections(
    matrix: torch.Tensor,
    ax: Axes | None = None,
    *,
    limits: tuple[float, float] | None = None,
    title: str = "",
    attention: Iterable[int] | None = None,
    is_difference: bool = False,
    colorbar: bool = True,
) -> Axes:
    """Draw an unfolded matrix C: the weight of each writer in a sub-layer's input.

    matrix: `[K, K + 1]`, or `[K + 1, K + 1]` with the output's row.
    limits: values at the ends of the colors; by default the matrix's extremes and zero.
    attention: sub-layers to mark as attention, from zero; by default every second one, from the first.
    is_difference: whether the matrix is a difference of two, so that colors diverge from zero.
    colorbar: whether to add a bar of the colors.

    A stroke marks negative weights.
    """
    ax, (rows, size) = _axes(ax), matrix.shape
    step = max(1, ceil((size - 1) / 8))
    possible = torch.ones(matrix.shape, dtype=torch.bool).tril()
    low, high = limits or _limits([matrix])
    image = ax.imshow(
        matrix.double().masked_fill(~possible, float("nan")).numpy(),
        cmap="RdBu_r" if is_difference else "YlGnBu",
        norm=CenteredNorm(0, max(-low, high)) if is_difference else Normalize(low, high),
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
    if colorbar:
        ax.figure.colorbar(image, ax=ax, shrink=0.8)
    return ax


def plot_similarity(percentiles: torch.Tensor, ax: Axes | None = None, *, label: str = "", index: int = 0) -> Axes:
    """Draw the cosine similarity of neighboring sub-layers' inputs; call again to add a model.

    percentiles: `LayerSimilarity.result`.
    index: number of the model in the picture, which chooses its color and line.
    """
    ax, x = _axes(ax), range(2, len(percentiles) + 2)
    low, median, high = percentiles.T.numpy()
    ax.fill_between(x, low, high, color=COLORS[index % 4], alpha=0.2, linewidth=0)
    ax.plot(x, median, LINES[index % 4], color=COLORS[index % 4], label=label or None)
    ax.set(xlabel="sub-layer", ylabel="cosine similarity with the input before\n(median, 5th to 95th percentile)")
    ax.set_title("Similarity of neighboring sub-layers' inputs")
    if label:
        _legend_below(ax, columns=1)
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
    _legend_below(ax, handles=[*ax.lines, *gain.lines], columns=2)
    ax.set_title("Similarity of the streams, and gain of mixing")
    return ax


def plot_shares(shares: torch.Tensor, ax: Axes | None = None, *, title: str = "") -> Axes:
    """Draw the shares of the streams `[K, N]`, stacked."""
    ax, below = _axes(ax), torch.zeros(len(shares), dtype=shares.dtype)
    x = range(1, len(shares) + 1)
    for stream, (share, color) in enumerate(zip(shares.T, _stream_colors(shares.shape[1]), strict=True)):
        ax.bar(x, share.numpy(), bottom=below.numpy(), width=1, color=color, label=f"stream {stream + 1}")
        below = below + share
    ax.set(xlabel="sub-layer", ylabel="share", ylim=(0, 1), title=title)
    _legend_below(ax)
    return ax


def plot_coefficients(percentiles: torch.Tensor, ax: Axes | None = None, *, title: str = "") -> Axes:
    """Draw percentiles of one kind of coefficients over tokens, `[K, N, 5]`, a color a stream.

    A dot is the median, a thick bar the middle half, a thin bar the 5th to the 95th percentile.
    """
    ax, (sub_layers, streams, _) = _axes(ax), percentiles.shape
    place = torch.arange(1, sub_layers + 1)
    lowest, low, median, high, highest = map(PERCENTILES.index, (5, 25, 50, 75, 95))
    for stream, color in enumerate(_stream_colors(streams)):
        x, values = place + 0.8 * ((stream + 0.5) / streams - 0.5), percentiles[:, stream].T
        ax.vlines(x, values[lowest], values[highest], color=color, linewidth=0.8)
        ax.vlines(x, values[low], values[high], color=color, linewidth=2.5)
        ax.plot(x, values[median], ".", color=color, label=f"stream {stream + 1}")
    ax.set(xlabel="sub-layer", title=title)
    _legend_below(ax)
    _widen(ax)
    return ax


def connections_figure(matrices: ConnectionMatrices) -> Figure:
    """Draw C^(0) with its spread over tokens, and C^(i) of every stream, in common colors."""
    return _grid(_connections(matrices), columns=2)


def changes_figure(before: torch.Tensor, after: torch.Tensor) -> Figure:
    """Draw an unfolded matrix before and after training, in common colors, and the difference."""
    plot = partial(plot_connections, limits=_limits([before, after]), colorbar=False)
    change = partial(plot_connections, after - before, title="Difference", is_difference=True)
    return _grid([partial(plot, before, title="Before"), partial(plot, after, title="After"), change], columns=2)


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
        panels.append(partial(plot_connections, shown, limits=(0.0, 1.0), title=title, colorbar=False))
    return _grid(panels, columns=2)


def similarity_figure(percentiles: dict[str, torch.Tensor]) -> Figure:
    """Draw the similarity of neighboring inputs of several models, by name."""
    figure = plt.figure(layout="constrained")
    _similarity(percentiles, figure.add_subplot())
    return figure


def streams_figure(streams: StreamStatistics) -> Figure:
    """Draw the similarity of the streams and the gain of mixing, and which streams are read and written."""
    return _grid(_streams(streams), columns=2)


def coefficients_figure(coefficients: dict[str, torch.Tensor]) -> Figure:
    """Draw the distributions of coefficients by kind, `CoefficientMeter.result`."""
    return _grid(_coefficients(coefficients), columns=2)


def sheet_figure(study: Study, similarity: dict[str, torch.Tensor]) -> Figure:
    """Draw the matrices, similarity, streams and coefficients on one sheet.

    similarity: similarity of neighboring inputs, by model.
    """
    panels: list[Panel] = [*_connections(study.matrices), partial(_similarity, similarity)]
    panels += [*_streams(study.streams), *_coefficients(study.coefficients)]
    return _grid(panels, columns=3)


def _connections(matrices: ConnectionMatrices) -> list[Panel]:
    titled = [("What each sub-layer reads, C⁽⁰⁾", matrices.inputs)]
    if matrices.tokens:
        titled.append(("Its standard deviation over tokens", matrices.inputs_deviation))
    names = "¹²³⁴⁵⁶⁷⁸⁹"
    titled += [
        (f"What stream {i + 1} holds" + f", C⁽{names[i]}⁾" * (i < len(names)), stream)
        for i, stream in enumerate(matrices.streams)
    ]
    limits = _limits([matrix for _, matrix in titled])
    return [
        partial(plot_connections, matrix, limits=limits, title=title, attention=matrices.attention, colorbar=False)
        for title, matrix in titled
    ]


def _similarity(percentiles: dict[str, torch.Tensor], ax: Axes) -> None:
    for index, (name, of_model) in enumerate(percentiles.items()):
        plot_similarity(of_model, ax, label=name, index=index)


def _streams(streams: StreamStatistics) -> list[Panel]:
    return [
        partial(plot_streams, streams),
        partial(plot_shares, streams.read_share, title="Shares of the streams in reads"),
        partial(plot_shares, streams.write_share, title="Shares of the streams in writes"),
    ]


def _coefficients(coefficients: dict[str, torch.Tensor]) -> list[Panel]:
    titles = {
        "read": "Reads, A_m",
        "keep": "Kept by a stream, diagonal of A_r",
        "mix": "Taken from other streams, rest of A_r",
        "write": "Writes, b",
    }
    return [partial(plot_coefficients, values, title=titles[kind]) for kind, values in coefficients.items()]


def _axes(ax: Axes | None) -> Axes:
    return plt.figure(layout="constrained").add_subplot() if ax is None else ax


def _widen(ax: Axes, height: float = 0.01) -> None:
    """Show at least a range of `height`, so that rounding does not look like a curve."""
    low, high = ax.get_ylim()
    if high - low < height:
        ax.set_ylim((low + high - height) / 2, (low + high + height) / 2)


def _limits(matrices: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return the ends of the colors of some matrices: their lowest and highest value, and zero."""
    low = min(0.0, *(float(matrix.min()) for matrix in matrices))
    high = max(0.0, *(float(matrix.max()) for matrix in matrices))
    return low, high if high > low else 1.0


def _stream_colors(streams: int) -> Any:
    """Return a color a stream, dark to light, `[N, 4]`."""
    return colormaps["viridis"](torch.linspace(0, 0.92, streams).numpy())


def _legend_below(ax: Axes, *, columns: int = 4, **what: Any) -> None:
    """Put the legend below the axis, where it covers no data."""
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
    ax.legend(**place, ncols=columns, frameon=False, columnspacing=1, **what)


def _grid(panels: Sequence[Panel], columns: int) -> Figure:
    """Draw panels in rows; matrices without a colorbar share one."""
    rows = ceil(len(panels) / columns)
    figure = plt.figure(figsize=(5 * min(columns, len(panels)), 4.2 * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place) for place in range(1, len(panels) + 1)]
    for ax, draw in zip(axes, panels, strict=True):
        draw(ax)
    if shared := [ax for ax in axes if ax.images and ax.images[0].colorbar is None]:
        figure.colorbar(shared[0].images[0], ax=shared, shrink=0.6)
    return figure
