"""Running a base and its conversion on the same tokens, one after the other."""

import gc
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_hyperconn.analysis.costs import LAYER
from hf_hyperconn.errors import HyperConnError, VerificationError
from hf_hyperconn.families.reading.composites import TEXT

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint_files import INDEX, Weights
from ..checkpoint.loading import base_class, loading_fault, refused_by_transformers, while_loading, without_kernels
from ..checkpoint.source import CONFIG

TOKENS, NEW_TOKENS, SAMPLES = 64, 16, 8000
LARGEST = 2**27  # values that a model is run on
ROUNDING = 1e-5
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
HIDDEN_STATES, DECODER_IDS = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"), "decoder_input_ids"
ELSEWHERE = (
    "the conversion can't be compared with it; use --verify structure, and compare the two on inputs of your own"
)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Comparison:
    """Base and conversion on the same tokens, in one dtype.

    logits, hidden_states: whether they are equal, bit for bit.
    continuation: whether the greedy continuations are equal; None for a model that does not generate.
    max_difference: largest absolute difference of logits.
    kl: KL divergence of the conversion from the base, mean over tokens, in nats.
    top1: share of tokens with the same most likely next token.
    relative: `max_difference` over the largest absolute logit of the base.
    """

    dtype: str
    logits: bool
    hidden_states: bool
    continuation: bool | None
    max_difference: float
    kl: float
    top1: float
    relative: float

    @property
    def equal(self) -> bool:
        """Whether everything compared is equal, bit for bit."""
        return self.logits and self.hidden_states and self.continuation is not False

    @property
    def rounded(self) -> bool:
        """Whether they are equal but for the rounding of float32 reads, which sum to 1 within an ulp."""
        return self.dtype == "float32" and self.relative < ROUNDING and self.continuation is not False

    def line(self) -> str:
        """The comparison for people."""
        if self.equal:
            parts = ["logits", "hidden states"] + ["greedy continuation"] * (self.continuation is not None)
            return f"{self.dtype:<13} {', '.join(parts)}: equal to the base, bit for bit"
        return (
            f"{self.dtype:<13} logits max |difference| {self.max_difference:.3g}, KL {self.kl:.3g}, "
            f"top-1 agreement {100 * self.top1:.1f} %"
        )

    def failure(self) -> str:
        """What differs, for an error message."""
        differing = [name for name in ("logits", "hidden_states", "continuation") if getattr(self, name) is False]
        return (
            f"in {self.dtype}, {', '.join(differing).replace('_', ' ')} differ from the base's "
            f"(max |difference| of logits {self.max_difference:.3g})"
        )


def layers_that_fit(weights: Weights, layers: int) -> int:
    """How many of the first layers can run in float32 in four fifths of the memory that is free; at least one."""
    per_layer = [0] * layers
    rest = 0
    for name, tensor in weights.tensors.items():
        layer = LAYER.search(name)
        if layer and int(layer[1]) < layers:
            per_layer[int(layer[1])] += 4 * tensor.size
        else:
            rest += 4 * tensor.size
    free = 0.8 * free_memory() - rest
    fitting = 0
    while fitting < layers and (free := free - per_layer[fitting]) > 0:
        fitting += 1
    return max(fitting, 1)


def compare_models(target: Checkpoint, base: Checkpoint, *, layers: int) -> tuple[Comparison, ...]:
    """Run base and conversion in the base's dtype and in float32; the base is freed before the other is loaded.

    layers: how many of the first layers to run.

    Raises `VerificationError` when one of them can't be loaded, lacks weights or has others, or computes NaN, and when
    the base can't run on what is made for it here.
    """
    plain_class = base_class(target)
    hc_class = getattr(target.family.modeling_module(), f"HC{plain_class.__name__}")
    results = []
    for dtype in dict.fromkeys([DTYPES.get(base.weights.dtype, torch.float32), torch.float32]):
        ran = []
        for model_class, checkpoint in ((plain_class, base), (hc_class, target)):
            try:
                ran.append(_run(model_class, checkpoint, dtype, layers))
            except Exception as error:
                if model_class is not plain_class or isinstance(error, HyperConnError):
                    raise
                reason = " ".join(str(error).split()) or type(error).__name__
                raise VerificationError(
                    f"{plain_class.__name__} can't run here ({reason:.200}), so {ELSEWHERE}"
                ) from error
            if fault := ran[-1]["fault"]:
                raise VerificationError(fault)
        results.append(_compare(str(dtype).removeprefix("torch."), *ran))
    return tuple(results)


