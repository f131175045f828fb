"""The figure of the deep study: losses over tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot


def draw(results: Mapping[str, Sequence[dict]], path: Path) -> None:
    """Held-out loss over tokens, a color a name, a line a seed; without the first point, which is far above."""
    figure, ax = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for place, (name, of_seeds) in enumerate(results.items()):
        for each, result in enumerate(of_seeds):
            points = result["curve"][1:]
            tokens = [point["step"] * result["tokens_a_step"] / 1e6 for point in points]
            losses = [point["loss"] for point in points]
            ax.plot(tokens, losses, color=pyplot.cm.tab10(place), marker=".", label=None if each else name)
    ax.set(xlabel="million tokens of training", ylabel="held-out loss, nats a token (lower is better)")
    ax.set_title("Llama of 24 layers, trained from scratch; a line a seed")
    ax.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
