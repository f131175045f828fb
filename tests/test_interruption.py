"""A conversion killed at any moment leaves OUT whole or absent and the source as it was; run again, it completes."""

import glob
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

KILLS, KILLS_WITH_FORCE = 50, 20
STEP = 3  # of the changes before which a conversion is killed; the others are killed by tests of the tail
LARGE, SMALL, SHARDS = 512, 32, 4  # channels; a conversion of the large one takes long enough to be killed anywhere
SHARD = f"*-of-{SHARDS + 1:05}.safetensors"
CONVERTER = "hf_hyperconn.conversion"
PRELOADED = (
    *("torch", "safetensors.torch", "huggingface_hub.utils", "huggingface_hub.repocard", "jinja2"),
    *(f"{CONVERTER}.{name}" for name in ("convert", "checkpoint.loading", "verify.start")),
)
FOLDER_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")
PLAN = ".hyperconn_plan.json"
SHIPPED = "modeling_hc_llama.py"  # the other Python files of a folder are written and removed as this one is


class Conversions:
    """Runs conversions in forks of one process that has imported all they need, so that kills fall in their work."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(
        self, source: Path, out: Path, delay=None, change=None, copying=False, **options
    ) -> tuple[bool, float]:
        """Convert; kill after `delay` seconds, or before the given change of a folder. Returns (finished, seconds).

        copying: the delay counts from when a shard begins to be copied.
        """
        options = {"model": str(source), "out": str(out), "verify": "structure", **options}
        self.process.stdin.write(json.dumps([options, delay, change, copying]) + "\n")
        self.process.stdin.flush()
        exit_code, seconds = json.loads(self.process.stdout.readline())
        assert exit_code in (0, -signal.SIGKILL)
        return exit_code == 0, seconds


def serve():
    """The process behind `Conversions`: a request a line."""
    for name in PRELOADED:
        import_module(name)
    read_transformers()
    for line in sys.stdin:
        options, delay, change, copying = json.loads(line)
        start = time.monotonic()
        if not (child := os.fork()):
            convert_and_exit(options, change)
        if copying:
            wait_for_a_copy(child, Path(options["out"]))
        if delay is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - start]), flush=True)


def read_transformers():
    """What a conversion reads of Transformers' source, and keeps, as long as its process lives."""
    import_module("hf_hyperconn.families.family").name_of_family({"model_type": "llama"})
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


def wait_for_a_copy(child: int, out: Path):
    """Until a shard is being copied, or `child` has ended."""
    # not Path.glob: it raises where a folder is renamed while it looks
    parts = f".{out.name}.incomplete/{SHARD}.part"
    while not glob.glob(parts, root_dir=out.parent) and not os.waitid(
        os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT
    ):
        time.sleep(1e-4)


def is_of_another_shipped_file(path) -> bool:
    name = Path(path).name
    return ".py" in name and SHIPPED not in name


def convert_and_exit(options: dict, change: int | None):
    changes = itertools.count()

    def die_at_change(event: str, arguments: tuple):
        if event in FOLDER_CHANGES and not is_of_another_shipped_file(arguments[0]) and next(changes) == change:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die_at_change)
    try:
        import_module(f"{CONVERTER}.convert").convert_checkpoint(**options)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@pytest.fixture(scope="module")
def convert():
    conversions = Conversions()
    yield conversions
    conversions.process.communicate()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("source") / "llama", LARGE)


@pytest.fixture(scope="module")
def small_source(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("source") / "llama", SMALL)


