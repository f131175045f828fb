"""`hf-hyperconn plot`: where its pictures go, what it loads and what it refuses."""

import copy
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_hyperconn import HCLlamaForCausalLM, HCLlamaModel, convert_model
from hf_hyperconn.analysis.unfolding import unfold_static
from hf_hyperconn.conversion.checkpoint.checkpoint import open_conversion
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.demo import byte_tokenizer
from hf_hyperconn.conversion.plot.models import load_connections, load_model
from hf_hyperconn.conversion.plot.plot import CHARACTERS, read_beginning
from hf_hyperconn.families.family import find_family
from hf_hyperconn.models.sub_layers import is_of_connection
from tests.conftest import hc_llama, randomise_connections
from tests.marks import few
from tests.other_families import tiny

KINDS = ("connections", "similarity", "streams", "coefficients")
PRINTABLE = "0123456789 !#$%"  # characters below the 96 tokens of the model


def test_all_pictures_of_a_text(folder, tmp_path, capsys):
    out = tmp_path / "pictures"
    assert main(["plot", str(folder), "--text", str(tmp_path / "text"), "-o", str(out)]) == 0
    files = [str(out / f"{kind}.png") for kind in KINDS]
    assert capsys.readouterr().out.splitlines() == files
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{kind}.png" for kind in KINDS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.iterdir())


