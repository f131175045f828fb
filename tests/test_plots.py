"""Pictures: what they show is what was found, and where the command puts them."""

import json
import sys

import pytest
import torch
from matplotlib import pyplot as plt

from hf_hyperconn import convert_model
from hf_hyperconn.analysis import plots
from hf_hyperconn.analysis.study import study
from hf_hyperconn.analysis.unfolding import unfold_static
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.demo import byte_tokenizer

from .conftest import hc_llama

KINDS = ("connections", "similarity", "streams", "coefficients")


@pytest.fixture(autouse=True)
def closed():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    model = hc_llama(hc_mult=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_hc." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return study(model, [torch.randint(3, 96, (2, 24))])


@pytest.fixture
def folder(tmp_path):
    hc_llama(vocab_size=256).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("def read(self):\n    return self.value\n" * 20)
    return tmp_path / "model"


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
    """Values, blank above the diagonal, colours around zero, attention and negative weights marked."""
    ax = plots.plot_connections(found.matrices.inputs)
    (image,) = ax.images
    shown = torch.as_tensor(image.get_array().filled(torch.nan))
    lower = torch.ones_like(shown, dtype=torch.bool).tril()
    assert torch.equal(shown[lower], found.matrices.inputs[lower])
    assert shown[~lower].isnan().all()
    assert image.norm.vcenter == 0
    strokes, *attention = sorted(ax.lines, key=lambda line: line.get_marker() != "_")
    assert [line.get_xdata()[0] for line in attention] == [1, 3, 5]
    assert len(strokes.get_xdata()) == int((found.matrices.inputs < 0).sum()) > 0
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "2", "3", "4", "5", "6", "out"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["emb", "1", "2", "3", "4", "5", "6"]


def test_panels_share_their_colours(found):
    figure = plots.connections_figure(found.matrices)
    limits = {ax.images[0].norm.halfrange for ax in figure.axes if ax.images and ax.get_title()}
    assert len(limits) == 1
    assert sum(bool(ax.get_title()) for ax in figure.axes) == 2 + 3


def test_known_architectures():
    figure = plots.reference_figure(layers=2)
    shown = {ax.get_title(): ax.images[0].get_array().filled(0) for ax in figure.axes if ax.get_title()}
    assert shown["Pre-Norm"].tolist() == torch.ones(5, 5).tril().tolist()
    post_norm = next(values for title, values in shown.items() if title.startswith("Post-Norm"))
    assert post_norm[-1].tolist() == pytest.approx([0.5**1.5, 0.5**1.5, 0.5, 0.5**0.5, 1])
    assert shown["Two hops"][-1].tolist() == [1, 0, 1, 0, 1]
    assert (shown["Parallel blocks"][3] == shown["Parallel blocks"][2]).all()


def test_all_pictures_of_a_text(folder, tmp_path, capsys):
    out = tmp_path / "pictures"
    assert main(["plot", str(folder), "--text", str(tmp_path / "text"), "-o", str(out)]) == 0
    files = [str(out / f"{kind}.png") for kind in KINDS]
    assert capsys.readouterr().out.splitlines() == files
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{kind}.png" for kind in KINDS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.iterdir())


def test_without_a_text_static_weights_alone(folder, capsys):
    assert main(["plot", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [str(folder / "figures" / "connections.png")]}
    assert unfold_static(hc_llama()).tokens == 0


def test_similarity_beside_the_base(tmp_path, llama, llama_folder):
    convert_model(llama).save_pretrained(tmp_path / "hc")
    byte_tokenizer().save_pretrained(tmp_path / "hc")
    (tmp_path / "text").write_text("0123456789 !#$%" * 30)  # characters below the 96 tokens of the model
    picture = tmp_path / "similarity.svg"
    command = ["plot", str(tmp_path / "hc"), "--kind", "similarity", "--text", str(tmp_path / "text")]
    assert main([*command, "--against", str(llama_folder), "-o", str(picture)]) == 0
    svg = picture.read_text()
    assert "<!-- hc -->" in svg
    assert "<!-- tiny-llama -->" in svg


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "streams"], "a picture of streams needs a model that runs over text. Give --text FILE."),
        (["--text", "nowhere.txt"], "there is no text file 'nowhere.txt'."),
        (["--kind", "connections", "-o", "x.txt"], "'x.txt' should end with one of .png, .pdf, .svg."),
        (["-o", "x.png"], "'x.png' is a file; all kinds go to a folder."),
    ],
)
def test_what_is_refused(options, message, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    before = sorted(folder.parent.rglob("*"))
    assert main(["plot", str(folder), *options]) == 1
    assert message in capsys.readouterr().err
    assert sorted(folder.parent.rglob("*")) == before


def test_without_matplotlib(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(folder), "--kind", "connections"]) == 1
    assert "which is missing. Run: pip install matplotlib" in capsys.readouterr().err


def test_a_base_is_refused(llama_folder, capsys):
    assert main(["plot", str(llama_folder), "--kind", "connections"]) == 1
    assert "LlamaForCausalLM has no static or dynamic hyper-connections" in capsys.readouterr().err
    assert main(["plot", str(llama_folder / "nowhere")]) == 1
    assert "is no checkpoint" in capsys.readouterr().err