def checkpoint(folder: Path, size: int) -> Path:
    """A Llama of `size` channels and random bytes in several shards."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": size,
        "intermediate_size": 3 * size,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 16 * size,
        "tie_word_embeddings": True,
        "dtype": "float16",
    }
    shapes = {"model.embed_tokens.weight": (16 * size, size), "model.norm.weight": (size,)}
    for layer in range(8):
        names = {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
        names |= {f"mlp.{name}_proj": (3 * size, size) for name in ("gate", "up")}
        names |= {"mlp.down_proj": (size, 3 * size)}
        names |= {"input_layernorm": (size,), "post_attention_layernorm": (size,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in names.items()}
    generator, weight_map = np.random.default_rng(0), {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        names = list(shapes)[shard::SHARDS]
        tensors = {name: generator.integers(2**16, size=shapes[name], dtype=np.uint16) for name in names}
        save_file({name: tensor.view(np.float16) for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def undisturbed(convert, source, tmp_path_factory) -> dict[str, str]:
    """What an undisturbed conversion makes."""
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    assert convert(source, folder)[0]
    return contents(folder)


@pytest.fixture(scope="module")
def old(convert, source, tmp_path_factory) -> Path:
    return earlier_conversion(convert, source, tmp_path_factory.mktemp("old") / "out")


def earlier_conversion(convert, source: Path, folder: Path) -> Path:
    """A conversion of the same source, with other hyper-connections."""
    assert convert(source, folder, hc_mult=2, link="hard")[0]
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Digest by path of every file in a folder, but for the plan that a conversion removes at its very end."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != PLAN
    }


def what_is_left(folder: Path) -> tuple:
    """All that a conversion finds in a folder when it is run again."""
    plans = [path.read_bytes() for path in folder.rglob(PLAN)]
    return sorted(folder.rglob("*")), contents(folder), plans


def seconds_undisturbed(convert, source: Path, parent: Path) -> float:
    """How long a conversion takes now; it is asked again and again, as the machine may be busy."""
    finished, seconds = convert(source, parent / "measured")
    assert finished
    shutil.rmtree(parent / "measured")
    return seconds


def put_back(old: Path, out: Path):
    for folder in out.parent.iterdir():
        shutil.rmtree(folder)
    shutil.copytree(old, out, copy_function=os.link)


def check_replaced(out: Path, old: dict[str, str], new: dict[str, str], *, whole: bool = False):
    """OUT is the new checkpoint, whole, and the old one has another name; or OUT is the old one, or absent.

    whole: whether the command ended well.
    """
    renamed = [contents(path) for path in out.parent.glob(f"{out.name}.replaced-*")]
    if whole or renamed:
        assert renamed == [old]
        assert contents(out) == new if whole or out.exists() else True
    else:
        assert contents(out) == old


def is_new(out: Path, new: dict[str, str]) -> bool:
    return out.exists() and contents(out) == new


@pytest.mark.tail
@pytest.mark.slow
def test_killed_at_random_moments(convert, source, undisturbed, tmp_path):
    before, moments, out = contents(source), random.Random(0), tmp_path / "out"
    unfinished = copying = 0
    for kill in range(KILLS):
        if not os.listdir(tmp_path):
            duration = seconds_undisturbed(convert, source, tmp_path)
        copies = kill % 2 == 1  # a copy takes a small part of the whole
        convert(source, out, delay=moments.uniform(0, duration / 50 if copies else duration), copying=copies)
        assert contents(source) == before
        unfinished += not out.exists()
        copying += any(tmp_path.glob(f".out.incomplete/{SHARD}.part"))
        if not out.exists() and kill % 4 == 3:
            assert convert(source, out)[0]
        if out.exists():
            assert contents(out) == undisturbed
            assert os.listdir(tmp_path) == ["out"]
            shutil.rmtree(out)
    assert unfinished >= KILLS / 2
    assert copying >= KILLS / 10


@pytest.mark.tail
@pytest.mark.slow
def test_killed_at_random_moments_while_replacing(convert, source, undisturbed, old, tmp_path):
    before, before_out, moments, out = contents(source), contents(old), random.Random(1), tmp_path / "out"
    unfinished = 0
    for kill in range(KILLS_WITH_FORCE):
        if kill % 4 == 0:
            duration = seconds_undisturbed(convert, source, tmp_path)
            put_back(old, out)
        finished, _ = convert(source, out, delay=moments.uniform(0, duration), force=True)
        unfinished += not finished
        assert contents(source) == before
        check_replaced(out, before_out, undisturbed)
        if kill % 4 == 3 and not is_new(out, undisturbed):
            assert convert(source, out, force=True)[0]
            check_replaced(out, before_out, undisturbed, whole=True)
    assert unfinished >= KILLS_WITH_FORCE / 2


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.tail) for first in range(1, STEP))])
def test_killed_before_each_change_of_a_folder(first, convert, small_source, tmp_path):
    before, out = contents(small_source), tmp_path / "out"
    assert convert(small_source, out, link="hard")[0]
    new, seen = contents(out), []
    for change in itertools.count(first, STEP):
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
        finished, _ = convert(small_source, out, change=change, link="hard")
        assert contents(small_source) == before
        if not out.exists():
            if (left := what_is_left(tmp_path)) in seen:
                continue
            seen.append(left)
            assert convert(small_source, out, link="hard")[0]
        assert contents(out) == new
        assert os.listdir(tmp_path) == ["out"]
        if finished:
            break
    assert STEP * len(seen) > 2 * (SHARDS + 1)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.tail) for first in range(1, STEP))])
def test_killed_before_each_change_of_a_folder_while_replacing(
    first, convert, small_source, tmp_path, tmp_path_factory
):
    old = earlier_conversion(convert, small_source, tmp_path_factory.mktemp("old") / "out")
    before, before_out, out = contents(small_source), contents(old), tmp_path / "out"
    assert convert(small_source, out, link="hard")[0]
    new, seen = contents(out), []
    for change in itertools.count(first, STEP):
        put_back(old, out)
        finished, _ = convert(small_source, out, change=change, link="hard", force=True)
        assert contents(small_source) == before
        check_replaced(out, before_out, new)
        if finished:
            break
        if (left := what_is_left(tmp_path)) in seen:
            continue
        seen.append(left)
        if not is_new(out, new):
            assert convert(small_source, out, link="hard", force=True)[0]
        check_replaced(out, before_out, new, whole=True)
    assert STEP * len(seen) > 2 * (SHARDS + 1)


def heed_interrupts():
    """A suite that runs in the background of a shell ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
def test_interrupted_from_the_keyboard(source, undisturbed, tmp_path):
    command = [Path(sys.executable).with_name("hf-hyperconn"), "convert", source, "out", "--verify"]
    # running the models takes seconds, so the signal comes before the end on any machine
    options = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True, "preexec_fn": heed_interrupts}
    with subprocess.Popen([*command, "auto"], **options) as process:
        while process.poll() is None and not (tmp_path / ".out.incomplete" / ".hyperconn_plan.json").exists():
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        message = process.communicate()[1]
    assert process.returncode == 130
    assert "interrupted" in message
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()
    subprocess.run([*command, "structure"], cwd=tmp_path, check=True)
    assert contents(tmp_path / "out") == undisturbed


if __name__ == "__main__":
    serve()
