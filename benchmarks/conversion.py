"""Times `hf-hyperconn convert` against `cp -r` of the same checkpoint, with a warm and a cold page cache.

    python -m benchmarks.conversion [--gigabytes 4] [--folder DIR]

Writes results/conversion.json beside itself, and removes the checkpoint and every copy of it.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from math import prod
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "conversion.json"
BOUNDS = {"ratio_to_cp": 1.3, "memory_above_import_mb": 600, "hard_link_seconds": 5}
HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KEY_VALUE_HEADS = 2048, 8192, 32000, 16, 4
SHARDS = 4
CHUNK = 16 * 2**20


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    """A Llama checkpoint of about this size, of random bytes, written in pieces to keep this process small."""
    key_value = KEY_VALUE_HEADS * HIDDEN // HEADS
    layer_shapes = {
        "self_attn.q_proj": [HIDDEN, HIDDEN],
        "self_attn.k_proj": [key_value, HIDDEN],
        "self_attn.v_proj": [key_value, HIDDEN],
        "self_attn.o_proj": [HIDDEN, HIDDEN],
        "mlp.gate_proj": [INTERMEDIATE, HIDDEN],
        "mlp.up_proj": [INTERMEDIATE, HIDDEN],
        "mlp.down_proj": [HIDDEN, INTERMEDIATE],
        "input_layernorm": [HIDDEN],
        "post_attention_layernorm": [HIDDEN],
    }
    outer_shapes = {
        "model.embed_tokens.weight": [VOCABULARY, HIDDEN],
        "model.norm.weight": [HIDDEN],
        "lm_head.weight": [VOCABULARY, HIDDEN],
    }
    layer_bytes, outer_bytes = (sum(map(nbytes, shapes.values())) for shapes in (layer_shapes, outer_shapes))
    layers = max(1, round((gigabytes * 1e9 - outer_bytes) / layer_bytes))
    shapes = outer_shapes | {
        f"model.layers.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in layer_shapes.items()
    }
    total = sum(map(nbytes, shapes.values()))
    shards: list[dict] = [{} for _ in range(SHARDS)]
    written = 0
    for name, shape in shapes.items():
        shards[written * SHARDS // total][name] = shape
        written += nbytes(shape)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        write_shard(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def nbytes(shape: list[int]) -> int:
    return 2 * prod(shape)


def write_shard(path: Path, shapes: dict[str, list[int]]) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + nbytes(shape)]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end:
            end -= file.write(os.urandom(min(end, CHUNK)))


def warm(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK):
                pass


def cool(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(command: list) -> dict:
    """Wall time of a process from start to exit, and the most memory it held."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_mb": round(usage.ru_maxrss * 1024 / 1e6, 1),
    }


CACHES = {"warm": warm, "cold": cool}


def run_all(
    folder: Path, repeats: int, caches: Mapping[str, Callable[[Path], None]] = CACHES
) -> dict[str, dict[str, list[dict]]]:
    """Return all runs by state of the page cache and method, the methods taking turns."""
    source, out = folder / "source", folder / "out"
    convert = [Path(sys.executable).with_name("hf-hyperconn"), "convert", source, out, "-q", "--verify", "off"]
    methods = {"cp": ["cp", "-r", source, out], "convert": convert, "convert_hard": [*convert, "--link", "hard"]}
    runs = {}
    for cache, prepare in caches.items():
        runs[cache] = {name: [] for name in methods}
        for _ in range(repeats):
            for name, command in methods.items():
                os.sync()
                prepare(source)
                runs[cache][name].append(measure(command))
                shutil.rmtree(out)
                print(cache, name, runs[cache][name][-1], flush=True)
    return runs


def summarize(runs: dict, idle_mb: float) -> dict:
    medians = {
        cache: {name: statistics.median(run["seconds"] for run in taken) for name, taken in methods.items()}
        for cache, methods in runs.items()
    }
    peak = max(
        run["peak_mb"] for methods in runs.values() for name in ("convert", "convert_hard") for run in methods[name]
    )
    return {
        "median_seconds": medians,
        "ratio_to_cp": {
            cache: {name: round(median[name] / median["cp"], 3) for name in ("convert", "convert_hard")}
            for cache, median in medians.items()
        },
        "idle_import_mb": idle_mb,
        "peak_convert_mb": peak,
        "memory_above_import_mb": round(peak - idle_mb, 1),
    }


def within_bounds(summary: dict) -> dict[str, bool]:
    return {
        "ratio_to_cp": all(ratio["convert"] <= BOUNDS["ratio_to_cp"] for ratio in summary["ratio_to_cp"].values()),
        "memory_above_import_mb": summary["memory_above_import_mb"] < BOUNDS["memory_above_import_mb"],
        "hard_link_seconds": all(
            median["convert_hard"] <= BOUNDS["hard_link_seconds"] for median in summary["median_seconds"].values()
        ),
    }


def environment(folder: Path) -> dict:
    """What the figures depend on, as far as it can be told."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    file_system = subprocess.check_output(["df", "--output=fstype", folder], text=True).split()[-1]
    return {
        "cpu": models[0].partition(": ")[2] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "file_system": file_system,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "safetensors")},
        "load_before": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the checkpoint (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each method (default: 3)")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON to write (default: results/)")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.folder, prefix="conversion-") as name:
        folder = Path(name)
        facts = environment(folder)
        (folder / "source").mkdir()
        write_checkpoint(folder / "source", options.gigabytes)
        size = sum(path.stat().st_size for path in (folder / "source").iterdir())
        idle = [measure([sys.executable, "-c", "import hf_hyperconn"])["peak_mb"] for _ in range(options.repeats)]
        runs = run_all(folder, options.repeats)
    summary = summarize(runs, statistics.median(idle))
    passed = within_bounds(summary)
    result = {"checkpoint_bytes": size, **facts, **summary, "bounds": BOUNDS, "within_bounds": passed, "runs": runs}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    for bound, limit in BOUNDS.items():
        print(f"{bound} within {limit}: {'pass' if passed[bound] else 'FAIL'}")


if __name__ == "__main__":
    main()
