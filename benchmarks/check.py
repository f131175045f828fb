"""Notice regressions: a few ratios, measured and compared with what is committed.

    python -m benchmarks.check           # a minute; exits with 1 when a ratio is above what is accepted
    python -m benchmarks.check --write   # measures ten times and accepts that, in benchmarks/results/check.json

A connection's forward with backward against adding one branch output to n streams; what a connection with fused
kernels costs the host in a training step, against a plain sub-layer, and its launches; a decoded token with
connections against without, its time and its operations; conversion against `cp -r`. All are ratios of CPU time (or
of counts) on one thread of a CPU, which other programs on the machine disturb less than time on the wall.

check.json has the lowest, the median and the highest of ten measurements in a row, made while other programs kept the
two cores busy: the highest was up to 9 percent above the lowest, of conversions 18. On other days and machines SHC
varied most, from 6.5 to 8.4. Accepted is a fifth above the highest; counts don't vary, so of them no more than the
highest is accepted. A ratio above that is measured again, and the lower one counts.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks import connections, conversion, decoding
from benchmarks.llamas import PLAIN, build
from benchmarks.timing import RESULTS, in_a_process, keep_memory, medians_ms, write

COMMITTED = RESULTS / "check.json"
CONNECTIONS = ("SHC", "DHC")
DECODED = ("DHC×4", "mHC×4")
KERNELS = ("DHC×4", "SHC×4", "mHC×4")
SHAPE = {**decoding.SHAPE, "hidden_size": 256, "intermediate_size": 688}  # of a model whose products weigh little
CONNECTION_REPEATS = 40
GIGABYTES = 1.0
TIMES = 10  # with --write
ACCEPTED = 1.2  # times the highest, for what varies


def connection_ratios() -> dict[str, float]:
    """Return the cost of a connection around an identity branch, with backward, against adding to n streams."""
    torch.manual_seed(0)
    functions = [connections.CASES[name][0](torch.float32) for name in (connections.LEAST, *CONNECTIONS)]
    both = [connections.calls(function, torch.float32)[1] for function in functions]
    least, *taken = medians_ms(both, CONNECTION_REPEATS, clock=time.process_time)
    return {f"connection, {name}": milliseconds / least for name, milliseconds in zip(CONNECTIONS, taken, strict=True)}


def host_ratios() -> dict[str, float]:
    """Return the host time of a connection's training step against a plain sub-layer's, and its launches."""
    found = in_a_process("benchmarks.host_time", "--print", *KERNELS, environment={})
    plain = found.pop(PLAIN)
    times = {f"host time, {case}": row["step_ms"] / plain["step_ms"] for case, row in found.items()}
    return times | {f"launches, {case}": row["kernels"] for case, row in found.items()}


@torch.no_grad()
def decoding_ratios() -> dict[str, float]:
    """Return time and dispatched operations of a decoded token, eager, with connections against without."""
    cases = (PLAIN, *DECODED)
    decoders = [decoding.decoder(build(SHAPE, case).eval(), compiled=False) for case in cases]
    counts = map(decoding.operations, decoders)
    taken = medians_ms(decoders, decoding.REPEATS, clock=time.process_time)
    return {
        f"{what} of a decoded token, {case}": value / plain
        for what, (plain, *others) in (("operations", counts), ("time", taken))
        for case, value in zip(DECODED, others, strict=True)
    }


def conversion_ratios() -> dict[str, float]:
    """`hf-hyperconn convert` against `cp -r` of the same files, which are in memory."""
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        source = Path(folder, "source")
        source.mkdir()
        conversion.write_checkpoint(source, GIGABYTES)
        runs = conversion.run_all(Path(folder), repeats=5, caches={"warm": conversion.warm})["warm"]
    copied, converted = (statistics.median(run["cpu_seconds"] for run in runs[method]) for method in ("cp", "convert"))
    return {"conversion": converted / copied}


MEASUREMENTS: tuple[Callable[[], dict[str, float]], ...] = (
    connection_ratios,
    host_ratios,
    decoding_ratios,
    conversion_ratios,
)


def spread(measured: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the lowest, median, highest and accepted value of each ratio in several measurements."""
    spreads = {}
    for name in measured[0]:
        values = [ratios[name] for ratios in measured]
        low, high = min(values), max(values)
        accepted = high * (1 if high == low else ACCEPTED)
        figures = {"lowest": low, "median": statistics.median(values), "highest": high, "accepted": accepted}
        spreads[name] = {figure: round(value, 3) for figure, value in figures.items()}
    return spreads


def faults(measured: Mapping[str, float], committed: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a message for each ratio that is above the accepted one.

    Raises `KeyError` for a ratio that is not committed.
    """
    return [
        f"{name}: measured {value:.3f}, accepted up to {committed[name]['accepted']:.3f} "
        f"({committed[name]['lowest']:.3f} to {committed[name]['highest']:.3f} when it was committed)"
        for name, value in measured.items()
        if round(value, 3) > committed[name]["accepted"]
    ]


def check(committed: Mapping[str, Mapping[str, float]], measurements=MEASUREMENTS) -> list[str]:
    """Measure all ratios, print them, and return their `faults`."""
    messages = []
    for measure in measurements:
        ratios = measure()
        if faults(ratios, committed):
            again = measure()
            ratios = {name: min(ratio, again[name]) for name, ratio in ratios.items()}
        for name, ratio in ratios.items():
            print(f"{name:<40}{ratio:7.3f}   accepted up to {committed[name]['accepted']:.3f}", flush=True)
        messages += faults(ratios, committed)
    return messages


def main() -> int:
    """Check, or with `--write` measure what is accepted. Returns the exit code."""
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="accept what is measured now")
    torch.set_num_threads(1)
    if parser.parse_args().write:
        measured = [
            {name: ratio for measure in MEASUREMENTS for name, ratio in measure().items()} for _ in range(TIMES)
        ]
        write(COMMITTED.name, {"times": TIMES, "ratios": spread(measured)})
        return 0
    result = json.loads(COMMITTED.read_text())
    messages = check(result["ratios"])
    for message in messages:
        print(message, file=sys.stderr)
    if messages:
        print(
            f"committed on {result['device']}, torch {result['torch']}. Find what became slower; where that is meant, "
            f"or the machine is another, accept it: python -m benchmarks.check --write",
            file=sys.stderr,
        )
    return 1 if messages else 0


if __name__ == "__main__":
    raise SystemExit(main())