def _run(model_class, checkpoint: Checkpoint, dtype: torch.dtype, layers: int) -> dict:
    """Logits (or last hidden state, or maps), hidden states and greedy continuation on fixed tokens, or a fixed image.

    `fault` says which weights are no numbers, or that those it has lead to none; None where all is well.
    """
    model: Any = checkpoint.family.observed(_load(model_class, checkpoint, dtype, layers))
    inputs, new_tokens = _inputs(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some models draw what they mask
        outputs = model(**inputs, output_hidden_states=True)
        logits = next(
            (outputs[name] for name in ("logits", "start_logits", "last_hidden_state") if name in outputs), None
        )
        logits = outputs[0] if logits is None else logits
        if isinstance(logits, tuple):  # the maps of a backbone
            logits = torch.cat([each.flatten() for each in logits])
        result = {
            "logits": logits,
            "hidden_states": [state for name in HIDDEN_STATES for state in outputs.get(name) or ()],
            "continuation": None,
            "fault": _no_numbers(model, checkpoint) if logits.isnan().any() else None,
        }
        if model.can_generate() and new_tokens > 0 and not result["fault"]:
            prompt = {name: value for name, value in inputs.items() if name != DECODER_IDS}
            if "input_ids" in prompt:
                prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
            model.generation_config = _without_search(model.generation_config)
            result["continuation"] = model.generate(
                **prompt, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
            )
    del model
    gc.collect()
    return result


def _without_search(config: GenerationConfig) -> GenerationConfig:
    """Its special tokens, and what only this model knows: with the rest a checkpoint could ask for 10,000 beams."""
    of_search = GenerationConfig().to_dict()
    kept = {
        name: value for name, value in config.to_dict().items() if name not in of_search or name.endswith("_token_id")
    }
    return GenerationConfig(**kept)


def _inputs(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], int]:
    """Tokens, or an image of noise, and how many tokens can follow.

    Raises `VerificationError` for a model that takes something else.
    """
    config, generator = getattr(model.config, TEXT, None) or model.config, torch.Generator().manual_seed(0)
    match model.main_input_name:
        case "input_ids" if hasattr(config, "vocab_size"):
            longest = getattr(config, "max_position_embeddings", None) or TOKENS + NEW_TOKENS
            tokens = max(min(TOKENS, longest - NEW_TOKENS), 1)
            ids = torch.randint(config.vocab_size, (1, tokens), generator=generator)
            ids[torch.isin(ids, torch.tensor(_places(model.config), dtype=torch.long))] = 0
            if type(model).__name__.endswith("ForMultipleChoice"):
                return {"input_ids": ids.expand(1, 2, -1)}, 0
            seen = {"pixel_values": _seen(model.config.vision_config, model, generator)} if _compares(model) else {}
            return {"input_ids": ids, **seen, **_begun(model, generator)}, min(NEW_TOKENS, longest - tokens)
        case "input_features" if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
            heard = _noise((1, config.num_mel_bins, 2 * config.max_source_positions), model, generator)
            return {"input_features": heard, **_begun(model, generator)}, NEW_TOKENS
        case "input_features" if hasattr(config, "input_feat_per_channel"):
            heard = _noise((1, TOKENS, config.input_feat_per_channel), model, generator)
            return {"input_features": heard, **_begun(model, generator)}, NEW_TOKENS
        case "input_values" if model.config.is_encoder_decoder:
            heard = _noise((1, SAMPLES), model, generator)
            return {"input_values": heard, **_begun(model, generator)}, NEW_TOKENS
        case "pixel_values" if hasattr(config, "image_size"):
            return {"pixel_values": _seen(config, model, generator)}, 0
    raise VerificationError(
        f"{type(model).__name__} takes {model.main_input_name}, and what to give it is not known here, so {ELSEWHERE}"
    )


