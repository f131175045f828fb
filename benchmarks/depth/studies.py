"""What the deep study trains: a plain Llama of 24 layers, and what continues it."""

from dataclasses import replace

from benchmarks.pretraining.runs import PLAIN, RANK, WARM_UP, Run, Scale
from benchmarks.pretraining.starts import FIXED

from .naming import REWARM, TEXT, best_of, name_of
from .scales import DEEP, SMALL, WIDE

OTHER_TEXT = "another text"
METHODS = (
    *("DHC×4", "DHC×4 history by type", "SHC×4 history", "attention residuals, blocks of 4", "DHC×4 history by depth"),
    *("mHC×4", "SHC×2 history", "iHC×4", "attention residuals"),
)
LONGER_WARM_UP = 200  # of 1000 steps, in the place of 50
NEW = (
    *((PLAIN, {}), (PLAIN, {"divided": True}), (PLAIN, {"warm_up": LONGER_WARM_UP})),
    *(("DHC×4", {}), ("DHC×4", {"undivided": True})),
    *((model, {}) for model in ("mHC×4", "DHC×4 history by type")),
    *((model, {}) for model in ("SHC×4", "DHC×1", "attention residuals, blocks of 4", "SHC×4 history", "DHC×2")),
    *((model, {}) for model in ("iHC×4", "Keel", "AltUp×4", "ResiDual", "DHC×8", "attention residuals")),
    *((model, {}) for model in ("DHC×4 history by depth", "DHC×4 with DyT", "DHC×4 with Derf")),
    ("DHC×4 history by type", {"alone": True}),
    *((model, {}) for model in ("mHC×4 biased", "attention residuals, blocks of 4, means")),  # their papers' starts
)
DRAWN = (PLAIN, "DHC×4", "DHC×4 history by type")
DRAWN_RATE = 4e-3  # of those that all have, the best for the plain model
MORE_RATES = {  # the plain model's loss depends most on the rate
    PLAIN: (1e-3, 3e-3, 6e-3),
    **dict.fromkeys(("DHC×4", "DHC×4 history by type", "DHC×4 with DyT", "Keel", "ResiDual"), (1e-3,)),
}
NEW_HC_LRS = {
    PLAIN: (1.0,),
    **dict.fromkeys(("DHC×4", "DHC×4 history by type", "skips"), (1.0, 3.0, 10.0)),
    **dict.fromkeys(("mHC×4", "iHC×4"), (1.0, 3.0, 10.0, 30.0)),
}
HISTORY, STATIC, LEAN, SKIPS = "DHC×4 history by type", "SHC×4 history", "SHC×2 history", "skips"
BEST_SKIPS = {"model": SKIPS, "hc_lr": 3.0}  # of three multiples, from scratch
TIMED = (*DRAWN, STATIC, LEAN, SKIPS)
SKIPPING = {"embedding_norm": True, "skips": True}  # the best rival: skips by hooks, with a norm
RIVALS = (  # in the order in which they decide something
    (PLAIN, {"skips": True}, (4e-3,)),
    (PLAIN, SKIPPING, (4e-3,)),
    (PLAIN, {"embedding_norm": True}, (4e-3, 8e-3)),
    (PLAIN, {"family": "Qwen3"}, (4e-3, 8e-3)),
    (PLAIN, {"muon": True}, (4e-3, 8e-3)),
    (HISTORY, {"muon": True}, (4e-3, 8e-3)),
    (PLAIN, {"family": "GLM-4"}, (4e-3, 8e-3)),
    (HISTORY, {"embedding_norm": True}, (4e-3, 8e-3)),
    (HISTORY, {"side_norm": True}, (4e-3,)),
    (HISTORY, {"muon": True, "embedding_norm": True}, (4e-3,)),
    (HISTORY, {"muon": True, "side_norm": True}, (4e-3,)),
    (PLAIN, {"family": "Qwen3", "embedding_norm": True}, (4e-3, 8e-3)),
    (PLAIN, {"beta2": 0.99}, (4e-3, 8e-3)),
    (PLAIN, {"warm_up": LONGER_WARM_UP}, (8e-3,)),
)
IN_BLOCKS, ADDED_HC_LRS = "attention residuals, blocks of 4", (1.0, 10.0, 100.0)
HC_LRS, USUAL_HC_LR = (3.0, 10.0, 1.0, 30.0), 3.0
HIGHER_HC_LRS = {"mHC×4": (100.0, 300.0), "iHC×4": (100.0, 300.0)}  # of those whose best is the highest of the others
SEEDS, NEW_SEEDS, FEW_SEEDS = tuple(range(1, 9)), tuple(range(1, 5)), (1, 2, 3)
PAIRED_HC_LR = {PLAIN: 1.0, "DHC×4": 3.0, "DHC×4 history by type": 10.0}  # each one's best when it is continued
SAME_HC_LR = dict.fromkeys(("DHC×4", "DHC×4 history by type"), 1.0)  # for rates that are high by themselves
DECAY = 400  # the last steps of a trunk
LONG, LONG_RATES = 10, (3e-4, 1e-3)  # times the steps
NEW_LONG, NEW_LONG_RATES = 3, (2e-3, 4e-3)
OTHER_TEXT_RATES, ADAPTER_RATES = (3e-4, 1e-3, 2e-3, 4e-3), (1e-3, 3e-3, 1e-2)
OTHER_TEXT_RATE, ADAPTER_RATE = 2e-3, 3e-3  # the best of them
MIXTURE_RATES, MORE_MIXTURE_RATES = (4e-3, 2e-3), {PLAIN: (8e-3,), "DHC×4": (1e-3,)}
DEEPER, DEEPER_RATES, MORE_DEEPER_RATES = 48, (2e-3, 4e-3, 8e-3), {PLAIN: (1e-3, 3e-3)}  # layers
AT_A_BILLION = 1.08  # times the plain one's: a step of Llama-3.2-1B with DHC×4, in benchmarks/results/models.json
SATURATED_RATES = ((5e-4, 6.0), (2.5e-4, 12.0), (1e-3, 3.0), (2e-3, 1.0))  # each with the connections' multiple
SATURATED_BEST = SATURATED_RATES[0]
LANE = 1.5  # what the second stream of the control, which is not exact, is written with


