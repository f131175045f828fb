"""Whoever reads what the command line prints, or has stopped to: the work is done, and no terminal is driven."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.terminal import printable

from .marks import few

# as the installed command, which imports nothing heavy before it must
ENTRY = "import sys; sys.argv[0] = 'hf-hyperconn'; from hf_hyperconn.conversion.__main__ import main"
COMMAND = [sys.executable, "-c", f"{ENTRY}; raise SystemExit(main())"]


def run(arguments: list, redirection: str, **keywords) -> subprocess.CompletedProcess:
    """The command line in a shell that redirects its streams."""
    script = f'"$@" {redirection}'
    command = ["bash", "-c", script, "bash", *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **keywords)


REDIRECTIONS = [">&-", "2>&-", "<&- >&- 2>&-", "| true; exit ${PIPESTATUS[0]}", "2>&1 | true; exit ${PIPESTATUS[0]}"]


@pytest.mark.parametrize(
    "redirection",
    few(REDIRECTIONS, *REDIRECTIONS[2:4]),
    ids=("stdout closed", "stderr closed", "all closed", "stdout unread", "both unread"),
)
def test_a_conversion_that_nobody_listens_to_is_done(redirection, llama_folder, tmp_path):
    out = tmp_path / "out"
    done = run(["convert", llama_folder, out, "--verify", "off"], redirection)
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr
    assert done.stdout in ("", f"{out}\n")
    assert {"config.json", "README.md"} <= {path.name for path in out.iterdir()}
    for path in out.iterdir():
        assert b"base weights  1 file" not in path.read_bytes(), "it was printed into a file"


def test_a_failed_verification_nobody_reads_about_fails(llama_folder, tmp_path):
    out = tmp_path / "out"
    assert main(["convert", str(llama_folder), str(out), "-q", "--verify", "off"]) == 0
    (out / "modeling_hc_llama.py").unlink()
    assert run(["verify", out], ">&-").returncode == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_result_that_finds_no_room_is_missed(llama_folder, tmp_path):
    done = run(["convert", llama_folder, tmp_path / "out", "--verify", "off", "-q"], "> /dev/full")
    message = "error: can't print the result: No space left on device. Print it to somewhere else.\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_names_drive_no_terminal(llama_folder, tmp_path, capsys):
    tensors = load_file(llama_folder / "model.safetensors")
    tensors["\x1b[2J\x9b\u202e"] = tensors["model.norm.weight"].clone()
    base = tmp_path / "ba\x1bse"
    base.mkdir()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    (base / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    (base / "\x1b]0;x\x07.txt").write_text("")
    assert main(["convert", str(base), str(tmp_path / "out")]) == 1
    assert main(["convert", str(base), str(tmp_path / "out"), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "a LlamaForCausalLM has no tensor \\x1b[2J\\x9b\\u202e." in printed.err
    assert "\\x1b]0;x\\x07.txt" in printed.out
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(printed.out + printed.err)
    assert main(["convert", str(base), str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    assert "\x1b]0;x\x07.txt" in json.loads(capsys.readouterr().out)["companions"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_name_asked_for_is_as_it_is_but_for_a_terminal(is_terminal, llama_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    out = tmp_path / "o\x1but"
    assert main(["convert", str(llama_folder), str(out), "--verify", "off", "-q"]) == 0
    assert capsys.readouterr().out == (f"{tmp_path}/o\\x1but\n" if is_terminal else f"{out}\n")


def test_text_stays_as_it_is():
    assert printable("Grüße, 世界\n  n=4") == "Grüße, 世界\n  n=4"
    assert printable("a\tb\r\x00\udcff") == "a\\tb\\r\\x00\\udcff"
