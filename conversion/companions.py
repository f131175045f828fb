"""What comes along with the weights of a base, unchanged, and what of it is refused."""

from fnmatch import fnmatch

from hf_hyperconn.errors import UnsupportedCheckpointError

from .base_card import README
from .checkpoint import INDEX, read_json, refuse_links_out
from .source import CONFIG, GENERATE, RECORD, Source

# what does not come along, in any case: weights in any format, pickles, what the conversion writes itself, records of
# training
LEFT_BEHIND = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "*.h5"),
    *("*.msgpack", "*.ot", "*.tflite", "*.npz", "*.mlmodel", "*.index.json", "*.py", "*.lock", CONFIG, RECORD),
    *("README.md", ".*", "original/*", "onnx/*", "coreml/*", "openvino/*", "metal/*", "runs/*", "checkpoint-*/*"),
    *("trainer_state.json", "*.distcp", "wandb/*", "__pycache__/*", "*.part", "*.incomplete/*", "*/.*"),
    *("*/trainer_state.json", "*/checkpoint-*/*", "*.pkl", "*.pickle", "*.joblib", "*events.out.tfevents.*"),
    "*adapter_config.json",
)


def companions_of(source: Source) -> tuple[str, ...]:
    """The files that come along with weights, code, config and card: tokenizer, chat template, licence and the like.

    That is all but `LEFT_BEHIND` and other models in folders of the checkpoint.
    """
    models = tuple(name.removesuffix(CONFIG) for name in source.files if name.endswith(f"/{CONFIG}"))
    patterns = tuple(pattern.lower() for pattern in LEFT_BEHIND)
    left = [
        name for name in source.files if name.startswith(models) or any(fnmatch(name.lower(), p) for p in patterns)
    ]
    return tuple(sorted(set(source.files) - set(left)))


def check_links(source: Source, companions: tuple[str, ...]) -> None:
    """Raise `UnsupportedCheckpointError` when what is read or copied of a folder, but weights, is a link out of it."""
    refuse_links_out(source, (CONFIG, INDEX, README, *companions))


def check_no_code(source: Source, companions: tuple[str, ...]) -> None:
    """Refuse tokenizers, processors and ways to generate that are code, which would not be copied."""
    for name in companions:
        if name.endswith("config.json") and (classes := _auto_map(read_json(source, name))):
            raise UnsupportedCheckpointError(
                f"{name} of {source.name!r} names code of its own (auto_map: {str(classes)[:60]}), which is not run "
                f"and not copied. Convert a copy that has a class of Transformers for it, or none."
            )
    if GENERATE in source.files:
        raise UnsupportedCheckpointError(
            f"{source.name!r} generates by code of its own (custom_generate), which is not run and not copied. "
            f"Convert a copy without it."
        )


def _auto_map(config: dict):
    """The first `auto_map` in a config or a config inside it; None when there is none, or nothing in it."""
    pending = [config]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            if part.get("auto_map"):
                return part["auto_map"]
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return None
