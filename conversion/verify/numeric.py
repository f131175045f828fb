"""The numeric comparison of a conversion with its base, on the same inputs, within free memory."""

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
from hf_hyperconn.families.reading.stacks import TEXT

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint_files import INDEX, Weights
from ..checkpoint.loading import base_class, loading_fault, quiet_loading, refused_by_transformers, without_kernels
from ..checkpoint.source import CONFIG

TOKENS, NEW_TOKENS, SAMPLES = 64, 16, 8000
LARGEST_INPUT = 2**27  # values
ROUNDING = 1e-5
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
HIDDEN_STATES, DECODER_IDS = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"), "decoder_input_ids"
REMEDY = "the conversion can't be compared with it; use --verify structure, and compare the two on inputs of your own"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

GROUPS = Path("/proc/self/cgroup")  # of Linux: a line for each hierarchy, `number:controllers:path`
MOUNTED = Path("/sys/fs/cgroup")
# of both versions: the folder of the hierarchy, the files of the limit and of the used memory, and its part of cache
VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True)
class Comparison:
    """The comparison of base and conversion on the same inputs, in one dtype.

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
        """Tell whether everything compared is equal, bit for bit."""
        return self.logits and self.hidden_states and self.continuation is not False

    @property
    def rounded(self) -> bool:
        """Tell whether both are equal up to the rounding of float32 reads, which sum to 1 within an ulp."""
        return self.dtype == "float32" and self.relative < ROUNDING and self.continuation is not False

    def line(self) -> str:
        """Return the comparison for people."""
        if self.equal:
            parts = ["logits", "hidden states"] + ["greedy continuation"] * (self.continuation is not None)
            return f"{self.dtype:<13} {', '.join(parts)}: equal to the base, bit for bit"
        return (
            f"{self.dtype:<13} logits max |difference| {self.max_difference:.3g}, KL {self.kl:.3g}, "
            f"top-1 agreement {100 * self.top1:.1f} %"
        )

    def failure(self) -> str:
        """Return the differences for an error message."""
        differing = [name for name in ("logits", "hidden_states", "continuation") if getattr(self, name) is False]
        return (
            f"in {self.dtype}, {', '.join(differing).replace('_', ' ')} differ from the base's "
            f"(max |difference| of logits {self.max_difference:.3g})"
        )


def layers_that_fit(weights: Weights, layers: int) -> int:
    """Count the first layers that can run in float32 in four fifths of the free memory; at least one."""
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
    """Run base and conversion in the base's dtype and in float32; the base is freed before the conversion is loaded.

    layers: how many of the first layers to run.

    Raises `VerificationError` when a model can't be loaded, has missing or unknown weights, or computes NaN. Raises it
    also when the base can't run on the inputs that are made here.
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
                    f"{plain_class.__name__} can't run here ({reason:.200}), so {REMEDY}"
                ) from error
            if fault := ran[-1]["fault"]:
                raise VerificationError(fault)
        results.append(_compare(str(dtype).removeprefix("torch."), *ran))
    return tuple(results)


def _run(model_class, checkpoint: Checkpoint, dtype: torch.dtype, layers: int) -> dict:
    """Return logits (or last hidden state, or maps), hidden states and greedy continuation on fixed inputs.

    `fault` names weights that are NaN or infinite, or says that finite weights lead to NaN; None without a fault.
    """
    model: Any = checkpoint.family.observed(_load(model_class, checkpoint, dtype, layers))
    inputs, new_tokens = _inputs(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some models mask at random
        outputs = model(**inputs, output_hidden_states=True)
        logits = next(
            (outputs[name] for name in ("logits", "start_logits", "last_hidden_state") if name in outputs), None
        )
        logits = outputs[0] if logits is None else logits
        if isinstance(logits, tuple):  # the maps of a backbone
            logits = torch.cat([feature_map.flatten() for feature_map in logits])
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
    """Keep special tokens and options of this model; other options could set 10,000 beams."""
    of_search = GenerationConfig().to_dict()
    kept = {
        name: value for name, value in config.to_dict().items() if name not in of_search or name.endswith("_token_id")
    }
    return GenerationConfig(**kept)


def _inputs(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], int]:
    """Make tokens, an image or sound of noise, and count the tokens that can follow.

    Raises `VerificationError` for a model with other inputs.
    """
    config, generator = getattr(model.config, TEXT, None) or model.config, torch.Generator().manual_seed(0)
    match model.main_input_name:
        case "input_ids" if hasattr(config, "vocab_size"):
            longest = getattr(config, "max_position_embeddings", None) or TOKENS + NEW_TOKENS
            tokens = max(min(TOKENS, longest - NEW_TOKENS), 1)
            ids = torch.randint(config.vocab_size, (1, tokens), generator=generator)
            ids[torch.isin(ids, torch.tensor(_placeholders(model.config), dtype=torch.long))] = 0
            if type(model).__name__.endswith("ForMultipleChoice"):
                return {"input_ids": ids.expand(1, 2, -1)}, 0
            image = {}
            if hasattr(model, "logit_scale") and hasattr(model.config, "vision_config"):  # compares texts with images
                image = {"pixel_values": _image(model.config.vision_config, model, generator)}
            return {"input_ids": ids, **image, **_prefix(model, generator)}, min(NEW_TOKENS, longest - tokens)
        case "input_features" if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
            features = _noise((1, config.num_mel_bins, 2 * config.max_source_positions), model, generator)
            return {"input_features": features, **_prefix(model, generator)}, NEW_TOKENS
        case "input_features" if hasattr(config, "input_feat_per_channel"):
            features = _noise((1, TOKENS, config.input_feat_per_channel), model, generator)
            return {"input_features": features, **_prefix(model, generator)}, NEW_TOKENS
        case "input_values" if model.config.is_encoder_decoder:
            return {"input_values": _noise((1, SAMPLES), model, generator), **_prefix(model, generator)}, NEW_TOKENS
        case "pixel_values" if hasattr(config, "image_size"):
            return {"pixel_values": _image(config, model, generator)}, 0
    raise VerificationError(
        f"{type(model).__name__} needs {model.main_input_name}, which verification can't make, so {REMEDY}"
    )