def rivals() -> list[Run]:
    """What may condition the plain model better than connections do, from scratch; and connections with that."""
    return [
        _run("scratch", model, learning_rate=rate, **settings) for model, settings, rates in RIVALS for rate in rates
    ]


def muon() -> list[Run]:
    """Return the pair with Muon over seeds, and the plain model for as long as the other takes, here and on a GPU."""
    pair = [_run("scratch", model, learning_rate=DRAWN_RATE, muon=True) for model in (PLAIN, HISTORY)]
    runs = (*pair, longer(pair[0]), as_at_a_billion(pair[0]))
    return [replace(run, seed=seed) for run in runs for seed in FEW_SEEDS]


def skips() -> list[Run]:
    """Return the plain model with a norm of the embedding and skips from it, beside it and the history start."""
    plain = _run("scratch", PLAIN, learning_rate=DRAWN_RATE)
    skipping, history = replace(plain, **SKIPPING), replace(plain, model=HISTORY)
    connected = replace(plain, **BEST_SKIPS)
    rivals = [skipping, longer(skipping), as_at_a_billion(skipping)]
    runs = [plain, *rivals, connected, history, replace(history, embedding_norm=True)]
    runs += [replace(run, muon=True) for run in (plain, skipping, connected, history)]
    return [replace(run, seed=seed) for run in runs for seed in FEW_SEEDS]


def lean() -> list[Run]:
    """Return connections whose weights no token changes: two streams with each optimizer, and four with Muon."""
    return [
        _run("scratch", model, learning_rate=DRAWN_RATE, seed=seed, muon=by_muon)
        for seed in FEW_SEEDS
        for model, by_muon in ((LEAN, True), (LEAN, False), (STATIC, True))
    ]


def parts() -> list[Run]:
    """Return the cheapest connections, whole, and with a part of them fixed at its start."""
    whole = _run("scratch", LEAN, learning_rate=DRAWN_RATE)
    return [whole, *(replace(whole, fixed=part) for part in FIXED)]


