"""The command line: its streams and exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_hyperconn
from hf_hyperconn.conversion import cli, convert
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.errors import ConversionError

from .conftest import llama_config

SCRIPT = Path(sys.executable).with_name("hf-hyperconn")


def test_out_may_stand_behind_options(llama_folder, tmp_path):
    out = tmp_path / "out"
    assert main(["convert", str(llama_folder), "-n", "2", str(out), "--verify", "off"]) == 0
    assert (out / "config.json").exists()


@pytest.fixture
def script():
    if not SCRIPT.is_file():
        pytest.skip("needs the installed command")
    return str(SCRIPT)


def test_stdout_carries_the_result_alone(llama_folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(llama_folder), str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert "equal to the base, bit for bit" in printed.err
    assert f'from_pretrained("{out}", trust_remote_code=True)' in printed.err
    assert main(["verify", str(out), "--against", str(llama_folder)]) == 0
    printed = capsys.readouterr()
    assert "equal to the base, bit for bit" in printed.out
    assert printed.err == ""


def test_json(llama_folder, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--json", "-q", "--connection", "shc", "-n", "2", "--verify", "structure"]
    assert main(["convert", str(llama_folder), str(out), *options]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert printed.err == ""
    assert (result["out"], result["hc_mult"], result["connection"]) == (str(out), 2, "shc")
    assert result["verification"]["passed"] is True
    assert main(["verify", str(out), "--against", str(llama_folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert report["comparisons"][0] == {
        "dtype": "float32",
        "logits": True,
        "hidden_states": True,
        "continuation": True,
        "max_difference": 0.0,
        "kl": 0.0,
        "top1": 1.0,
        "relative": 0.0,
    }


def test_dry_run_touches_nothing(llama_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(llama_folder), "--dry-run", "-n", "8"]) == 0
    printed = capsys.readouterr()
    assert "dhc, n=8" in printed.out
    assert "tiny-llama-HCx8: needs" in printed.out
    assert main(["convert", str(llama_folder), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["out"] == "tiny-llama-HCx4"
    assert plan["shards"]["model.safetensors"] == "model-00001-of-00002.safetensors"
    assert list(tmp_path.iterdir()) == []


def test_default_out(llama_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(llama_folder), "-n", "2", "--verify", "off"]) == 0
    assert capsys.readouterr().out == "tiny-llama-HCx2\n"
    record = json.loads((tmp_path / "tiny-llama-HCx2" / "hyperconn_conversion.json").read_text())
    assert record["verification"] is None


@pytest.mark.parametrize(
    "arguments", [[], ["turn"], ["convert"], ["convert", "a", "-n", "four"], ["convert", "a", "--layers", "0"]]
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("hf-hyperconn")
    assert said.endswith(" --help\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "convrt a",
            "COMMAND must be convert, estimate, verify, inspect, plot, card, push, refresh, demo or completion "
            "(got 'convrt'). Did you mean convert?",
        ),
        ("convert a --conection shc", "unrecognized arguments: --conection shc. Did you mean --connection?"),
        ("convert a --start histroy", "--start must be copies or history (got 'histroy'). Did you mean history?"),
        ("verify a --aganist=b", "unrecognized arguments: --aganist=b. Did you mean --against?"),
        (
            "estimate a --dtype BFLOAT16",
            "--dtype must be float32 or bfloat16 (got 'BFLOAT16'). Did you mean bfloat16?",
        ),
        ("convert a -n four", "-n/--hc-mult must be a whole number (got 'four'). Run hf-hyperconn convert --help"),
        ("convert a --eps x", "--eps must be a number (got 'x'). Run hf-hyperconn convert --help"),
        ("estimate a --tokens 0", "--tokens must be at least 1 (got 0). Run hf-hyperconn estimate --help"),
        (
            "convert a --out b",
            "unrecognized arguments: --out b. Give OUT without an option. Run hf-hyperconn convert --help",
        ),
        ("convert a b c --zzz", "unrecognized arguments: c --zzz. Run hf-hyperconn convert --help"),
        ("completion fish", "shell must be bash or zsh (got 'fish'). Run hf-hyperconn completion --help"),
    ],
)
def test_wrong_usage_is_answered_in_a_line(arguments, said, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert capsys.readouterr().err.partition("error: ")[2] == f"{said}\n"


def test_a_shell_completes_commands_options_and_choices(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, completed in (
        ("ver", "verify"),
        ("convert --conn", "--connection"),
        ("convert --start ''", "copies history"),
        ("plot -- --aga", "--against"),
        ("convert ./", ""),
        ("completion z", "zsh"),
        ("--ver", "--version"),
    ):
        line = f"COMP_WORDS=(hf-hyperconn {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _hf_hyperconn"
        shell = ["bash", "-c", f'{script}{line}; echo "${{COMPREPLY[*]}}"']
        assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == f"{completed}\n"
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out.splitlines()[0]


def test_a_plan_warns_of_what_may_not_be_meant(llama_folder, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert", str(llama_folder), out, "-n", "100", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "warning        hc_mult is 100, and the papers measure up to 8 streams." in printed
    assert f"warning        '{llama_folder}' has no tokenizer. Copy one into '{out}'" in printed
    base = shutil.copytree(llama_folder, tmp_path / "base")
    (base / "vocab.txt").write_text("")
    assert main(["convert", str(base), out, "-n", "8", "--verify", "off"]) == 0
    assert "hc_mult" not in (said := capsys.readouterr().err)
    assert "no tokenizer" not in said


def other_llama(place: Path) -> Path:
    """Another base of the same sizes."""
    torch.manual_seed(1)
    LlamaForCausalLM(llama_config()).save_pretrained(place / "other")
    return place / "other"


def test_another_base_is_named_beside_the_recorded_one(llama_folder, tmp_path, capsys):
    out, other = str(tmp_path / "out"), str(other_llama(tmp_path))
    assert main(["convert", str(llama_folder), out, "--verify", "off"]) == 0
    assert main(["verify", out, "--against", other]) == 3
    named = f"The record names another base: '{llama_folder.name}' (got '{other}')."
    assert capsys.readouterr().err.endswith(f"{named}\n")


def test_a_terminal_gets_a_first_line_and_colors(llama_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["inspect", "./nowhere"]) == 1
    first, error = capsys.readouterr().err.splitlines()
    assert first == "inspect       ./nowhere"
    assert error.startswith("\x1b[31merror\x1b[0m: ")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["inspect", "./nowhere", "-q"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "{}", "--revision", "main"], "--revision requires --against MODEL"),
        (["verify", "{}", "--mode", "full"], "--mode full requires --against MODEL"),
        (["verify", "{}", "--layers", "1"], "--layers requires --against MODEL"),
        (
            ["verify", "{}", "--against", "{}", "--mode", "structure", "--layers", "1"],
            "layers must be None with mode 'structure'",
        ),
        (
            ["convert", "{}", "--verify", "off", "--layers", "1"],
            "layers must be None with mode 'off', which runs none (got 1)",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(arguments, said, llama_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([word.format(llama_folder) for word in arguments]) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--start", "history", "--readout", "mean"], "--readout must be 'weighted' with --start 'history'"),
        (["--connection", "frac", "-n", "3"], "--hc-mult must be a divisor of hidden_size"),
    ],
)
def test_errors_name_options_in_the_place_of_fields(arguments, said, llama_folder, tmp_path, capsys):
    assert main(["convert", str(llama_folder), str(tmp_path / "out"), *arguments]) == 1
    assert said in capsys.readouterr().err


def test_layers_that_would_not_be_run_are_refused_of_functions_too(llama_folder, tmp_path):
    with pytest.raises(ConversionError, match="layers must be None with mode 'structure'"):
        convert.convert_checkpoint(str(llama_folder), tmp_path / "out", verify="structure", layers=1)
    with pytest.raises(ConversionError, match="mode must be 'auto', 'full', 'structure' or 'off'"):
        convert.convert_checkpoint(str(llama_folder), tmp_path / "out", verify="fast")
    assert not list(tmp_path.iterdir())


def test_as_a_module(capfd):
    subprocess.run([sys.executable, "-m", "hf_hyperconn.conversion", "--version"], check=True)
    assert capfd.readouterr().out == f"hf-hyperconn {hf_hyperconn.__version__}\n"


def test_interrupted(llama_folder, tmp_path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_write_companions", interrupt)
    assert main(["convert", str(llama_folder), str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; run the same command again to continue"
    assert not (tmp_path / "out").exists()


@pytest.fixture
def convert_raising(llama_folder, tmp_path, monkeypatch):
    """A function that runs `convert` where an error is raised."""

    def run(error, *options):
        def fail(*arguments, **keywords):
            raise error

        monkeypatch.setattr(convert, "carry_out", fail)
        return main(["convert", str(llama_folder), str(tmp_path / "out"), *options])

    return run


class PanicException(BaseException):
    """What Rust raises."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, PanicException])
