"""The figure of the deep study: losses over tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.drawing import draw_curves, panels, save


def draw(results: Mapping[str, Sequence[dict]], path: Path) -> None:
    """Draw held-out loss over tokens for each name, without the first point, which is far above."""
    figure, (ax,) = panels(1)
    draw_curves(
        ax,
        {
            name: [
                [(point["step"] * result["tokens_a_step"] / 1e6, point["loss"]) for point in result["curve"][1:]]
                for result in of_seeds
            ]
            for name, of_seeds in results.items()
        },
    )
    seeds = " or ".join(map(str, sorted({len(of_seeds) for of_seeds in results.values()})))
    ax.set(xlabel="million tokens of training", ylabel="held-out loss, nats a token (lower is better)")
    ax.set_title(f"24 layers from scratch: mean and range of {seeds} seeds")
    save(figure, path)