@pytest.mark.parametrize("suffix", few(("png", "pdf", "svg"), "svg"))
def test_all_pictures_on_one_sheet(folder, tmp_path, suffix, capsys):
    sheet = tmp_path / f"sheet.{suffix}"
    assert main(["plot", str(folder), "--text", str(tmp_path / "text"), "-o", str(sheet)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(sheet)]
    if suffix == "svg":
        titles = ("What each sub-layer reads", "Similarity of neighboring", "Similarity of the streams", "Writes, b")
        assert all(f"<!-- {title}" in sheet.read_text() for title in titles)
    assert main(["plot", str(folder), "-o", str(sheet)]) == 0  # without a text the static weights alone
    assert capsys.readouterr().out.splitlines() == [str(sheet)]


def test_without_a_text_static_weights_alone(folder, capsys):
    assert main(["plot", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [str(folder / "figures" / "connections.png")]}
    assert unfold_static(hc_llama()).tokens == 0


@pytest.mark.parametrize("name", ["hc", "tiny-llama"])
def test_similarity_beside_the_base(name, tmp_path, llama, llama_folder):
    """Base and conversion both have a curve, also where their folders have one name."""
    folder = tmp_path / name
    convert_model(llama).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (tmp_path / "text").write_text(PRINTABLE * 30)
    picture = tmp_path / "similarity.svg"
    command = ["plot", str(folder), "--kind", "similarity", "--text", str(tmp_path / "text"), "-o", str(picture)]
    assert main([*command, "--against", str(llama_folder)]) == 0
    assert llama_folder.name == "tiny-llama"
    for label in (name, llama_folder if name == llama_folder.name else llama_folder.name):
        assert f"<!-- {label} -->" in picture.read_text()


@pytest.mark.parametrize("connection", ["shc", "dhc", "frac", "mhc", "ihc"])
def test_static_weights_of_every_connection_without_those_of_the_base(connection, tmp_path):
    """What is drawn is what the whole model's connections unfold to; the base's weights are not read."""
    model = randomise_connections(hc_llama(connection=connection, hc_mult=2))
    model.save_pretrained(tmp_path)
    alone = load_connections(open_conversion(tmp_path))
    assert all(parameter.is_meta != is_of_connection(name) for name, parameter in alone.named_parameters())
    expected, matrices = unfold_static(model), unfold_static(alone)
    assert torch.equal(matrices.inputs, expected.inputs)
    assert matrices.tokens == 0
    assert main(["plot", str(tmp_path)]) == 0


@pytest.mark.parametrize("model_type", few(("gpt2", "gemma4_text", "t5", "whisper", "vit", "llava"), "gpt2", "t5"))
def test_static_weights_of_every_form(model_type, tmp_path):
    """Whatever the list of layers is called, and wherever the model has it."""
    model = randomise_connections(convert_model(copy.deepcopy(tiny(model_type))))
    model.save_pretrained(tmp_path)
    alone = load_connections(open_conversion(tmp_path))
    for stack in find_family(model_type).source.inner or (None,):
        name = stack and stack.attribute
        expected, matrices = unfold_static(model, name), unfold_static(alone, name)
        assert torch.equal(matrices.inputs, expected.inputs)
        assert matrices.attention == expected.attention
    assert main(["plot", str(tmp_path)]) == 0


@pytest.mark.slow
def test_which_sub_layers_have_attention():
    """As in the paper's figures where a layer has two sub-layers; one of three, two of three, all, none."""
    sub_layers = {
        model_type: unfold_static(convert_model(copy.deepcopy(tiny(model_type)))).attention
        for model_type in ("gpt2", "gemma4_text", "t5", "gpt_neox", "mamba2")
    }
    assert sub_layers == {
        "gpt2": (0, 2, 4, 6),
        "gemma4_text": (0, 3, 6, 9),
        "t5": (0, 1, 3, 4, 6, 7, 9, 10),
        "gpt_neox": (0, 1, 2, 3),
        "mamba2": (),
    }


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", "t5"])
def test_pictures_of_a_text_beside_the_base_of_other_forms(model_type, tmp_path, capsys):
    tiny(model_type).save_pretrained(tmp_path / "base")
    convert_model(copy.deepcopy(tiny(model_type))).save_pretrained(tmp_path / "hc")
    byte_tokenizer().save_pretrained(tmp_path / "hc")
    (tmp_path / "text").write_text(PRINTABLE * 30)
    command = ["plot", str(tmp_path / "hc"), "--text", str(tmp_path / "text"), "--against", str(tmp_path / "base")]
    assert main(command) == 0
    encoder = main([*command, "--stack", "encoder", "-o", str(tmp_path / "encoder.png")])
    assert (encoder, (tmp_path / "encoder.png").exists()) == ((0, True) if model_type == "t5" else (1, False))
    if encoder:
        assert "stack must be None in HCGPT2Model (got 'encoder')" in capsys.readouterr().err


def test_a_model_that_takes_no_text(tmp_path, refusal):
    convert_model(copy.deepcopy(tiny("whisper"))).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text").write_text(PRINTABLE * 30)
    assert "takes input_features, not text. Draw its static weights, without --text" in refusal(
        tmp_path, "--text", tmp_path / "text"
    )


def test_a_model_without_a_language_model_head(tmp_path, folder):
    """Pictures need none; and all weights are the checkpoint's."""
    causal = HCLlamaForCausalLM.from_pretrained(folder)
    HCLlamaModel.from_pretrained(folder).save_pretrained(tmp_path / "headless")
    for place in (folder, tmp_path / "headless"):
        model = load_model(open_conversion(place))
        assert type(model) is HCLlamaModel
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, causal.model.get_parameter(name)), name


def test_missing_weights_are_not_made_up(folder, tmp_path, refusal):
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp_hc.static_beta"):
        save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors", {"format": "pt"})
        options = ["--text", tmp_path / "text"] if "up_proj" in name else []
        assert f"holds no {name.removeprefix('model.')}. Copy or download" in refusal(folder, *options)
    assert not (folder / "figures").exists()


def test_only_the_beginning_of_a_long_text_is_read(tmp_path):
    (tmp_path / "text").write_bytes(b"word " * (CHARACTERS // 4) + b"\xff")
    assert len(read_beginning(str(tmp_path / "text"))) == CHARACTERS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty. Give one with a few sentences."),
        (b" \n\n", "is empty. Give one with a few sentences."),
        (b"\x89PNG\r\n\x1a\n", "is not UTF-8 text (invalid start byte). Give a text file."),
    ],
)
def test_a_text_that_is_none(content, message, folder, tmp_path, refusal):
    (tmp_path / "text").write_bytes(content)
    assert message in refusal(folder, "--text", tmp_path / "text")
    assert not (folder / "figures").exists()


def test_five_tokens_are_enough(folder, tmp_path):
    (tmp_path / "text").write_text("Once!")
    assert main(["plot", str(folder), "--text", str(tmp_path / "text"), "-o", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_no_tokenizer(folder, tmp_path, refusal):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    message = "has no tokenizer to read the text with. Copy tokenizer.json and tokenizer_config.json from its base."
    assert message in refusal(folder, "--text", tmp_path / "text")


def test_a_tokenizer_of_another_model(tmp_path, refusal):
    hc_llama().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("0123456789 abc")
    assert "gives a token 99, and the model has 96 from 0. Copy the tokenizer's files" in refusal(
        tmp_path / "model", "--text", tmp_path / "text"
    )


def test_places_where_no_picture_can_be_put(folder, tmp_path, monkeypatch, refusal):
    (tmp_path / "taken.png").mkdir()
    (tmp_path / "file").write_text("kept")
    command = [folder, "--kind", "connections", "-o"]
    assert "is a folder, where a picture should go" in refusal(*command, tmp_path / "taken.png")
    message = f"'{tmp_path / 'file'}' is a file, not a folder"
    assert message in refusal(*command, tmp_path / "file" / "deeper" / "x.png")
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path)
    message = f"no permission to write in '{tmp_path}'. Choose another place with -o."
    assert message in refusal(*command, tmp_path / "x.png")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "it has model_type 'qwen2' and 3 layers, not 'llama' and 3."),
        ({"num_hidden_layers": 2}, "it has model_type 'llama' and 2 layers, not 'llama' and 3."),
    ],
)
def test_what_is_not_the_base(changes, message, folder, llama_folder, tmp_path, refusal):
    base = shutil.copytree(llama_folder, tmp_path / "other")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **changes}))
    assert message in refusal(folder, "--text", tmp_path / "text", "--against", base)


