"""Pictures: what they show is what was found, and can be read."""

import pytest
import torch
from matplotlib import pyplot as plt

from hf_hyperconn.analysis import plots
from hf_hyperconn.analysis.statistics import StreamStatistics
from hf_hyperconn.analysis.study import study

from .test_analysis import randomised


@pytest.fixture(autouse=True)
def closed():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def found():
    ids = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))
    return study(randomised(hc_mult=3), [ids])


def test_every_function_takes_and_returns_an_axes(found):
    drawn = {
        plots.plot_connections: (found.matrices.inputs,),
        plots.plot_similarity: (found.similarity,),
        plots.plot_streams: (found.streams,),
        plots.plot_shares: (found.streams.read_share,),
        plots.plot_coefficients: (found.coefficients["read"],),
    }
    for function, arguments in drawn.items():
        ax = plt.figure().add_subplot()
        assert function(*arguments, ax) is ax
        assert ax.has_data()
        assert function(*arguments).has_data()


def test_a_matrix_is_shown_as_it_is(found):
    """Values, blank above the diagonal, colors from lowest to highest, marks of attention and negative weights."""
    ax = plots.plot_connections(found.matrices.inputs)
    (image,) = ax.images
    shown = torch.as_tensor(image.get_array().filled(torch.nan))
    lower = torch.ones_like(shown, dtype=torch.bool).tril()
    assert torch.equal(shown[lower], found.matrices.inputs[lower])
    assert shown[~lower].isnan().all()
    assert (image.norm.vmin, image.norm.vmax) == (shown[lower].min(), shown[lower].max())
    strokes, *attention = sorted(ax.lines, key=lambda line: line.get_marker() != "_")
    assert [line.get_xdata()[0] for line in attention] == [1, 3, 5]
    assert len(strokes.get_xdata()) == int((found.matrices.inputs < 0).sum()) > 0
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "2", "3", "4", "5", "6", "out"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["emb", "1", "2", "3", "4", "5", "6"]


def test_rounding_is_not_blown_up():
    """Of a fresh conversion, whose streams are equal: no axis shows the last bits of 1."""
    ones = 1 + 1e-9 * torch.rand(8, 5, dtype=torch.float64)
    shares = torch.full((8, 4), 0.25)
    drawn = [plots.plot_streams(StreamStatistics(ones[:, 0], shares, shares, ones[:, 1]))]
    drawn += [plots.plot_similarity(ones[:, :3]), plots.plot_coefficients(ones[:, None])]
    for ax in drawn:
        low, high = ax.get_ylim()
        assert low < ones.min() <= ones.max() < high
        assert high - low == pytest.approx(0.01)


def test_one_stream_has_no_similarity():
    """Nor two streams' curve in the legend."""
    one = torch.ones(4, 1)
    ax = plots.plot_streams(StreamStatistics(torch.full((4,), torch.nan), one, one, torch.ones(4)))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["gain of mixing (right)"]
    assert list(ax.get_yticks()) == []


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4, 8])
def test_labels_of_32_layers_neither_overlap_nor_stand_out(n):
    shares, values = torch.rand(64, n), torch.rand(64)
    streams = StreamStatistics(values, shares / shares.sum(1, keepdim=True), shares / n, 1 + values)
    figure = plots.streams_figure(streams)
    for ax in figure.axes:
        labels = [ax.title, ax.xaxis.label, ax.yaxis.label]
        figure.canvas.draw()
        extents = [label.get_window_extent() for label in labels if label.get_text()]
        for extent in extents:
            assert figure.bbox.x0 <= extent.x0 <= extent.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= extent.y0 <= extent.y1 <= figure.bbox.y1
        assert ax.yaxis.label.get_window_extent().height < ax.bbox.height
        if legend := ax.get_legend():
            assert not legend.get_window_extent().overlaps(ax.xaxis.label.get_window_extent())


def test_panels_share_their_colors(found):
    figure = plots.connections_figure(found.matrices)
    panels = [ax for ax in figure.axes if ax.get_title()]
    assert len({(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for ax in panels}) == 1
    assert len(panels) == 2 + 3 == len(figure.axes) - 1


def test_a_difference_diverges_from_zero(found):
    figure = plots.changes_figure(found.matrices.inputs, found.matrices.inputs + 1)
    before, after, change = (ax.images[0] for ax in figure.axes if ax.get_title())
    assert (before.norm.vmin, before.norm.vmax) == (after.norm.vmin, after.norm.vmax)
    assert (change.norm.vmin, change.norm.vcenter, change.norm.vmax) == pytest.approx((-1, 0, 1))


def test_known_architectures():
    figure = plots.reference_figure(layers=2)
    shown = {ax.get_title(): ax.images[0].get_array().filled(0) for ax in figure.axes if ax.get_title()}
    assert shown["Pre-Norm"].tolist() == torch.ones(5, 5).tril().tolist()
    post_norm = next(values for title, values in shown.items() if title.startswith("Post-Norm"))
    assert post_norm[-1].tolist() == pytest.approx([0.5**1.5, 0.5**1.5, 0.5, 0.5**0.5, 1])
    assert shown["Two hops"][-1].tolist() == [1, 0, 1, 0, 1]
    assert (shown["Parallel blocks"][3] == shown["Parallel blocks"][2]).all()
