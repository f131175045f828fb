"""Every figure of docs/performance.md and of the README, in one command.

    python -m benchmarks.performance            # measures, then writes tables and plot
    python -m benchmarks.performance --render   # only writes tables and plot, from benchmarks/results

Runs benchmarks.connections and benchmarks.models on the device there is and says what it could not measure.
"""

import argparse
import json
import subprocess
import sys

from benchmarks.timing import RESULTS, fill

REPOSITORY = RESULTS.parents[1]
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "performance.md")
PLOT = RESULTS / "connections.png"
ADD = "residual, n streams"


def connections_table(result: dict) -> str:
    """Markdown: forward with backward of one connection, as multiples of adding to n streams."""
    kinds = [(dtype, mode) for dtype in ("float32", "bfloat16") for mode in ("eager", "compiled")]
    lines = ["| | " + " | ".join(f"{dtype}, {mode}" for dtype, mode in kinds) + " |", "|---|" + "---|" * len(kinds)]
    rows = {(row["case"], row["dtype"], row["mode"]): row for row in result["rows"]}
    for case in dict.fromkeys(row["case"] for row in result["rows"]):
        cells = []
        for kind in kinds:
            row = rows[(case, *kind)]
            cells.append(f"{row['both_ms']:.1f} ms" + ("" if case == ADD else f" ({row['both_ratio']:.1f}×)"))
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def models_table(result: dict) -> str:
    """Markdown: what whole models take, of every shape and case, as far as it was measured."""
    titles = {
        "step": "training step",
        "prefill": "prefill",
        "decode": "a decoded token",
        "memory": "kept for the backward",
    }
    measured = [what for what in titles if any(what in row for row in result["rows"])]
    lines = ["| | " + " | ".join(titles[what] for what in measured) + " |", "|---|" + "---|" * len(measured)]
    for row in result["rows"]:
        cells = [_cell(row[what], "MiB" if what == "memory" else "ms") if what in row else "" for what in measured]
        lines.append(f"| {row['shape']}: {row['case']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(figure: dict, unit: str) -> str:
    return f"{figure['ratio']:.2f}× ({figure['extrapolated']['measured']:,.0f} {unit})"


def plot(result: dict) -> None:
    """Bars of the connections' forward with backward, as multiples of adding to n streams."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [(dtype, mode) for dtype in ("float32", "bfloat16") for mode in ("eager", "compiled")]
    cases = [case for case in dict.fromkeys(row["case"] for row in result["rows"]) if not case.startswith("residual")]
    rows = {(row["case"], row["dtype"], row["mode"]): row["both_ratio"] for row in result["rows"]}
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    greys = ("0.25", "0.45", "0.65", "0.85")
    for k, (kind, grey) in enumerate(zip(kinds, greys, strict=True)):
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


def overhead_table(result: dict) -> str:
    """Markdown: what hyper-connections cost the first shape, as multiples of the plain model."""
    titles = {
        "step": "training step",
        "prefill": "prefill",
        "decode": "a decoded token",
        "memory": "kept for backward",
    }
    shape = result["rows"][0]["shape"]
    rows = {row["case"]: row for row in result["rows"] if row["shape"] == shape}
    lines = [f"| {shape} | " + " | ".join(titles.values()) + " |", "|---|" + "---|" * len(titles)]
    for case, how in {"HC": "eager", "HC, compiled": "compiled"}.items():
        lines.append(f"| {how} | " + " | ".join(f"{rows[case][what]['ratio']:.2f}×" for what in titles) + " |")
    return "\n".join(lines)


def render(text: str) -> str:
    """The page with those tables that it has made anew from benchmarks/results."""
    tables = {
        "connections": ("connections", connections_table),
        "models": ("models", models_table),
        "overhead": ("models", overhead_table),
    }
    for name, (file, table) in tables.items():
        result = json.loads((RESULTS / f"{file}.json").read_text())
        text = fill(text, name, result, table(result))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    if not parser.parse_args().render:
        for module in ("connections", "models"):
            subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], check=True)
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    plot(json.loads((RESULTS / "connections.json").read_text()))


if __name__ == "__main__":
    main()
