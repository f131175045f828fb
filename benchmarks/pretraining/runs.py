"""What is trained: the shapes for each kind of device, and the runs of each study in the order they are made."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.timing import device

SEEDS = (1, 2, 3)
WARM_UP = 0.05  # of the steps
NOISE, RANK = 0.01, 8
HC_LR = 10.0  # the recipe's, wherever others are not tried; 1 where the base's learning rate is as high by itself

DHC4 = {"connection": "dhc", "hc_mult": 4}
MODELS = {
    "Pre-Norm": None,
    "DHC×1": {"connection": "dhc", "hc_mult": 1},
    "DHC×2": {"connection": "dhc", "hc_mult": 2},
    "DHC×4": DHC4,
    "SHC×2": {"connection": "shc", "hc_mult": 2},
    "SHC×4": {"connection": "shc", "hc_mult": 4},
    "DHC×4 without tanh": {**DHC4, "hc_tanh": False},
    "mHC×4": {"connection": "mhc", "hc_mult": 4},
    "iHC×4": {"connection": "ihc", "hc_mult": 4},
    "DHC×8": {"connection": "dhc", "hc_mult": 8},
    "frac×4": {"connection": "frac", "hc_mult": 4},
}
HISTORY = {"hc_start": "history", "hc_readout": "weighted"}
DEEP_MODELS = {
    "DHC×4 history by type": {**DHC4, **HISTORY},
    "DHC×4 history by depth": {**DHC4, **HISTORY, "hc_history": "depth"},
    "SHC×2 history": {"connection": "shc", "hc_mult": 2, **HISTORY},
    "SHC×4 history": {"connection": "shc", "hc_mult": 4, **HISTORY},
    "attention residuals": {"connection": "attnres", "hc_mult": 1},
    "attention residuals, blocks of 4": {"connection": "attnres", "hc_mult": 1, "hc_block": 4},
    "attention residuals, blocks of 4, means": {
        "connection": "attnres",
        "hc_mult": 1,
        "hc_block": 4,
        "hc_attention": "mean",
    },
    "mHC×4 biased": {"connection": "mhc", "hc_mult": 4, "hc_start": "biased"},
    "AltUp×4": {"connection": "altup", "hc_mult": 4},
    "ResiDual": {"connection": "dual", "hc_mult": 2},
    "Keel": {"connection": "keel", "hc_mult": 1},
    "skips": {"connection": "skip", "hc_mult": 2},
    "DHC×4 with DyT": {**DHC4, "norm": "dyt"},
    "DHC×4 with Derf": {**DHC4, "norm": "derf"},
}
PLAIN, HC = PAIR = ("Pre-Norm", "DHC×4")
FAMILIES = ("Llama", "OLMoE")
SLOW_TO_COMPILE = ("DHC×8",)


@dataclass(frozen=True)
class Scale:
    """Shapes and lengths for one kind of device.

    shapes: of the models, by family.
    length, batch: tokens of a row, rows of a step.
    steps: of a run from scratch, of the base that is continued, and of a continuation.
    tried: learning rates for the plain model; taken: the best of them (a test compares with the results).
    base_learning_rate: of the base, which is trained before.
    slower: how many steps the plain model makes in the time of one of DHC×4, at least (a test compares with times.py).
    held_out: rows that curves are evaluated on, and that a model is at its end.
    compiled: families whose training is compiled.
    vocabulary: tokens that there are; 256 where a token is a byte.
    keeps_base: whether the base's weights are kept beside the results, rounded to bfloat16.
    taken_at: steps at which a trunk's weights are kept for those that start from them.
    by_layer: whether layers are compiled one by one, which takes a third of the time that a deep model does whole.
    """

    name: str
    shapes: dict[str, dict[str, Any]]
    length: int
    batch: int
    steps: dict[str, int]
    tried: dict[str, tuple[float, ...]]
    taken: dict[str, float]
    base_learning_rate: float
    slower: dict[str, float]
    held_out: tuple[int, int]
    compiled: tuple[str, ...]
    vocabulary: int = 256
    keeps_base: bool = False
    taken_at: tuple[int, ...] = ()
    by_layer: bool = False


SCALES = {
    "cpu": Scale(
        "cpu",
        shapes={
            "Llama": {
                "hidden_size": 128,
                "intermediate_size": 344,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            "OLMoE": {
                "hidden_size": 128,
                "intermediate_size": 96,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "num_experts": 8,
                "num_experts_per_tok": 2,
            },
        },
        length=256,
        batch=4,
        steps={"scratch": 2000, "base": 2500, "continued": 300},
        tried={
            "Llama": (1e-3, 2e-3, 4e-3),
            "OLMoE": (5e-4, 1e-3, 2e-3, 4e-3),
            "continued": (1e-4, 3e-4, 1e-3),
            "headers": (3e-4, 1e-3, 3e-3, 6e-3),
            "adapters": (3e-4, 1e-3, 3e-3, 1e-2),
        },
        taken={"Llama": 2e-3, "OLMoE": 1e-3, "continued": 3e-4, "headers": 3e-3, "adapters": 3e-3},
        base_learning_rate=2e-3,
        slower={"Llama": 1.3, "OLMoE": 1.9},
        held_out=(64, 512),
        compiled=("Llama",),
    ),
    "cuda": Scale(
        "cuda",
        shapes={
            "Llama": {
                "hidden_size": 512,
                "intermediate_size": 1376,
                "num_hidden_layers": 12,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
            },
            "OLMoE": {
                "hidden_size": 384,
                "intermediate_size": 256,
                "num_hidden_layers": 12,
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
                "num_experts": 16,
                "num_experts_per_tok": 4,
            },
        },
        length=512,
        batch=64,
        steps={"scratch": 2000, "base": 4000, "continued": 500},
        tried={
            "Llama": (1e-3, 2e-3, 4e-3),
            "OLMoE": (1e-3, 2e-3, 4e-3),
            "continued": (1e-4, 3e-4, 1e-3),
            "headers": (3e-4, 1e-3, 3e-3),
            "adapters": (3e-4, 1e-3, 3e-3),
        },
        taken={"Llama": 2e-3, "OLMoE": 2e-3, "continued": 3e-4, "headers": 1e-3, "adapters": 1e-3},
        base_learning_rate=2e-3,
        slower={"Llama": 1.2, "OLMoE": 1.2},
        held_out=(128, 1024),
        compiled=("Llama", "OLMoE"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: everything that its result depends on, but for the code.

    study: "scratch", "base", "trunk" or "continued".
    model: a name in `MODELS`. family: a name in `train.CLASSES`.
    learning_rate: the highest one; hc_lr: that of the connections, as a multiple.
    steps: of training; warm_up: of these, those with a rising learning rate.
    decay: the last steps, with a falling rate after a constant one; 0 where the rate follows a cosine.
    text: the corpus. start: the id of the run whose model is continued.
    at: the step of that run at which its model is taken; the rows go on from there.
    rank: of LoRA adapters, which are then trained with the connections instead of all weights.
    noise: standard deviation of what is added to A_m and A_r after the conversion.
    undivided: whether the weights that write to the streams start as the plain model's, not divided by √n, as the HC
        paper has those of its connections.
    divided: of a plain model, whether those weights start divided as DHC×4's.
    lane: what the second stream is written with at the start; a conversion where it is not 1 is not exact.
    alone: whether side streams of the history start hold the embedding alone, so that no sub-layer writes them.
    layers: how many, where not as many as the scale has; a start of fewer gets copies that add nothing yet.
    added: whether attention residuals add to the residual stream, by a gate that starts at zero.
    fixed: the part of its connections that isn't trained, a word of `starts.FIXED`.
    beta2: of AdamW.
    muon: whether Muon trains the matrices of the layers, and AdamW all else.
    embedding_norm: whether an RMSNorm follows the embedding.
    skips: of a plain model, whether each layer also reads the embedding.
    side_norm: of the history start, whether its side streams hold a norm of the embedding.
    """

    study: str
    model: str
    seed: int
    learning_rate: float
    steps: int
    warm_up: int
    family: str = "Llama"
    hc_lr: float = 1.0
    text: str = "python"
    start: str | None = None
    rank: int = 0
    noise: float = 0.0
    undivided: bool = False
    divided: bool = False
    lane: float = 1.0
    alone: bool = False
    layers: int = 0
    added: bool = False
    fixed: str = ""
    beta2: float = 0.95
    muon: bool = False
    embedding_norm: bool = False
    side_norm: bool = False
    skips: bool = False
    decay: int = 0
    at: int = 0

    @property
    def id(self) -> str:
        """Return a name for files: what differs from the usual, and the seed."""
        usual = {name: field.default for name, field in self.__dataclass_fields__.items()}
        words = [self.study, self.family, self.model, f"lr{self.learning_rate:g}", f"steps{self.steps}"]
        words += [f"warmup{self.warm_up}"] * (self.warm_up != round(WARM_UP * self.steps))
        words += [
            f"{name}{getattr(self, name):g}"
            for name in ("hc_lr", "rank", "noise", "lane", "layers", "beta2", "decay", "at")
            if getattr(self, name) != usual[name]
        ]
        flags = ("undivided", "divided", "alone", "added", "muon", "embedding_norm", "side_norm", "skips")
        words += [name for name in flags if getattr(self, name)]
        words += [f"fixed {self.fixed}"] * bool(self.fixed)
        words += [self.text] * (self.text != usual["text"])
        return "-".join([*words, f"seed{self.seed}"]).lower().replace(" ", "_").replace(",", "").replace("×", "x")