def wide_rivals() -> list[Run]:
    """Muon against AdamW at more parameters, with connections and without."""
    return [
        _run("scratch", model, WIDE, learning_rate=rate, **settings)
        for rate in (3e-3, 6e-3, 1.5e-3)
        for settings in ({"muon": True}, {})
        for model in (HISTORY, PLAIN)
    ]


def trunk() -> Run:
    """Return a plain model with a constant rate and a decay, taken at several steps."""
    steps = DEEP.steps["trunk"]
    settings = {"steps": steps, "warm_up": round(WARM_UP * steps), "decay": DECAY}
    return _run("trunk", PLAIN, learning_rate=DRAWN_RATE, **settings)


def when() -> list[Run]:
    """Return the history start and skips from scratch, or converted at each of the trunk's steps.

    The plain model does the same, and also trains for as long as the history start takes.
    """
    whole = trunk()
    scratch = [replace(whole, model=HISTORY), as_long(whole), replace(whole, **BEST_SKIPS)]
    scratch = [replace(run, study="scratch") for run in scratch]
    left = [{"start": whole.id, "at": at, "steps": whole.steps - at, "warm_up": REWARM} for at in DEEP.taken_at]
    runs = [whole, *scratch]
    for settings in reversed(left):
        runs += [
            _run("continued", model, learning_rate=times * DRAWN_RATE, decay=DECAY, **settings)
            for times in (1, 2)
            for model in (PLAIN, HISTORY)
        ]
    plain = [run for run in runs if run.at and run.model == PLAIN and run.learning_rate == DRAWN_RATE]
    return [*runs, *map(as_long, plain), *(replace(run, **BEST_SKIPS) for run in plain)]


def as_long(run: Run) -> Run:
    """Return a run at a constant rate with the steps of `longer`, its warm-up and decay unchanged."""
    return replace(longer(run), warm_up=run.warm_up)


def saturated() -> list[Run]:
    """Return the plain model and two history starts, continued on a base that has seen many tokens a parameter.

    Skips are continued at the best rate alone.
    """
    settings = {"start": base(SMALL).id, "size": SMALL}
    runs = [
        _run("continued", model, learning_rate=rate, hc_lr=1.0 if model == PLAIN else hc_lr, **settings)
        for rate, hc_lr in SATURATED_RATES
        for model in (PLAIN, HISTORY, LEAN)
    ]
    plain = [run for run in runs if run.model == PLAIN]
    rate, hc_lr = SATURATED_BEST
    runs += [*map(longer, plain), _run("continued", SKIPS, learning_rate=rate, hc_lr=hc_lr, **settings)]
    return [base(SMALL), *(replace(run, seed=seed) for seed in FEW_SEEDS for run in runs)]


def growth() -> list[Run]:
    """Return a saturated base as it is, with half as many layers again, and for as long as these take."""
    rate, hc_lr = SATURATED_BEST
    settings = {"size": SMALL, "start": base(SMALL).id, "learning_rate": rate}
    layers = 3 * SMALL.shapes["Llama"]["num_hidden_layers"] // 2
    plain, as_it_is = _run("continued", PLAIN, layers=layers, **settings), _run("continued", PLAIN, **settings)
    connected = _run("continued", "DHC×4", hc_lr=hc_lr, layers=layers, **settings)
    return [base(SMALL), as_it_is, plain, connected, _times_as_long(as_it_is, 1.5)]


def base(size: Scale = DEEP) -> Run:
    """What is continued."""
    steps = size.steps["base"]
    return Run(
        study="base",
        model=PLAIN,
        seed=0,
        learning_rate=size.base_learning_rate,
        steps=steps,
        warm_up=round(WARM_UP * steps),
        text=TEXT,
    )


