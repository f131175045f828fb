"""The commands of docs/training.md, on two ranks of a CPU: losses of one process, float32 connections, checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from examples.continue_pretraining import main
from hf_hyperconn import HCLlamaForCausalLM

from .conftest import randomise_connections
from .families import FAMILIES
from .marks import tail
from .recipe import (
    COMMANDS,
    ON_CPU,
    REPOSITORY,
    TO_THE_END,
    documented,
    gradients_of_ranks,
    losses,
    on_ranks,
    run,
    run_on_ranks,
    settings,
)
from .tolerances import RANKS, RANKS_BFLOAT16, RANKS_MUON

FSDP2 = "examples/configs/fsdp2.yaml"
RECIPE = "examples/configs/recipe.yaml"


def assert_losses(found: list[float], expected: list[float], tolerance: dict[str, float]) -> None:
    assert len(found) == len(expected) == 20
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **tolerance)


@pytest.fixture(scope="module")
def one_process(stories, texts, tmp_path_factory) -> Path:
    """The folder of a run of one process, in float32."""
    folder = tmp_path_factory.mktemp("one") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        main([RECIPE, *settings(stories, texts, folder)])
    return folder


@pytest.fixture(scope="module")
def sharded(stories, texts, tmp_path_factory) -> Path:
    """The folder of the documented FSDP2 run, in float32."""
    folder = tmp_path_factory.mktemp("fsdp2") / "run"
    run(on_ranks(documented(FSDP2), 2, settings(stories, texts, folder, batch=2), before=(ON_CPU,)))
    return folder


def test_every_command_of_the_page_is_run_here():
    outputs = {command[command.index("--output_dir") + 1] for command in COMMANDS if "--output_dir" in command}
    assert outputs == {"runs/one-gpu", "runs/ddp", "runs/fsdp2", "runs/multi-node", "runs/tp"}
    assert len(COMMANDS) == len(outputs) + 1


@pytest.mark.slow
def test_all_ranks_resume_from_the_checkpoint_that_the_first_sees(tmp_path):
    """One whose list of the folder is older, too; where it isn't there for all, none trains on."""
    for folder in ("shared", "0", "1"):
        (tmp_path / folder).mkdir()
    for folder in ("shared", "0"):
        (tmp_path / folder / "checkpoint-4").mkdir()
        (tmp_path / folder / "checkpoint-4" / "trainer_state.json").write_text("{}")
    output = run(on_ranks(documented("runs/ddp"), 2, [], before=("tests/ranks/one_checkpoint.py", str(tmp_path))))
    refusal = "Not every node has checkpoint-4. Give them a folder that all share."
    lines = (refusal, f"{tmp_path}/shared/checkpoint-4")
    expected = {f"rank {rank}: {line}" for rank in "01" for line in lines}
    assert {line for line in output.splitlines() if line.startswith("rank ")} == expected


@pytest.mark.slow
def test_ddp(one_process, stories, texts, tmp_path):
    command = documented("runs/ddp")
    for word in ("--streaming", "--dataset", "HuggingFaceFW/fineweb-edu"):
        command.remove(word)
    given = settings(stories, texts, tmp_path / "run", batch=2)
    run(on_ranks(command, 2, given, before=(TO_THE_END,)))
    assert_losses(losses(tmp_path / "run"), losses(one_process), RANKS)


@pytest.mark.slow
@pytest.mark.tail
def test_one_gpu(one_process, stories, texts, tmp_path):
    run(on_ranks(documented("runs/one-gpu"), 1, settings(stories, texts, tmp_path / "run")))
    assert losses(tmp_path / "run") == pytest.approx(losses(one_process), rel=RANKS["rtol"])


@pytest.mark.slow
@pytest.mark.tail
def test_ddp_from_a_stream(stories, texts, tmp_path):
    lines = tmp_path / "lines"
    lines.mkdir()
    shutil.copy(texts, lines / "train.txt")
    command = documented("runs/ddp")
    command[command.index("--dataset") + 1] = str(lines)
    given = settings(stories, texts, tmp_path / "run", batch=2)
    del given[given.index("--train_files") : given.index("--train_files") + 2]
    run(on_ranks(command, 2, given))
    assert len(losses(tmp_path / "run")) == 20


@pytest.mark.slow
def test_fsdp2(one_process, sharded):
    assert_losses(losses(sharded), losses(one_process), RANKS)