def test_traceback_only_on_request(kind, convert_raising, capsys):
    assert convert_raising(kind("of some kind")) == 1
    message = "error: of some kind (unexpected; run it again with -v for the traceback)\n"
    assert capsys.readouterr().err == message
    with pytest.raises(kind):
        convert_raising(kind("of some kind"), "-v")


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit])
def test_an_end_is_no_error(kind, convert_raising):
    with pytest.raises(kind):
        convert_raising(kind)


def test_verification_failure_has_its_own_code(llama_folder, tmp_path, capsys):
    out = tmp_path / "out"
    main(["convert", str(llama_folder), str(out), "--verify", "off"])
    (out / "modeling_hc_llama.py").unlink()
    capsys.readouterr()
    assert main(["verify", str(out)]) == 3
    assert capsys.readouterr().err == (
        "error: verification failed: the code file modeling_hc_llama.py is missing. Run `hf-hyperconn refresh`.\n"
    )


def test_help_has_examples(script):
    top = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert (top.returncode, top.stderr) == (0, "")
    for command in ("convert", "verify", "push", "demo"):
        assert command in top.stdout
        shown = subprocess.run([script, command, "--help"], capture_output=True, text=True)
        assert shown.returncode == 0
        assert f"  hf-hyperconn {command} " in shown.stdout
    version = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert version.stdout == f"hf-hyperconn {hf_hyperconn.__version__}\n"


