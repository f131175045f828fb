"""One training run: its model, its data, its loop."""

import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_wsd_schedule,
)

from benchmarks.lines import put, result_in
from benchmarks.timing import RESULTS, device, device_name
from hf_hyperconn import (
    HCGlm4Config,
    HCGlm4ForCausalLM,
    HCLlamaConfig,
    HCLlamaForCausalLM,
    HCOlmoeConfig,
    HCOlmoeForCausalLM,
    HCQwen3Config,
    HCQwen3ForCausalLM,
    hc_parameters,
)
from hf_hyperconn.analysis.study import study
from hf_hyperconn.kinds import KINDS
from hf_hyperconn.training.monitor import hc_figures

from .corpus import Corpus, corpus, rows
from .optimizers import optimizer_of
from .resuming import Kept
from .runs import DEEP_MODELS, DHC4, MODELS, Run, Scale, is_compiled, is_drawn, scale
from .starts import (
    add_copies,
    add_to_stream,
    divide_projections,
    fix_part,
    keep_embedding_alone,
    norm_embedding,
    norm_side_streams,
    skip_from_embedding,
)

WORK = RESULTS.parents[1] / "build" / "pretraining"
CURVES = RESULTS / "pretraining"
CLASSES = {
    "Llama": (LlamaConfig, LlamaForCausalLM, HCLlamaConfig, HCLlamaForCausalLM),
    "OLMoE": (OlmoeConfig, OlmoeForCausalLM, HCOlmoeConfig, HCOlmoeForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM, HCQwen3Config, HCQwen3ForCausalLM),  # Llama with QK-norm
    "GLM-4": (Glm4Config, Glm4ForCausalLM, HCGlm4Config, HCGlm4ForCausalLM),  # Llama with sandwich norms
}
TRAINED_WITH = {**dict.fromkeys(CLASSES, {}), "OLMoE": {"output_router_logits": True}}  # adds the load-balancing loss
READOUT = {"shc": {"hc_readout": "sum"}, "dhc": {"hc_readout": "sum"}}  # the paper's; the others' papers have none
CLIP, LAST_LEARNING_RATE = 1.0, 0.1
EVALUATIONS, LOGS = 10, 60  # points of a curve on held-out text, and in training
EVALUATED_TOGETHER = 32  # rows

Loss = Callable[..., torch.Tensor]


def path_of(run: Run, size: Scale, folder: Path | None = None) -> Path:
    """Return the file in a folder, by default that of the committed results, with a line for a finished run."""
    return (folder or CURVES) / size.name / f"{run.study}.jsonl"


def result_of(run: Run, size: Scale, folder: Path | None = None) -> dict | None:
    """Return a run's result; None until it is done."""
    return result_in(path_of(run, size, folder), run.id)


def weights_of(base: str, size: Scale, at: int = 0) -> Path:
    """Where the weights of the base with this id are, or will be; with `at`, those of a trunk after that step."""
    if at:
        return WORK / size.name / base / f"step{at}"
    return (CURVES if size.keeps_base else WORK) / size.name / base


def is_done(run: Run, size: Scale | None = None) -> bool:
    """Return whether the run's curve is there, and the weights that others start from."""
    size = size or scale()
    kept = [weights_of(run.id, size)] * (run.study == "base")
    kept += [weights_of(run.id, size, at) for at in size.taken_at] * (run.study == "trunk")
    return result_of(run, size) is not None and all(weights.exists() for weights in kept)