def rates() -> list[Run]:
    """Every method with four learning rates of its connections and three of the body, the plain model with those."""
    middle = DEEP.taken["continued"]
    runs = [_continued(PLAIN, learning_rate=rate) for rate in DEEP.tried["continued"]]
    for model in METHODS:
        hc_lrs = (*HC_LRS, *HIGHER_HC_LRS.get(model, ()))
        runs += [_continued(model, learning_rate=middle, hc_lr=hc_lr) for hc_lr in hc_lrs]
        runs += [
            _continued(model, learning_rate=rate, hc_lr=USUAL_HC_LR)
            for rate in DEEP.tried["continued"]
            if rate != middle
        ]
    return [base(), *runs]


def added() -> list[Run]:
    """Return what was tried once: attention residuals that add to the residual stream, and normed side streams."""
    rate = DEEP.taken["continued"]
    normed = _continued(HISTORY, learning_rate=rate, hc_lr=PAIRED_HC_LR[HISTORY], side_norm=True)
    residuals = [_continued(IN_BLOCKS, learning_rate=rate, hc_lr=hc_lr, added=True) for hc_lr in ADDED_HC_LRS]
    return [base(), *residuals, normed]


def scratch_rates() -> list[Run]:
    """New models, each with three learning rates, some with more; connections have the same."""
    return [
        _run("scratch", model, learning_rate=rate, **settings)
        for model, settings in NEW
        for rate in (*DEEP.tried["scratch"], *MORE_RATES.get(model, ()))
    ]


def scratch_hc_rates() -> list[Run]:
    """New models at the plain model's best rate, with others for their connections."""
    return [
        _run("scratch", model, learning_rate=DRAWN_RATE, hc_lr=hc_lr)
        for model, hc_lrs in NEW_HC_LRS.items()
        for hc_lr in hc_lrs
    ]


def continued() -> list[Run]:
    """Return every method at its best, and a control that is not exact, with all seeds."""
    control = _continued("SHC×2", learning_rate=DEEP.taken["continued"], hc_lr=USUAL_HC_LR, lane=LANE)
    chosen = [*best_of(rates()), control]
    return [base(), *(replace(run, seed=seed) for seed in SEEDS for run in chosen)]


def scratch() -> list[Run]:
    """New models, each at its best, and the plain one also for as long as DHC×4 takes, with all seeds.

    Of those that are drawn, one of which not all rates were tried has the plain model's best.
    """
    tried = [*scratch_rates(), *scratch_hc_rates()]
    chosen = best_of(tried)
    drawn = [run for run in scratch_rates() if name_of(run) in DRAWN and run.learning_rate == DRAWN_RATE]
    chosen += [run for run in drawn if name_of(run) not in map(name_of, chosen)]
    plain = [run for run in chosen if name_of(run) == PLAIN]
    chosen += [other for run in plain for other in (longer(run), as_at_a_billion(run))]
    return [replace(run, seed=seed) for seed in NEW_SEEDS for run in chosen]


def longer(run: Run) -> Run:
    """Return the run with as many steps as the plain model makes in the time of one with connections."""
    return _times_as_long(run, DEEP.slower[run.family])


def as_at_a_billion(run: Run) -> Run:
    """Return the same, if a step cost as much more as it does at a billion parameters."""
    return _times_as_long(run, AT_A_BILLION)


def long() -> list[Run]:
    """The pair and its history start, continued ten times as long; the plain one also for as long as those take."""
    runs = [_times_as_long(run, LONG) for run in _paired(LONG_RATES)]
    plain = [run for run in runs if run.model == PLAIN]
    return [base(), *runs, *map(longer, plain), *map(as_at_a_billion, plain)]


def scratch_long_rates() -> list[Run]:
    """Return the drawn models, trained three times as long, each with the same learning rates."""
    return [
        _times_as_long(_run("scratch", model, learning_rate=rate), NEW_LONG)
        for rate in NEW_LONG_RATES
        for model in DRAWN
    ]


def scratch_long() -> list[Run]:
    """Return each at its best with a few seeds, the plain one also for as long as connections take, and with skips."""
    chosen = best_of(scratch_long_rates())
    plain = [run for run in chosen if run.model == PLAIN]
    chosen += [other for run in plain for other in (longer(run), as_at_a_billion(run), replace(run, **SKIPPING))]
    return [replace(run, seed=seed) for seed in FEW_SEEDS for run in chosen]