@pytest.mark.slow
def test_progress_on_a_terminal(folder, tmp_path):
    """On its stderr; stdout has the files alone."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"}
    command = [sys.executable, "-m", "hf_hyperconn.conversion", "plot", str(folder), "--text", str(tmp_path / "text")]
    done = subprocess.run([*command, "--kind", "streams"], stdout=subprocess.PIPE, stderr=theirs, env=environment)
    assert (done.returncode, done.stdout.decode()) == (0, f"{folder / 'figures' / 'streams.png'}\n")
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal, suppress(OSError):  # raised at the end
        while part := terminal.read(4096):
            shown += part
    assert b"Studying: 100%" in shown


def test_one_stream_of_keel(tmp_path, refusal):
    hc_llama(connection="keel", hc_mult=1).save_pretrained(tmp_path)
    assert "has connection 'keel', where no matrices read and mix streams: nothing to draw." in refusal(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "streams"], "a picture of streams needs a model that runs over text. Give --text FILE."),
        (["--text", "nowhere.txt"], "there is no text file 'nowhere.txt'."),
        (["--kind", "connections", "-o", "x.txt"], "out must end with one of .png, .pdf, .svg (got 'x.txt'). Choose"),
        (["-o", __file__], "is a file, and no picture. Give a folder, or a file that ends with one of .png, .pdf"),
        (["--against", "base"], "--against base requires the picture of similarity."),
    ],
)
def test_what_is_refused(options, message, folder, monkeypatch, refusal):
    monkeypatch.chdir(folder.parent)
    before = sorted(folder.parent.rglob("*"))
    assert message in refusal(folder, *options)
    assert sorted(folder.parent.rglob("*")) == before


def test_without_matplotlib(folder, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "which draws the pictures, is not installed. Run: pip install matplotlib" in refusal(
        folder, "--kind", "connections"
    )


def test_a_base_is_refused(llama_folder, refusal):
    assert "is a plain Llama, without hyper-connections. Convert it: hf-hyperconn convert" in refusal(
        llama_folder, "--kind", "connections"
    )
    assert f"there is no folder '{llama_folder / 'nowhere'}'. Give the folder of a checkpoint" in refusal(
        llama_folder / "nowhere"
    )
