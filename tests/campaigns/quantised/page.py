"""What quantization did last, and its table in docs/quantised.md."""

from benchmarks.timing import markdown
from tests.campaigns.figures import Figures, named


def tables(figures: dict) -> dict[str, str]:
    """Return one table, with a row for each scheme and a column for each model."""
    rows = figures["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    schemes = {row["scheme"]: [] for row in rows}
    for row in rows:
        schemes[row["scheme"]].append(row)
    noises = {model: max(row["noise"] for row in rows if row["model"] == model) for model in models}
    body = [[scheme, *map(_cell, of), _all(of, "connections"), _all(of, "reloaded")] for scheme, of in schemes.items()]
    noise = ["1 % of random noise, not quantized", *map(_percent, noises.values()), "", ""]
    table = markdown(["", *models, "connections unchanged", "same logits when loaded again"], [*body, noise])
    versions = "; ".join(named(versions) for versions in figures["versions"].values())
    return {"quantised": f"{versions}.\n\n{table}"}


def _cell(row: dict) -> str:
    if "error" in row:
        return "fails"
    return _percent(row["distance"]) + ", as the base" * row.get("equal_to_base", False)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _all(rows: list[dict], key: str) -> str:
    values = [row[key] for row in rows if key in row]
    return "yes" if values and all(values) else "no"


FIGURES = Figures("docs/quantised.json", "docs/quantised.md", tables)