def test_the_installed_command_converts_and_verifies(script, llama_folder, tmp_path):
    """It registers no Auto classes at start-up, so verification must not depend on them."""
    command = [script, "convert", str(llama_folder), "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "out\n"), done.stderr
    assert "float32" in done.stderr


@pytest.mark.slow
def test_demo_keeps_its_models(tmp_path, capsys):
    from hf_hyperconn.conversion import demo

    folder = tmp_path / "demo"
    assert cli.main(["demo", str(folder), "--steps", "2"]) == 0
    printed = capsys.readouterr()
    header, base, hc = printed.out.splitlines()
    assert header.split() == ["held-out", "loss", "converted", "trained", "on"]
    assert base.split()[1] == hc.split()[2], "the conversion does not have its base's loss"
    assert "equal to the base, bit for bit" in printed.err
    assert demo.PROMPT in printed.err
    assert sorted(path.name for path in folder.iterdir()) == ["base", "base-HCx4"]
    assert cli.main(["demo", str(folder)]) == 1
    assert "already exists. Choose another DIR." in capsys.readouterr().err
    shutil.rmtree(folder)


def test_demo_where_no_folder_can_be_made(tmp_path, capsys):
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    for name, message in (
        ("link", "already exists. Choose another DIR."),
        ("file/demo", "can't make the folder"),
        ("x" * 300, "File name too long. Choose another DIR."),
        ("\0", "embedded null byte. Choose another DIR."),
    ):
        assert cli.main(["demo", str(tmp_path / name)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert "unexpected" not in line
