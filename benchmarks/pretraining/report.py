"""Tables of the finished runs, for docs/results_small.md.

Differences are taken within a seed, between runs that saw the same rows in the same order. Their interval holds the
mean with 95 % certainty if they are normally distributed (Student's t). Beside it stands the smallest mean difference
that so many seeds would have shown in 80 of 100 cases, were their standard deviation the true one.
"""

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from scipy.optimize import brentq
from scipy.stats import nct, t

from benchmarks.timing import markdown, with_tables

from .runs import FAMILIES, HC, MODELS, PAIR, PLAIN, SCALES, STUDIES, WARM_UP, Run, Scale, is_usual, tuned_as
from .train import CURVES, result_of

DOCS = CURVES.parents[2] / "docs" / "results.md"
SMALL = DOCS.with_name("results_small.md")
CERTAINTY, POWER = 0.95, 0.8
ANY_SEED = 0
TUNED = {
    "Llama": "Llama from scratch",
    "OLMoE": "OLMoE from scratch",
    "continued": "continued",
    "headers": "continued, C++ headers",
    "adapters": "continued, LoRA",
}

# rows from scratch, and what they are compared with beside the plain one
CONTRASTS = (
    ("DHC×2", "DHC×1"),
    ("DHC×4", "DHC×2"),
    ("DHC×8", "DHC×4"),
    ("DHC×2", "SHC×2"),
    ("DHC×4", "SHC×4"),
    ("DHC×4", "DHC×4 without tanh"),
    ("DHC×4", "DHC×4, projections undivided"),
    ("DHC×4", "mHC×4"),
    ("DHC×4", "iHC×4"),
)

Finished = Mapping[Run, Mapping[int, dict]]
"""The results of each setting (a run with `ANY_SEED` for its seed), by their seed."""


@dataclass(frozen=True)
class Difference:
    """Of held-out losses over seeds, in nats a byte.

    mean, half_width: the interval is mean ± half_width; None with a single seed.
    detectable: the smallest mean that would have been found.
    """

    mean: float
    half_width: float | None
    detectable: float | None

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.mean:+.4f}"
        return f"{self.mean:+.4f} ± {self.half_width:.4f}"


def interval(differences: list[float]) -> Difference:
    """Return mean and interval of differences, one a seed."""
    mean, freedom = statistics.mean(differences), len(differences) - 1
    if not freedom:
        return Difference(mean, None, None)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    quantile = t.ppf((1 + CERTAINTY) / 2, freedom)
    detectable = brentq(lambda errors: nct.sf(quantile, freedom, errors) - POWER, 0.0, 40.0)
    return Difference(mean, quantile * error, error * detectable)


def difference(results: Mapping[int, dict], reference: Mapping[int, dict]) -> Difference | None:
    """Return how much lower or higher the held-out loss is, over the seeds that both have; None when there is none."""
    apart = differences(results, reference)
    return interval(list(apart.values())) if apart else None


def differences(results: Mapping[int, dict], reference: Mapping[int, dict]) -> dict[int, float]:
    """Return how much lower or higher the held-out loss is, by seed."""
    seeds = sorted(results.keys() & reference.keys())
    return {seed: results[seed]["held_out_loss"] - reference[seed]["held_out_loss"] for seed in seeds}


def finished(runs: Iterable[Run], size: Scale) -> Finished:
    """Return the results of those runs that are finished.

    Raises `ValueError` when they were not trained on the same text.
    """
    found: dict[Run, dict[int, dict]] = {}
    versions: dict[str, set[str]] = {}
    for run in runs:
        result = result_of(run, size)
        if result is not None:
            found.setdefault(replace(run, seed=ANY_SEED), {})[run.seed] = result
            versions.setdefault(run.text, set()).add(result["corpus"]["sha256"])
    for text, hashes in versions.items():
        if len(hashes) > 1:
            raise ValueError(f"results in {CURVES / size.name} come from {len(hashes)} versions of the text {text!r}.")
    return found


def by_study(size: Scale) -> dict[str, Finished]:
    """What is finished from scratch, and continued; but for other learning rates than the best."""
    listed = [run for study in ("scratch", "continued", "variants") for run in STUDIES[study](size)]
    return {study: finished([run for run in listed if run.study == study], size) for study in ("scratch", "continued")}


def only(found: Finished, family: str, text: str = "python") -> Finished:
    """Return the settings of a family on a text."""
    return {s: results for s, results in found.items() if (s.family, s.text) == (family, text)}


def plain(setting: Run, slower: float = 1.0) -> Run:
    """Return the setting of the plain model that saw the same tokens as this one, or that many times more."""
    steps = round(slower * setting.steps)
    warm_up = round(WARM_UP * steps) if setting.warm_up and slower != 1.0 else setting.warm_up
    return replace(setting, model=PLAIN, hc_lr=1.0, noise=0.0, undivided=False, steps=steps, warm_up=warm_up)


def has_streams(setting: Run) -> bool:
    """Return whether the model has several streams, which can separate: those of frac are parts of one."""
    fields = MODELS[setting.model]
    return fields is not None and fields["hc_mult"] > 1 and fields["connection"] != "frac"