def tuned_as(run: Run) -> str:
    """Which of a scale's learning rates a run takes."""
    if run.start is None:
        return run.family
    return "adapters" if run.rank else "headers" if run.text == "headers" else "continued"


def is_compiled(run: Run, size: Scale) -> bool:
    """Return whether a run's training is compiled; else what that takes is more than what it saves."""
    return run.family in size.compiled and run.model not in SLOW_TO_COMPILE and not run.rank


def is_usual(run: Run) -> bool:
    """Return whether all weights are trained, with warm-up, from the usual start, on the text that the base knows."""
    return run.text == "python" and run.warm_up > 0 and not run.rank and not run.undivided


def is_drawn(run: Run) -> bool:
    """Return whether the connections are drawn, before and after."""
    return run.seed == 1 and run.model == HC and is_usual(run) and not run.noise and run.hc_lr <= HC_LR


def scale() -> Scale:
    """Return the scale for this device."""
    return SCALES[device()]


def tuning(size: Scale) -> list[Run]:
    """Return the plain models with each learning rate: from scratch, and continued."""
    kinds = {family: ("scratch", {"family": family}) for family in FAMILIES}
    kinds |= {
        "continued": ("continued", {}),
        "headers": ("continued", {"text": "headers"}),
        "adapters": ("continued", {"rank": RANK}),
    }
    runs = [
        _run(size, study, PLAIN, 1, learning_rate=rate, **settings)
        for kind, (study, settings) in kinds.items()
        for rate in size.tried[kind]
    ]
    return [base(size), *runs]


