"""Every figure of docs/performance.md, and the exports of docs/serving.md, in one command.

    python -m benchmarks.performance            # measures, then writes tables and plot
    python -m benchmarks.performance --render   # only writes tables and plot, from benchmarks/results

Runs the benchmarks of this folder, one after the other, on the device there is. benchmarks.exports needs the extras
onnx and openvino.
"""

import argparse
import json
import subprocess
import sys
from itertools import product

from benchmarks.timing import RESULTS, fill, markdown

REPOSITORY = RESULTS.parents[1]
PAGES = tuple(REPOSITORY / page for page in ("docs/performance.md", "docs/serving.md"))
PLOT = RESULTS / "connections.png"
MODULES = (
    *("connections", "attention_residuals", "kernels", "host_time", "kinds", "models"),
    *("compilation", "decoding", "exports"),
)
ADD = "residual, n streams"
DTYPES = ("float32", "bfloat16")
WAYS = list(product(DTYPES, ("eager", "compiled")))
TITLES = {
    "step": "training step",
    "prefill": "prefill",
    "decode": "a decoded token",
    "memory": "kept for the backward",
}
UNITS = {"step": "ms", "prefill": "ms", "decode": "ms", "memory": "MiB"}


def connections_table(result: dict) -> str:
    """Return Markdown: forward with backward of one connection, as multiples of adding to n streams."""
    rows = {(row["case"], row["dtype"], row["mode"]): row for row in result["rows"]}

    def cell(case: str, kind: tuple[str, str]) -> str:
        row = rows[(case, *kind)]
        return f"{row['both_ms']:.1f} ms" + ("" if case == ADD else f" ({row['both_ratio']:.1f}×)")

    cases = dict.fromkeys(row["case"] for row in result["rows"])
    return markdown(["", *map(", ".join, WAYS)], [[case, *(cell(case, kind) for kind in WAYS)] for case in cases])


def attention_table(result: dict) -> str:
    """Return Markdown: one read of attention residuals, forward with backward, and its largest error."""
    rows = []
    for case in result["rows"][0]["cases"]:
        figures = [row["cases"][case] for row in result["rows"]]
        rows.append([case, *(f"{figure['both_ms']:.1f} ms ({figure['error']:.0e})" for figure in figures)])
    return markdown(["", *(f"M = {row['values']}, {row['dtype']}" for row in result["rows"])], rows)


def kernels_table(result: dict) -> str:
    """Return Markdown: the fused kernels of a step, as multiples of a copy, and as they were before."""
    before = json.loads((RESULTS / "kernels_cuda_before.json").read_text())["rows"]
    rows = []
    for row, earlier in zip(result["rows"], before, strict=True):
        n, size, taken = row["streams"], row["hidden_size"], row["us"]
        moved = 6 * n + 6  # rows of D a token, as in the docstring of hc_kernels.py
        copied = moved * size * row["tokens"] * {"bfloat16": 2, "float32": 4}[row["dtype"]] / 1e3 / result["copy_gb_s"]
        whole = sum(taken.values())
        shape = f"{row['tokens']} tokens, N = {n}, D = {size}, {row['dtype']}"
        each = (f"{time:.0f} µs" for time in taken.values())
        rows.append([shape, *each, f"{whole:.0f} µs ({whole / copied:.1f}×)", f"{sum(earlier['us'].values()):.0f} µs"])
    return markdown(["", "forward", "backward", "gradient of fn", "together", "before"], rows)


def models_table(result: dict) -> str:
    """Return Markdown: what whole models take, of every shape and case, as far as it was measured."""
    measured = [what for what in TITLES if any(what in row for row in result["rows"])]
    rows = []
    for row in result["rows"]:
        cells = [_cell(row[what], UNITS[what]) if what in row else "" for what in measured]
        rows.append([f"{row['shape']}: {row['case']}", f"{row['tokens']:,}", *cells])
    return markdown(["", "tokens", *map(TITLES.get, measured)], rows)


def kinds_table(result: dict) -> str:
    """Return Markdown: forward with backward of each kind's connection in a stack, and the memory of all."""
    rows = {(row["case"], row["dtype"]): row for row in result["rows"]}

    def cells(row: dict) -> list[str]:
        times = [row.get(mode) for mode in ("eager", "compiled")]
        shown = [f"{taken['ms']:.2f} ms ({taken['ratio']:.2f}×)" if taken else "" for taken in times]
        return [*shown, f"{row['kept_mib']:.0f} MiB"]

    head = [", ".join(words) for words in product(DTYPES, ("eager", "compiled", "kept"))]
    cases = dict.fromkeys(case for case, _ in rows)
    return markdown(
        ["", *head], [[case, *(cell for dtype in DTYPES for cell in cells(rows[case, dtype]))] for case in cases]
    )