def _begun(model: PreTrainedModel, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The beginning of what the decoder of an encoder-decoder says; nothing for another model."""
    if not model.config.is_encoder_decoder:
        return {}
    return {DECODER_IDS: torch.randint(model.config.vocab_size, (1, NEW_TOKENS), generator=generator)}


def _places(config: PreTrainedConfig) -> list[int]:
    """The tokens in whose places goes what a model sees or hears."""
    named = (
        value for name, value in vars(config).items() if re.fullmatch(r"(image|video|audio)_token_(id|index)", name)
    )
    return [value for value in named if isinstance(value, int)]


def _compares(model: PreTrainedModel) -> bool:
    """Whether a model compares texts with images, and so needs both."""
    return hasattr(model, "logit_scale") and hasattr(model.config, "vision_config")


def _seen(config: PreTrainedConfig, model: PreTrainedModel, generator: torch.Generator) -> torch.Tensor:
    """An image or a video of noise."""
    size = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
    frames = [] if (count := getattr(config, "num_frames", None)) is None else [count]
    return _noise((1, *frames, getattr(config, "num_channels", 3), *size), model, generator)


def _noise(shape: tuple[int, ...], model: PreTrainedModel, generator: torch.Generator) -> torch.Tensor:
    """Noise of a shape that a config asks for, in the model's dtype.

    Raises `VerificationError` where that is more than a model would be run on.
    """
    if prod(shape) > LARGEST:
        raise VerificationError(f"{type(model).__name__} takes {list(shape)} values, too many here, so {ELSEWHERE}")
    return torch.randn(shape, generator=generator).to(model.dtype)


def _load(model_class, checkpoint: Checkpoint, dtype: torch.dtype, layers: int) -> PreTrainedModel:
    """The model of a checkpoint in evaluation mode, cut after some layers; its config makes nothing be fetched."""
    source, family = checkpoint.source, checkpoint.family
    needed = (CONFIG, INDEX, "generation_config.json", *checkpoint.weights.files)
    names = [name for name in needed if name in source.files]
    folder = source.folder(names)
    try:
        with while_loading():
            config = model_class.config_class.from_pretrained(folder)
            counts, field = [of_stack.source.count for of_stack in family.stacks], family.part_field
            moved = {}
            for count, stack in zip(counts, checkpoint.stacks, strict=True):
                if layers < (total := getattr(getattr(config, field or "", config), count)):
                    moved[rf"{re.escape(stack)}{total - 1}\.hc_head\."] = f"{stack}{layers - 1}.hc_head."
            config = without_kernels(_first_layers(config, layers, counts, field))
            model, report = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **({"key_mapping": moved} if moved else {}),
            )
    except Exception as error:  # whatever Transformers makes of files that nobody has checked
        raise VerificationError(f"{source.name!r}: {refused_by_transformers(error)}") from error
    if found := loading_fault(report, model_class, layers):
        raise VerificationError(f"{source.name!r} as Transformers loads it is not complete: {found}")
    return model.eval()


def _no_numbers(model: PreTrainedModel, checkpoint: Checkpoint) -> str:
    """That a model computes NaN, and from what."""
    dtype = str(model.dtype).removeprefix("torch.")
    stored = next((name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()), None)
    if stored:
        return f"{stored} of {checkpoint.name!r} holds NaN or infinity, so there is nothing to compare"
    return f"{checkpoint.name!r} itself computes NaN in {dtype}, of finite weights, so there is nothing to compare"


def _first_layers(config: PreTrainedConfig, layers: int, counts: list[str], field: str | None) -> PreTrainedConfig:
    """The config of the same model, cut after some layers.

    counts: the fields that say how many there are in each list of layers.
    field: the config that they are in, in this one; None where it is this one.
    """
    if field is not None:
        of_layers = _first_layers(getattr(config, field), layers, counts, None)
        return type(config).from_dict({**config.to_dict(), field: of_layers.to_dict()})
    if all(layers >= getattr(config, count) for count in counts):
        return config
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if not isinstance(getattr(type(config), name, 0), property)
    }
    per_layer = {name: fields[name][:layers] for name in PER_LAYER if fields.get(name) is not None}
    cut = {config.attribute_map.get(count, count): min(layers, getattr(config, count)) for count in counts}
    return type(config).from_dict({**fields, **per_layer, **cut})


def _compare(dtype: str, expected: dict, found: dict) -> Comparison:
    a, b = expected["logits"].double(), found["logits"].double()
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    return Comparison(
        dtype=dtype,
        logits=torch.equal(expected["logits"], found["logits"]),
        hidden_states=len(expected["hidden_states"]) == len(found["hidden_states"])
        and all(map(torch.equal, expected["hidden_states"], found["hidden_states"])),
        continuation=None
        if expected["continuation"] is None
        else torch.equal(expected["continuation"], found["continuation"]),
        max_difference=(a - b).abs().max().item(),
        relative=((a - b).abs().max() / a.abs().max()).item(),
        kl=(log_a.exp() * (log_a - log_b)).sum(-1).mean().item(),
        top1=(a.argmax(-1) == b.argmax(-1)).double().mean().item(),
    )


GROUPS = Path("/proc/self/cgroup")  # of Linux: a line for each hierarchy, `number:controllers:path`
MOUNTED = Path("/sys/fs/cgroup")
# of both versions: the folder of the hierarchy, the files of the limit and of what is used, and what of this is cache
VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory() -> int:
    """Bytes that may be taken without swapping: what is free on the machine, or what the strictest limit leaves."""
    return min([psutil.virtual_memory().available, *_left_by_limits()])


def _left_by_limits() -> list[int]:
    """What each limit on this process, and on the groups that it is in, leaves."""
    left = []
    for line in _text(GROUPS).splitlines():
        if line.count(":") < 2:  # none of a hierarchy
            continue
        _, controllers, path = line.split(":", 2)
        version = "memory" if "memory" in controllers.split(",") else controllers
        if version not in VERSIONS:
            continue
        hierarchy, limit, used, cached = VERSIONS[version]
        group = MOUNTED / hierarchy / path.lstrip("/")
        for each in (group, *group.parents):
            if not each.is_relative_to(MOUNTED):
                break
            numbers = [_text(each / name).strip() for name in (limit, used)]
            if all(map(str.isdecimal, numbers)):  # else there is no limit
                of_files = re.search(rf"^{cached} (\d+)$", _text(each / "memory.stat"), re.MULTILINE)
                left.append(int(numbers[0]) - int(numbers[1]) + int(of_files[1] if of_files else 0))
    return left


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
