"""The example script: it trains, resumes where it was killed, and takes a base or its conversion alike."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from examples.continue_pretraining import Recipe, last_checkpoint, load_model, main, parse_arguments
from hf_hyperconn.conversion.convert import convert_checkpoint

from .families import FAMILIES
from .recipe import PAGE, REPOSITORY, SCRIPT, environment, losses, settings
from .tolerances import COMPILED

RECIPE = "examples/configs/recipe.yaml"


@pytest.fixture(scope="module")
def place(tmp_path_factory, request):
    """A folder to work in; data sets are cached there."""
    folder = tmp_path_factory.mktemp("recipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def whole_run(place, stories, texts) -> Path:
    """The folder of twenty steps that nobody stopped."""
    main([RECIPE, *settings(stories, texts, place / "whole")])
    return place / "whole"


def test_twenty_steps(whole_run):
    logged = losses(whole_run)
    assert len(logged) == 20
    assert sum(logged[-5:]) < sum(logged[:5]) - 0.5


def test_the_result_loads_by_its_own_code(whole_run):
    family = FAMILIES["llama"]
    config = json.loads((whole_run / "config.json").read_text())
    assert {path.name for path in whole_run.glob("*.py")} == set(family.code(config))
    assert config["auto_map"] == family.auto_map
    assert (whole_run / "tokenizer.json").is_file()


def test_a_base_is_trained_as_its_conversion(whole_run, place, stories, texts):
    converted = convert_checkpoint(str(stories), place / "converted", hc_mult=4).path
    main([RECIPE, *settings(converted, texts, place / "from-converted")])
    assert losses(place / "from-converted") == losses(whole_run)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (place / "from-converted", whole_run))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@torch.no_grad()
@pytest.mark.parametrize(
    ("asked", "start", "readout"),
    [
        ({}, "copies", "mean"),
        ({"connection": "ihc"}, "copies", "mean"),
        ({"hc_start": "history"}, "history", "weighted"),
        ({"hc_start": "history", "connection": "shc", "hc_mult": 2}, "history", "weighted"),
    ],
)
def test_a_base_starts_as_it_is_asked_to(stories, ids, asked, start, readout):
    model = load_model(Recipe(str(stories), **asked)).eval()
    assert (model.config.hc_start, model.config.hc_readout) == (start, readout)
    assert torch.equal(model(ids).logits, LlamaForCausalLM.from_pretrained(stories)(ids).logits)


def test_a_kind_that_is_not_there_is_named_with_those_that_are(stories):
    with pytest.raises(ValueError, match="connection must be 'shc', 'dhc'.* .got 'dch'"):
        load_model(Recipe(str(stories), connection="dch"))


def test_muon_is_an_option(whole_run, place, stories, texts):
    main([RECIPE, *settings(stories, texts, place / "muon"), "--muon", "--max_steps", "3", "--save_steps", "3"])
    found, usual = losses(place / "muon"), losses(whole_run)
    assert found[0] == usual[0]
    assert found[2] != usual[2]
    state = torch.load(place / "muon" / "checkpoint-3" / "optimizer.pt")["state"].values()
    assert {"momentum_buffer", "exp_avg"} == {next(name for name in one if name != "step") for one in state}


def test_a_mixture_continues_with_the_same_losses(place, stories, texts):
    """Its experts have other names in a checkpoint than in the model."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = OlmoeConfig(vocab_size=len(tokenizer), num_experts=4, num_experts_per_tok=2, **sizes)
    OlmoeForCausalLM(config).save_pretrained(place / "olmoe")
    tokenizer.save_pretrained(place / "olmoe")

    def train(name: str) -> list[float]:
        main([RECIPE, *settings(place / "olmoe", texts, place / name), "--max_steps", "4", "--save_steps", "2"])
        return losses(place / name)

    whole = train("mixture")
    shutil.copytree(place / "mixture" / "checkpoint-2", place / "mixture-resumed" / "checkpoint-2")
    assert train("mixture-resumed") == whole


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_losses(whole_run, place, stories, texts):
    arguments = [RECIPE, *settings(stories, texts, place / "killed")]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(threads=torch.get_num_threads()),
    )
    try:
        deadline = time.monotonic() + 120
        while last_checkpoint(str(place / "killed")) is None and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (place / "killed" / "checkpoint-20").exists()
    main(arguments)
    assert losses(place / "killed") == losses(whole_run)