def compilation_table(result: dict) -> str:
    """Return Markdown: what compiling a model's first training step takes, whole and layer by layer."""
    ways = {"whole": "whole", "layers": "layer by layer"}
    rows = [[row["case"], *(_timed(row[way], "seconds", "s") for way in ways)] for row in result["rows"]]
    return markdown(["", *ways.values()], rows)


def decoding_table(result: dict) -> str:
    """Return Markdown: one decoded token, now and as it was before."""
    before = {row["case"]: row for row in json.loads((RESULTS / "decoding_before.json").read_text())["rows"]}
    rows = []
    for row in result["rows"]:
        pair = before[row["case"]], row
        counts = " → ".join(f"{measured['operations_a_connection']:.0f}" for measured in pair)
        ways = [way for way in ("eager", "compiled") if way in row]
        rows.append(
            [row["case"], counts, *(" → ".join(f"{measured[way]['ratio']:.2f}×" for measured in pair) for way in ways)]
        )
    return markdown(["", "operations a connection", "eager", "compiled"], rows)


def exports_table(result: dict) -> str:
    """Return Markdown: prefill of exported models."""
    engines = [name for name in result["rows"][0] if name != "case"]
    rows = [[row["case"], *(_timed(row[engine], "ms", "ms") for engine in engines)] for row in result["rows"]]
    return markdown(["", *engines], rows)


def host_time_table(result: dict) -> str:
    """Return Markdown: what a connection costs the host, before and now, and what it launches."""
    rows = []
    for case in result["after"]:
        runs = [result[name][case] for name in ("before", "after") if name in result]
        times = [" → ".join(f"{run[way]:.2f}" for run in runs) + " ms" for way in ("forward_ms", "step_ms")]
        counts = [" → ".join(str(round(run[what])) for run in runs) for what in ("kernels", "operations")]
        rows.append([f"{case}, a sub-layer" if case == "plain" else case, *times, *counts])
    return markdown(["", "forward", "training step", "launches of kernels", "torch's operations"], rows)


def overhead_table(result: dict) -> str:
    """Return Markdown: what hyper-connections cost the first shape, as multiples of the plain model."""
    shape = result["rows"][0]["shape"]
    by_case = {row["case"]: row for row in result["rows"] if row["shape"] == shape}
    cases = {"eager": "HC", "compiled": "HC, compiled"}
    rows = [[how, *(f"{by_case[case][what]['ratio']:.2f}×" for what in TITLES)] for how, case in cases.items()]
    return markdown([shape, *TITLES.values()], rows)


def _timed(figure: dict, name: str, unit: str) -> str:
    return f"{figure['ratio']:.2f}× ({figure[name]:.0f} {unit})"


def _cell(figure: dict, unit: str) -> str:
    return f"{figure['ratio']:.2f}× ({figure['extrapolated']['measured']:,.0f} {unit})"


def plot(result: dict) -> None:
    """Bars of the connections' forward with backward, as multiples of adding to n streams."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in dict.fromkeys(row["case"] for row in result["rows"]) if not case.startswith("residual")]
    rows = {(row["case"], row["dtype"], row["mode"]): row["both_ratio"] for row in result["rows"]}
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    greys = ("0.25", "0.45", "0.65", "0.85")
    for k, (kind, grey) in enumerate(zip(WAYS, greys, strict=True)):
        heights = [rows[(case, *kind)] for case in cases]
        bars = axes.barh([i + 0.2 * k for i in range(len(cases))], heights, 0.18, color=grey, label=", ".join(kind))
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([i + 0.3 for i in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_xlabel("forward and backward, as a multiple of adding one branch output to n streams")
    shape = result["shape"]
    about = f"{shape['tokens']} tokens, {shape['streams']} streams, D = {shape['hidden_size']}"
    axes.set_title(f"{result['device']}: {about}", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(PLOT, dpi=120)


def render(text: str) -> str:
    """Return the page with those tables that it has made anew from benchmarks/results."""
    tables = {
        "connections": ("connections", connections_table),
        "attention": ("attention_residuals", attention_table),
        "kinds": ("kinds", kinds_table),
        "models": ("models", models_table),
        "overhead": ("models", overhead_table),
        "host time": ("host_time", host_time_table),
        "compilation": ("compilation", compilation_table),
        "decoding": ("decoding", decoding_table),
        "exports": ("exports", exports_table),
        "kernels cuda": ("kernels_cuda", kernels_table),
        "connections cuda": ("connections_cuda", connections_table),
        "models cuda": ("models_cuda", models_table),
    }
    for name, (file, table) in tables.items():
        result = json.loads((RESULTS / f"{file}.json").read_text())
        text = fill(text, name, result, table(result))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    if not parser.parse_args().render:
        for module in MODULES:
            subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], check=True)
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    plot(json.loads((RESULTS / "connections.json").read_text()))


if __name__ == "__main__":
    main()