def label(setting: Run, size: Scale) -> str:
    """Return a row's name: the model, and what is not as usual."""
    usual = size.steps[setting.study]
    words = [setting.model]
    words += [f"{setting.steps / usual:g}× the steps"] * (setting.steps != usual)
    words += [f"learning rate {setting.learning_rate:g}"] * (setting.learning_rate != size.taken[tuned_as(setting)])
    words += [f"connections at {setting.hc_lr:g}× the learning rate"] * (setting.hc_lr != 1)
    words += [f"LoRA of rank {setting.rank}"] * bool(setting.rank)
    words += [f"noise of {setting.noise:g}"] * bool(setting.noise)
    words += ["projections undivided"] * setting.undivided
    words += ["no warm-up"] * (setting.warm_up == 0)
    words += ["C++ headers"] * (setting.text == "headers")
    return ", ".join(words)


def table(found: Finished, size: Scale) -> str:
    """Return Markdown: a row for each setting, against the plain model after the same tokens and time."""
    rows = []
    for setting, results in found.items():
        is_plain = setting.model == PLAIN
        same_tokens = None if is_plain else difference(results, found.get(plain(setting), {}))
        longer = found.get(plain(setting, size.slower[setting.family]), {})
        same_time = difference(results, longer) if setting.model == HC else None
        loss = statistics.mean(result["held_out_loss"] for result in results.values())
        rows.append(
            [
                label(setting, size),
                str(len(results)),
                f"{loss:.4f}",
                str(same_tokens or ""),
                _detectable(same_tokens),
                str(same_time or ""),
                f"{_streams_apart(results):.2g}" if has_streams(setting) else "",
            ]
        )
    measured = ["seeds", "held-out loss", "against plain, same tokens", "detectable", "same time", "streams apart"]
    return markdown(["", *measured], rows)


def contrasts(found: Finished, size: Scale) -> str:
    """Return Markdown: the models from scratch against one another."""
    by_label = {label(setting, size): results for setting, results in found.items()}
    rows = []
    for model, other in CONTRASTS:
        apart = difference(by_label.get(model, {}), by_label.get(other, {}))
        if apart is not None:
            rows.append([f"{model} against {other}", str(apart), _detectable(apart)])
    return markdown(["", "held-out loss", "detectable"], rows)


def families(found: Finished) -> str:
    """Return Markdown: what DHC×4 gains in a mixture of experts, against what it gains in a dense model."""
    gains = {}
    for setting, results in found.items():
        if setting.model == HC and is_usual(setting):
            gains[setting.family] = differences(results, found.get(plain(setting), {}))
    dense, mixture = (gains.get(family, {}) for family in FAMILIES)
    seeds = sorted(dense.keys() & mixture.keys())
    if not seeds:
        return ""
    apart = interval([mixture[seed] - dense[seed] for seed in seeds])
    rows = [[family, str(interval([gains[family][seed] for seed in seeds]))] for family in FAMILIES]
    return markdown(["DHC×4 against plain", "held-out loss"], [*rows, ["OLMoE against Llama", str(apart)]])


def starts(found: Finished, size: Scale) -> str:
    """Return Markdown: the held-out loss of continued models before their first step, on the rows of the curves."""
    rows = [
        [label(setting, size), f"{next(iter(results.values()))['curve'][0]['loss']:.5f}"]
        for setting, results in found.items()
        if is_usual(setting) and setting.steps == size.steps["continued"]
    ]
    return markdown(["", "held-out loss before the first step"], rows)


def tuning(found: Finished) -> str:
    """Return Markdown: the plain models' held-out loss by learning rate."""
    rows = [
        [TUNED[tuned_as(setting)], f"{setting.learning_rate:g}", f"{results[1]['held_out_loss']:.4f}"]
        for setting, results in found.items()
        if setting.study != "base"
    ]
    return markdown(["", "learning rate", "held-out loss"], rows)


def times(size: Scale) -> str:
    """Return Markdown: how long a step of the pair takes."""
    path = CURVES / size.name / "times.json"
    if not path.exists():
        return ""
    taken = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for family in FAMILIES:
        theirs, ours = (taken[family][model] for model in PAIR)
        rows.append([family, f"{theirs:.0f} ms", f"{ours:.0f} ms", f"{ours / theirs:.2f}×"])
    return markdown(["a step", *PAIR, ""], rows)


def _detectable(apart: Difference | None) -> str:
    return f"{apart.detectable:.4f}" if apart is not None and apart.detectable else ""


def _streams_apart(results: Mapping[int, dict]) -> float:
    return statistics.mean(1 - result["curve"][-1]["hc/stream_cosine"] for result in results.values())


def tables(size: Scale) -> dict[str, str]:
    """Markdown of every table of the page, by its name, for the runs that are finished."""
    found = by_study(size)
    made = {
        f"{size.name} tuning": tuning(finished(STUDIES["tuning"](size), size)),
        f"{size.name} contrasts": contrasts(only(found["scratch"], FAMILIES[0]), size),
        f"{size.name} families": families(found["scratch"]),
        f"{size.name} starts": starts(found["continued"], size),
        f"{size.name} times": times(size),
    }
    made |= {f"{size.name} scratch {family}": table(only(found["scratch"], family), size) for family in FAMILIES}
    for text in ("python", "headers"):
        made[f"{size.name} continued {text}"] = table(only(found["continued"], FAMILIES[0], text), size)
    return made


def render(page: str) -> str:
    """Return the page with its tables made anew from the finished runs of every scale that has any.

    Raises `ValueError` when a table has no place.
    """
    for size in SCALES.values():
        if (CURVES / size.name).exists():
            page = with_tables(page, tables(size))
    return page
