"""Render the page of pretraining, its tables and its figures, from the finished runs.

python -m benchmarks.pretraining.page
"""

from . import plots
from .report import CURVES, SMALL, by_study, render
from .runs import SCALES


def main() -> None:
    SMALL.write_text(render(SMALL.read_text(encoding="utf-8")), encoding="utf-8")
    for size in SCALES.values():
        if (CURVES / size.name).exists():
            plots.draw(by_study(size), size, SMALL.parent / "figures")


if __name__ == "__main__":
    main()