def _prefix(model: PreTrainedModel, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Make the first tokens of the decoder of an encoder-decoder; nothing for another model."""
    if not model.config.is_encoder_decoder:
        return {}
    return {DECODER_IDS: torch.randint(model.config.vocab_size, (1, NEW_TOKENS), generator=generator)}


def _placeholders(config: PreTrainedConfig) -> list[int]:
    """Return the tokens that stand for images, videos or sound."""
    return [
        value
        for name, value in vars(config).items()
        if re.fullmatch(r"(image|video|audio)_token_(id|index)", name) and isinstance(value, int)
    ]


def _image(config: PreTrainedConfig, model: PreTrainedModel, generator: torch.Generator) -> torch.Tensor:
    """Make an image or a video of noise."""
    size = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
    frames = [] if (count := getattr(config, "num_frames", None)) is None else [count]
    return _noise((1, *frames, getattr(config, "num_channels", 3), *size), model, generator)


def _noise(shape: tuple[int, ...], model: PreTrainedModel, generator: torch.Generator) -> torch.Tensor:
    """Make noise of a shape by a config, in the model's dtype.

    Raises `VerificationError` for more than `LARGEST_INPUT` values.
    """
    if prod(shape) > LARGEST_INPUT:
        raise VerificationError(f"{type(model).__name__} takes {list(shape)} values, too many here, so {REMEDY}")
    return torch.randn(shape, generator=generator).to(model.dtype)


def _load(model_class, checkpoint: Checkpoint, dtype: torch.dtype, layers: int) -> PreTrainedModel:
    """Load the first layers of a checkpoint's model in evaluation mode, without fetching kernels."""
    source, family = checkpoint.source, checkpoint.family
    needed = (CONFIG, INDEX, "generation_config.json", *checkpoint.weights.files)
    names = [name for name in needed if name in source.files]
    folder = source.folder(names)
    try:
        with quiet_loading():
            config = model_class.config_class.from_pretrained(folder)
            counts, field = [stack.source.count for stack in family.stacks], family.part_field
            moved = {}
            for count, stack in zip(counts, checkpoint.stack_prefixes, strict=True):
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
    if fault := loading_fault(report, model_class, layers):
        raise VerificationError(f"{source.name!r} as Transformers loads it is not complete: {fault}")
    return model.eval()


def _no_numbers(model: PreTrainedModel, checkpoint: Checkpoint) -> str:
    """Say that a model computes NaN, and from which weights."""
    dtype = str(model.dtype).removeprefix("torch.")
    stored = next((name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()), None)
    if stored:
        return f"{stored} of {checkpoint.name!r} holds NaN or infinity, so there is nothing to compare"
    return f"{checkpoint.name!r} itself computes NaN in {dtype}, of finite weights, so there is nothing to compare"


def _first_layers(config: PreTrainedConfig, layers: int, counts: list[str], field: str | None) -> PreTrainedConfig:
    """Cut the config of a model after some layers.

    counts: the fields with the number of layers in each list of layers.
    field: the inner config with these fields; None for this config.
    """
    if field is not None:
        inner = _first_layers(getattr(config, field), layers, counts, None)
        return type(config).from_dict({**config.to_dict(), field: inner.to_dict()})
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


def _compare(dtype: str, expected: dict, actual: dict) -> Comparison:
    a, b = expected["logits"].double(), actual["logits"].double()
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    return Comparison(
        dtype=dtype,
        logits=torch.equal(expected["logits"], actual["logits"]),
        hidden_states=len(expected["hidden_states"]) == len(actual["hidden_states"])
        and all(map(torch.equal, expected["hidden_states"], actual["hidden_states"])),
        continuation=None
        if expected["continuation"] is None
        else torch.equal(expected["continuation"], actual["continuation"]),
        max_difference=(a - b).abs().max().item(),
        relative=((a - b).abs().max() / a.abs().max()).item(),
        kl=(log_a.exp() * (log_a - log_b)).sum(-1).mean().item(),
        top1=(a.argmax(-1) == b.argmax(-1)).double().mean().item(),
    )


def free_memory() -> int:
    """Return the bytes that are free without swapping, on the machine and within every limit."""
    return min([psutil.virtual_memory().available, *_left_by_limits()])


def _left_by_limits() -> list[int]:
    """Return the free bytes within each limit on this process and its groups."""
    left = []
    for line in _text(GROUPS).splitlines():
        _, controllers, path = [*line.split(":", 2), "other", ""][:3]
        version = "memory" if "memory" in controllers.split(",") else controllers
        if version not in VERSIONS:
            continue
        hierarchy, limit, used, cached = VERSIONS[version]
        group = MOUNTED / hierarchy / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(MOUNTED):
                break
            numbers = [_text(folder / name).strip() for name in (limit, used)]
            if all(map(str.isdecimal, numbers)):  # else there is no limit
                cache = re.search(rf"^{cached} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
                left.append(int(numbers[0]) - int(numbers[1]) + int(cache[1] if cache else 0))
    return left


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
