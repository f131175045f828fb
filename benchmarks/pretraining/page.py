"""Render the page of pretraining, its tables and its figures, from the finished runs.

python -m benchmarks.pretraining.page
"""

from . import plots
from .report import CURVES, DOCS, by_study, render
from .runs import SCALES


def main() -> None:
    DOCS.write_text(render(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    for size in SCALES.values():
        if (CURVES / size.name).exists():
            plots.draw(by_study(size), size, DOCS.parent / "figures")


if __name__ == "__main__":
    main()