def scratch(size: Scale) -> list[Run]:
    """Return the pair with all seeds, and the plain model for as long as DHC×4 takes."""
    runs = []
    for family in FAMILIES:
        longer = round(size.steps["scratch"] * size.slower[family])
        runs += [_run(size, "scratch", model, seed, family=family) for model in PAIR for seed in SEEDS]
        runs += [_run(size, "scratch", PLAIN, seed, family=family, steps=longer) for seed in SEEDS]
    return runs


def base(size: Scale) -> Run:
    """What continuations start from."""
    return _run(size, "base", PLAIN, 0, learning_rate=size.base_learning_rate)


def continued(size: Scale) -> list[Run]:
    """Return the pair with each learning rate of the connections, with noise, on other text, and with adapters."""
    other_text = {"text": "headers"}
    at_known_rate = {**other_text, "learning_rate": size.taken["continued"]}
    settings = [
        (PLAIN, {}),
        (PLAIN, {"steps": round(size.steps["continued"] * size.slower["Llama"])}),
        *((HC, {"hc_lr": hc_lr}) for hc_lr in (1.0, HC_LR, 30.0)),
        (HC, {"hc_lr": HC_LR, "noise": NOISE}),
        (PLAIN, at_known_rate),
        (HC, {"hc_lr": HC_LR, **at_known_rate}),
        *((model, other_text) for model in PAIR),
        *((model, {"rank": RANK}) for model in PAIR),
    ]
    return [base(size), *_continuations(size, settings)]


def variants(size: Scale) -> list[Run]:
    """Return every other model, continued and from scratch, DHC×4 from another start, and the pair without warm-up."""
    settings = [(model, {"hc_lr": HC_LR}) for model in ("SHC×4", "DHC×2", "iHC×4", "frac×4", "mHC×4")]
    settings += [(PLAIN, {"warm_up": 0}), (HC, {"hc_lr": HC_LR, "warm_up": 0})]
    others = [model for model in MODELS if model not in (*PAIR, "frac×4")]
    new = [*((model, {}) for model in others), (HC, {"undivided": True})]
    from_scratch = [_run(size, "scratch", model, seed, **settings) for model, settings in new for seed in SEEDS]
    return [base(size), *_continuations(size, settings), *from_scratch]


STUDIES = {"tuning": tuning, "scratch": scratch, "continued": continued, "variants": variants}


def _continuations(size: Scale, settings: list[tuple[str, dict]]) -> list[Run]:
    return [_run(size, "continued", model, seed, **each) for model, each in settings for seed in SEEDS]


def _run(size: Scale, study: str, model: str, seed: int, **settings) -> Run:
    """Return a run with what is usual for its study, and with the learning rate that is best for the plain model."""
    steps = settings.get("steps", size.steps[study])
    start = base(size).id if study == "continued" else None
    usual = {"steps": steps, "warm_up": round(WARM_UP * steps), "start": start, "learning_rate": 0.0}
    run = Run(study=study, model=model, seed=seed, **{**usual, **settings})
    return run if "learning_rate" in settings else replace(run, learning_rate=size.taken[tuned_as(run)])