def train(
    run: Run,
    deadline: float = float("inf"),
    *,
    size: Scale | None = None,
    text: Corpus | None = None,
    folder: Path | None = None,
) -> dict:
    """Do a run, or what is left of it, and write its result, which is returned.

    deadline: of `time.monotonic`; the run is kept when it passes.
    size, text: by default the scale for this device, and the text that the run names.
    folder: as for `path_of`.

    Raises `OutOfTime` then.
    """
    size = size or scale()
    text = text or corpus(run.text)
    training, held_out = rows(text.training, size.length), rows(text.held_out, size.length)
    for_curve, for_end = (
        held_out[:: len(held_out) // number][:number].long().to(device()) for number in size.held_out
    )

    model = build(run, size).to(device())
    optimizer = optimizer_of(model, run)
    schedule = schedule_of(optimizer, run)
    state = {"step": 0, "curve": [], "training": [], "times": [], "matrices": {}}
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    kept = Kept(WORK / size.name / f"{run.id}.pt", parts, deadline, text.sha256)
    state = kept.load() or state
    loss_of = loss_on
    if is_compiled(run, size) and size.by_layer:
        torch.compiler.reset()
        compile_layers(model)
    elif is_compiled(run, size):
        loss_of = compiled_loss(run.model, run.family)
    losses, log_every = [], max(run.steps // LOGS, 1)
    all_rows = itertools.islice(batches(training, size.batch, run.seed), run.at, None)
    for step, ids in itertools.islice(enumerate(all_rows), state["step"], run.steps):
        if step == 0 and is_drawn(run):
            state["matrices"]["before"] = matrix(model, for_curve)
        if step % (run.steps // EVALUATIONS) == 0:
            state["curve"].append(evaluate(model, for_curve, step))
        started = time.perf_counter()
        losses.append(training_step(model, loss_of, optimizer, ids.to(device()), **TRAINED_WITH[run.family]))
        schedule.step()
        state["times"].append(time.perf_counter() - started)
        state["step"] = step + 1
        if run.study == "trunk" and step + 1 in size.taken_at:
            model.save_pretrained(weights_of(run.id, size, step + 1))
        if (step + 1) % log_every == 0 or step + 1 == run.steps:
            state["training"].append([step + 1, round(statistics.mean(losses), 5)])
            losses.clear()
            kept.keep(state)
    if run.study == "base" and size.keeps_base:
        model.to(torch.bfloat16).float()
    state["curve"].append(evaluate(model, for_curve, run.steps))
    result = {
        **asdict(run),
        "scale": size.name,
        "device": device_name(),
        "torch": torch.__version__,
        "compiled": is_compiled(run, size),
        "corpus": text.describe(),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "tokens_a_step": size.batch * size.length,
        "seconds_a_step": round(statistics.median(state["times"]), 4),
        "held_out_loss": evaluate(model, for_end, run.steps)["loss"],
        "curve": state["curve"],
        "training": state["training"],
    }
    if is_drawn(run):
        result["matrices"] = {**state["matrices"], "after": matrix(model, for_curve)}
    if run.study == "trunk":
        taken = weights_of(run.id, size, size.taken_at[0]).parent
        try:
            refuse_another_base(result_of(run, size, folder), taken, result)
        except RuntimeError:
            shutil.rmtree(taken)  # no run may start from them
            raise
    if run.study == "base":
        refuse_another_base(result_of(run, size, folder), weights_of(run.id, size), result)
        model.to(torch.bfloat16 if size.keeps_base else torch.float32).save_pretrained(weights_of(run.id, size))
    put(path_of(run, size, folder), run.id, result)
    kept.path.unlink(missing_ok=True)
    return result


def schedule_of(optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a rate that rises, then falls to a tenth: along a cosine, or after a constant one along a line."""
    if run.decay:
        settings = {"num_training_steps": run.steps, "min_lr_ratio": LAST_LEARNING_RATE, "decay_type": "linear"}
        return get_wsd_schedule(optimizer, run.warm_up, run.decay, **settings)
    return get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, run.warm_up, run.steps, min_lr_rate=LAST_LEARNING_RATE
    )


def training_step(
    model: nn.Module, loss_of: Loss, optimizer: torch.optim.Optimizer, ids: torch.Tensor, **settings: bool
) -> float:
    """Take one step on rows `[B, S]`, with `settings` for the model, and return the loss in nats a byte."""
    with autocast():
        loss = loss_of(model, ids, **settings)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def refuse_another_base(before: dict | None, weights: Path, result: dict) -> None:
    """The results of continuations belong to one base; on another machine it may come out another."""
    if before is not None and before["held_out_loss"] != result["held_out_loss"]:
        raise RuntimeError(
            f"the base came out another than before. Remove its result and those of the runs that start from it, or "
            f"put its weights back in {weights}."
        )


def build(run: Run, size: Scale | None = None) -> nn.Module:
    """Return the model that a run trains: new, or its start's, converted if it has hyper-connections."""
    size = size or scale()
    torch.manual_seed(run.seed)
    fields = {**MODELS, **DEEP_MODELS}[run.model]
    model = (new_model if run.start is None else continued_model)(run, size, fields)
    if run.skips:
        skip_from_embedding(model)
    if run.side_norm:
        norm_side_streams(model)
    if run.rank:
        parts = {part for name in hc_parameters(model) for part in name.split(".")}
        connections = sorted(part for part in parts if part.endswith(("_hc", "hc_head")))
        settings = {"target_modules": "all-linear", "modules_to_save": connections or None}
        model = get_peft_model(model, LoraConfig(r=run.rank, lora_alpha=2 * run.rank, **settings))
    return model.train()


def continued_model(run: Run, size: Scale, fields: dict | None) -> nn.Module:
    """Return the model of a run's start. fields: of the connections that it gets; None for the plain one."""
    _, model_class, _, hc_class = CLASSES[run.family]
    start = weights_of(run.start, size, run.at)
    if run.layers:
        model = add_copies(model_class.from_pretrained(start, dtype=torch.float32), run.layers, fields)
    else:
        from_start = model_class.from_pretrained if fields is None else partial(hc_class.from_prenorm, **fields)
        model = from_start(start, dtype=torch.float32)
    if run.added:
        add_to_stream(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if run.noise and name.endswith("static_alpha"):
                parameter.add_(run.noise * torch.randn_like(parameter))
            if name.endswith("static_beta"):
                parameter[1:2] *= run.lane
    return model


def new_model(run: Run, size: Scale, fields: dict | None) -> nn.Module:
    """Return a model from scratch. fields: of its connections; None for the plain one."""
    config_class, model_class, hc_config_class, hc_class = CLASSES[run.family]
    shape = size.shapes[run.family] | {"max_position_embeddings": size.length}
    shape |= {"vocab_size": size.vocabulary, "tie_word_embeddings": True}
    shape |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape |= {"num_hidden_layers": run.layers} if run.layers else {}
    model = plain = model_class(config_class(**shape))
    if fields is not None or run.divided:
        given = DHC4 if fields is None else fields
        model = hc_class(hc_config_class(**shape, **{**READOUT.get(given["connection"], {}), **given}))
        model.load_state_dict(plain.state_dict(), strict=False)
        if not run.undivided:
            divide_projections(model)
    if fields is None and run.divided:
        weights = model.state_dict()
        plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
        model = plain
    if run.alone:
        keep_embedding_alone(model)
    if run.embedding_norm:
        norm_embedding(model)
    if run.fixed:
        fix_part(model, run.fixed)
    return model


def batches(training: torch.Tensor, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Rows `[B, S]` int64 in an order that depends on the seed alone; each row once before any comes again."""
    for epoch in itertools.count():
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for part in order[: len(order) // batch * batch].view(-1, batch):
            yield training[part].long()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def evaluate(model: nn.Module, held_out: torch.Tensor, step: int) -> dict:
    """Held-out loss in nats a byte, and what the connections do on the first row."""
    model.eval()
    with autocast():
        losses = [loss_on(model, part).item() for part in held_out.split(EVALUATED_TOGETHER)]
        figures = hc_figures(model, held_out[:1]) if has_matrices(model.config) else {}
    model.train()
    return {"step": step, "loss": round(statistics.mean(losses), 5), **{k: round(v, 6) for k, v in figures.items()}}


def has_matrices(config: PreTrainedConfig) -> bool:
    """Return whether matrices read and mix streams, so that there are figures of them."""
    return hasattr(config, "hc_mult") and KINDS[config.connection].has_matrices


def loss_on(model: nn.Module, ids: torch.Tensor, **settings: bool) -> torch.Tensor:
    """Return the mean negative log-likelihood of rows `[B, S]`, in nats a token, and additions by `settings`."""
    return model(input_ids=ids, labels=ids, use_cache=False, **settings).loss


@lru_cache(maxsize=1)
def compiled_loss(model: str, family: str) -> Loss:
    """Return the loss, compiled once for the runs of one kind of model that follow one another."""
    torch.compiler.reset()
    return torch.compile(loss_on)


def compile_layers(model: nn.Module) -> None:
    """Compile each decoder layer; those of one kind share their code."""
    for layer in model.model.layers:
        layer.compile()


def matrix(model: nn.Module, held_out: torch.Tensor) -> list[list[float]]:
    """C^(0), what each sub-layer and the output read of what was written before, over the first rows of text."""
    return [[round(value, 4) for value in row] for row in study(model, [held_out[:4]]).matrices.inputs.tolist()]


def autocast():
    """bfloat16 on a GPU."""
    return torch.autocast(device(), torch.bfloat16, enabled=device() == "cuda")