def test_a_checkpoint_that_was_being_written_is_not_the_last(tmp_path):
    assert last_checkpoint(str(tmp_path)) is None
    for step in (9, 10, 100, 150, 200, "best"):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step, state in ((9, "{}"), (10, "{}"), (100, ""), (150, '{"epoch": 1'), ("best", "{}")):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


@pytest.mark.slow
def test_a_stream_is_read_in_the_same_order_again(place, stories, texts):
    lines = place / "lines"
    lines.mkdir()
    (lines / "train.txt").write_text(texts.read_text(encoding="utf-8"), encoding="utf-8")

    def train(name: str) -> Path:
        given = settings(stories, texts, place / name)
        given[given.index("--train_files") : given.index("--train_files") + 2] = ["--dataset", str(lines)]
        main([RECIPE, *given, "--streaming", "--max_steps", "6", "--save_steps", "3", "--shuffle_buffer", "100"])
        return place / name

    whole = train("stream")
    (place / "stream-again").mkdir()
    (whole / "checkpoint-3").rename(place / "stream-again" / "checkpoint-3")
    assert losses(train("stream-again")) == losses(whole)


@pytest.mark.slow
def test_options_that_save_memory_and_time(place, stories, texts):
    def train(name: str, *options: str) -> torch.Tensor:
        main([RECIPE, *settings(stories, texts, place / name), "--max_steps", "3", "--save_steps", "3", *options])
        return torch.tensor(losses(place / name))

    plain = train("plain")
    assert torch.equal(train("checkpointing", "--gradient_checkpointing"), plain)
    compiled = train("compiled", "--torch_compile", "--torch_compile_backend", "aot_eager")
    torch.testing.assert_close(compiled, plain, **COMPILED)
    saved = [load_file(place / name / "model.safetensors") for name in ("plain", "compiled")]
    assert saved[0].keys() == saved[1].keys()
    in_bfloat16 = train("bfloat16", "--bf16", "true")
    assert not torch.equal(in_bfloat16, plain)
    saved = load_file(place / "bfloat16" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}


def test_what_it_refuses(place, stories, texts, tmp_path):
    given = settings(stories, texts, tmp_path / "out")
    (tmp_path / "a_list.yaml").write_text("- model\n")
    (tmp_path / "broken.yaml").write_text("model: [x\n")
    (tmp_path / "short.txt").write_text("Once.")
    short = [word if word != str(texts) else str(tmp_path / "short.txt") for word in given]
    for arguments, said in (
        ([*given, "--dataset", "somewhere"], "either --train_files or --dataset"),
        ([*given, "--train_files", str(tmp_path / "*.text")], r"No file is .*\.text\. Give text files"),
        (short, "The texts have less than 64 tokens. Give more, or a smaller --sequence_length"),
        ([str(tmp_path / "none.yaml"), *given], "No such file or directory: .*none.yaml"),
        ([str(tmp_path / "a_list.yaml"), *given], "a_list.yaml holds no settings; write one in a line"),
        ([str(tmp_path / "broken.yaml"), *given], "expected ',' or ']'"),
        ([*given, "--hc_mlt", "2"], "not used by the HfArgumentParser: .'--hc_mlt', '2'"),
        ([*given, "--hc_mult", "0"], "hc_mult must be a whole number, at least 1"),
        (settings(tmp_path / "nowhere", texts, tmp_path / "out"), "nowhere"),
    ):
        with pytest.raises(SystemExit, match=f"(?s)^error: .*{said}"):
            main(arguments)
    config = json.loads((stories / "config.json").read_text())
    (tmp_path / "other").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).write_bytes((stories / name).read_bytes())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "model_type": "albert"}))
    with pytest.raises(SystemExit, match="error: .*AlbertModel has no list of layers whose classes"):
        main(settings(tmp_path / "other", texts, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_page_has_the_values_of_the_recipe():
    stated = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", PAGE, re.M))
    values = yaml.safe_load((REPOSITORY / RECIPE).read_text(encoding="utf-8"))
    explained = {name: value for name, value in values.items() if name in stated}
    assert {name: yaml.safe_load(value) for name, value in stated.items()} == explained
    assert values.keys() - stated.keys() == {"lr_scheduler_kwargs", "save_steps", "logging_steps"}


def test_the_command_line_has_the_last_word():
    recipe, args = parse_arguments([str(REPOSITORY / RECIPE), "--model", "x", "--hc_lr", "0.5", "--use_cpu"])
    values = yaml.safe_load((REPOSITORY / RECIPE).read_text(encoding="utf-8"))
    assert recipe.hc_lr == 0.5
    assert args.learning_rate == values["learning_rate"] == 4e-5
    assert args.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