def other_text_rates() -> list[Run]:
    """Return the same, continued on a text that the base does not know."""
    same = _paired((OTHER_TEXT_RATE,), SAME_HC_LR, text=OTHER_TEXT)
    return [base(), *_paired(OTHER_TEXT_RATES, text=OTHER_TEXT), *same]


def adapter_rates() -> list[Run]:
    """Return the same, continued by adapters and connections alone."""
    return [base(), *_paired(ADAPTER_RATES, rank=RANK), *_paired((ADAPTER_RATE,), SAME_HC_LR, rank=RANK)]


def other_text() -> list[Run]:
    """Return each at its best on the other text, with a few seeds."""
    return [base(), *_with_seeds(other_text_rates())]


def adapters() -> list[Run]:
    """Return each at its best with adapters, with a few seeds."""
    return [base(), *_with_seeds(adapter_rates())]


def mixtures() -> list[Run]:
    """New mixtures of experts."""
    return [
        _run("scratch", model, learning_rate=rate, family="OLMoE")
        for model in DRAWN
        for rate in (*MIXTURE_RATES, *MORE_MIXTURE_RATES.get(model, ()))
    ]


def deeper() -> list[Run]:
    """New models of twice as many layers, at rates up to one that the plain model can't take at half as many."""
    return [
        _run("scratch", model, learning_rate=rate, layers=DEEPER)
        for model in (PLAIN, "Keel", "DHC×4 history by type")
        for rate in (*DEEPER_RATES, *MORE_DEEPER_RATES.get(model, ()))
    ]


def wide_rates() -> list[Run]:
    """Return the drawn models, wider, each with the same learning rates."""
    return [_run("scratch", model, WIDE, learning_rate=rate) for rate in WIDE.tried["scratch"] for model in DRAWN]


def wide() -> list[Run]:
    """Return each of them at its best, with a few seeds."""
    return [replace(run, seed=seed) for seed in FEW_SEEDS for run in best_of(wide_rates(), WIDE)]


STUDIES = {
    "rates": rates,
    "added": added,
    "continued": continued,
    "scratch-rates": scratch_rates,
    "scratch-hc-rates": scratch_hc_rates,
    "scratch": scratch,
    "scratch-long-rates": scratch_long_rates,
    "scratch-long": scratch_long,
    "long": long,
    "other-text-rates": other_text_rates,
    "other-text": other_text,
    "adapter-rates": adapter_rates,
    "adapters": adapters,
    "mixtures": mixtures,
    "deeper": deeper,
    "rivals": rivals,
    "muon": muon,
    "skips": skips,
    "lean": lean,
    "when": when,
    "saturated": saturated,
    "growth": growth,
    "parts": parts,
    "wide-rivals": wide_rivals,
    "wide-rates": wide_rates,
    "wide": wide,
}


def size_of(study: str) -> Scale:
    """Return the scale of a study."""
    if study in ("saturated", "growth"):
        return SMALL
    return WIDE if study.startswith("wide") else DEEP


def _times_as_long(run: Run, times: float) -> Run:
    steps = round(times * run.steps)
    return replace(run, steps=steps, warm_up=round(WARM_UP * steps))


def _paired(rates: tuple[float, ...], hc_lrs: dict[str, float] = PAIRED_HC_LR, **settings) -> list[Run]:
    return [
        _continued(model, learning_rate=rate, hc_lr=hc_lr, **settings)
        for rate in rates
        for model, hc_lr in hc_lrs.items()
    ]


def _with_seeds(tried: list[Run]) -> list[Run]:
    return [replace(run, seed=seed) for seed in FEW_SEEDS for run in best_of(tried)]


def _continued(model: str, **settings) -> Run:
    return _run("continued", model, start=base().id, **settings)


def _run(study: str, model: str, size: Scale = DEEP, **settings) -> Run:
    steps = size.steps[study]
    usual = {"seed": 1, "steps": steps, "warm_up": round(WARM_UP * steps), "text": TEXT}
    return Run(study=study, model=model, **{**usual, **settings})