@pytest.mark.slow
@pytest.mark.tail
def test_fsdp2_with_muon(stories, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    main([RECIPE, *settings(stories, texts, tmp_path / "one"), "--muon"])
    given = [*settings(stories, texts, tmp_path / "run", batch=2), "--muon"]
    run(on_ranks(documented(FSDP2), 2, given, before=(ON_CPU,)))
    assert_losses(losses(tmp_path / "run"), losses(tmp_path / "one"), RANKS_MUON)


@pytest.mark.slow
def test_two_nodes(one_process, stories, texts, tmp_path):
    given = settings(stories, texts, tmp_path / "run", batch=2)
    first = on_ranks(documented("runs/multi-node"), 2, given, before=(ON_CPU,))
    first[first.index("--main_process_ip") + 1] = "127.0.0.1"
    second = list(first)
    second[second.index("--machine_rank") + 1] = "1"
    run(first, second)
    assert_losses(losses(tmp_path / "run"), losses(one_process), RANKS)


@pytest.mark.slow
def test_tensor_parallelism(one_process, stories, texts, tmp_path):
    run(on_ranks(documented("runs/tp"), 2, settings(stories, texts, tmp_path / "run"), before=(ON_CPU,)))
    assert_losses(losses(tmp_path / "run"), losses(one_process), RANKS)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run", one_process))
    assert torch.equal(ours.pop("lm_head.weight"), ours["model.embed_tokens.weight"])  # saved twice, where it is tied
    assert {name: value.shape for name, value in ours.items()} == {name: v.shape for name, v in theirs.items()}


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_on_one(sharded, stories, texts, tmp_path):
    shutil.copytree(sharded / "checkpoint-10", tmp_path / "run" / "checkpoint-10")
    run(on_ranks(documented(FSDP2), 1, settings(stories, texts, tmp_path / "run"), before=(ON_CPU,)))
    assert losses(tmp_path / "run")[:10] == losses(sharded)[:10]
    assert_losses(losses(tmp_path / "run"), losses(sharded), RANKS)


@pytest.mark.slow
def test_a_sharded_run_leaves_a_model_in_one_piece(sharded, tmp_path):
    family = FAMILIES["llama"]
    config = json.loads((sharded / "config.json").read_text())
    assert {path.name for path in sharded.glob("*.py")} == set(family.code(config))
    assert config["auto_map"] == family.auto_map
    assert config["architectures"] == ["HCLlamaForCausalLM"]

    command = documented("merge-weights")
    command[-2:] = [str(sharded / "checkpoint-20" / "pytorch_model_fsdp_0"), str(tmp_path)]
    run(command)
    merged, saved = load_file(tmp_path / "model.safetensors"), load_file(sharded / "model.safetensors")
    assert saved.keys() <= merged.keys()
    assert all(torch.equal(merged[name], saved[name]) for name in saved)


@pytest.mark.slow
def test_connections_are_float32_in_mixed_precision(stories, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    main([RECIPE, *settings(stories, texts, tmp_path / "one"), "--bf16", "true"])
    recorder = (ON_CPU, "tests/ranks/record_dtypes.py", str(tmp_path / "dtypes"))
    given = [*settings(stories, texts, tmp_path / "two", batch=2), "--bf16", "true"]
    run(on_ranks(documented(FSDP2), 2, given, before=recorder))
    assert_losses(losses(tmp_path / "two"), losses(tmp_path / "one"), RANKS_BFLOAT16)
    for rank in (0, 1):
        seen = json.loads((tmp_path / "dtypes" / f"{rank}.json").read_text())
        assert seen.pop("linear output") == ["torch.bfloat16"]
        assert seen == dict.fromkeys(("connection", "parameter", "gradient", "moment"), ["torch.float32"])
    assert {value.dtype for value in load_file(tmp_path / "two" / "model.safetensors").values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "ranks"), [*tail(("runs/ddp", "MULTI_CPU")), (FSDP2, "FSDP")])
def test_gradients_of_two_ranks_are_those_of_the_joined_batch(engine, ranks, stories, tmp_path):
    randomise_connections(HCLlamaForCausalLM.from_prenorm(stories)).save_pretrained(tmp_path)
    assert f"gradients of 2 {ranks} ranks agree" in gradients_of_ranks(engine, tmp_path)


@pytest.mark.slow
def test_a_base_is_converted_while_it_is_sharded(stories):
    assert "parameters are equal on rank 1" in run_on_ranks(2, "tests/ranks/sharded_loading.py", str(stories))
