"""The companions of a base's weights, the files that stay behind, and companions that are refused."""

from collections.abc import Iterable
from fnmatch import fnmatch
from posixpath import isabs, normpath
from typing import Any

from packaging.version import InvalidVersion, Version

from hf_hyperconn.errors import UnsupportedCheckpointError

from ..checkpoint.checkpoint_files import INDEX, PICKLES, read_json_object, read_json_value
from ..checkpoint.readme import README
from ..checkpoint.source import CONFIG, GENERATE, RECORD, Source

# weights in any format, pickles, files that a conversion writes itself, records of training
LEFT_BEHIND = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "*.h5"),
    *("*.msgpack", "*.ot", "*.tflite", "*.npz", "*.mlmodel", "*.index.json", "*.py", "*.lock", CONFIG, RECORD),
    *("README.md", ".*", "original/*", "onnx/*", "coreml/*", "openvino/*", "metal/*", "runs/*", "checkpoint-*/*"),
    *("trainer_state.json", "*.distcp", "wandb/*", "__pycache__/*", "*.part", "*.incomplete/*", "*/.*"),
    *("*/trainer_state.json", "*/checkpoint-*/*", "*.pkl", "*.pickle", "*.joblib", "*events.out.tfevents.*"),
    "*adapter_config.json",
)

MODULES = "modules.json"

# where a tokenizer asks Transformers to correct how it splits text, and the types of old models with this correction
TOKENIZER, FLAG = "tokenizer_config.json", "fix_mistral_regex"
CORRECTED = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")


def companions_of(source: Source) -> tuple[str, ...]:
    """Return the companions: tokenizer, chat template and others.

    These are all files without `LEFT_BEHIND` and other models in folders of the checkpoint. Configs and safetensors in
    folders that modules.json names are companions, too.

    Raises `UnsupportedCheckpointError` as `folders_of_modules` does.
    """
    modules = folders_of_modules(source)
    models = (name.removesuffix(CONFIG) for name in source.files if name.endswith(f"/{CONFIG}"))
    others = tuple(folder for folder in models if not folder.startswith(modules))

    def stays(name: str) -> bool:
        if name.startswith(modules) and name.endswith(".safetensors"):
            return _matches(name, (pattern for pattern in LEFT_BEHIND if pattern != "*.safetensors"))
        return name.startswith(others) or _matches(name, LEFT_BEHIND)

    return tuple(sorted(name for name in source.files if not stays(name)))


def left_behind(source: Source, taken: Iterable[str]) -> tuple[str, ...]:
    """Return the files of a base that stay behind, without hidden ones.

    taken: weights and companions of the base.
    """
    read = {CONFIG, INDEX, README, *taken}
    return tuple(sorted(name for name in source.files if name not in read and not _matches(name, (".*", "*/.*"))))


def modules_left_behind(source: Source, left: Iterable[str]) -> tuple[str, ...]:
    """Return weights of modules without which sentence-transformers would not load the conversion.

    left: the files of `left_behind`.
    """
    modules = folders_of_modules(source)
    held = {name.rpartition("/")[0] for name in source.files if name.endswith(".safetensors")}
    pickles = (name for name in left if name.lower().endswith(PICKLES) and name.rpartition("/")[0] not in held)
    indices = (name for name in left if name.endswith(".safetensors.index.json"))
    return tuple(name for name in (*pickles, *indices) if name.startswith(modules))


def check_no_code(source: Source, companions: tuple[str, ...]) -> None:
    """Refuse tokenizers, processors, modules and generation with code of their own, which is not copied."""
    for name in companions:
        if name.endswith("config.json") and (classes := _auto_map(read_json_object(source, name))):
            raise UnsupportedCheckpointError(
                f"{name} of {source.name!r} names code of its own (auto_map: {str(classes)[:60]}), which is not run "
                f"and not copied. Convert a copy that has a class of Transformers for it, or none."
            )
    for _, name in _modules(source):
        file = f"{name.rpartition('.')[0].replace('.', '/')}.py"
        if "--" in name or file in source.files:  # of a repo of the Hub, or of this one
            raise UnsupportedCheckpointError(
                f"{MODULES} of {source.name!r} names code of its own ({name:.60}), which is not run and not copied. "
                f"Convert a copy that has a class of sentence-transformers for it, or no {MODULES}."
            )
    if GENERATE in source.files:
        raise UnsupportedCheckpointError(
            f"{source.name!r} generates by code of its own (custom_generate), which is not run and not copied. "
            f"Convert a copy without it."
        )


def check_split_of_text(source: Source, config: dict) -> None:
    """Refuse a tokenizer that Transformers corrects for the base's model type alone."""
    flag = read_json_object(source, TOKENIZER).get(FLAG) if TOKENIZER in source.files else None
    if flag and config["model_type"] in CORRECTED and _is_old(config.get("transformers_version")):
        raise UnsupportedCheckpointError(
            f"{TOKENIZER} of {source.name!r} must be without {FLAG} (got {flag!r:.20}), which changes how text is "
            f"split for {config['model_type']} and not for its conversion. Save the corrected tokenizer in a copy, by "
            f"AutoTokenizer.from_pretrained(COPY).save_pretrained(COPY), take {FLAG} out of {TOKENIZER}, and convert "
            f"the copy."
        )


def _is_old(release: object) -> bool:
    """Tell whether a config was saved before Transformers 5, or by an unknown release."""
    try:
        return Version(str(release)) < Version("5")
    except InvalidVersion:
        return True


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)


def _auto_map(config: dict):
    """Return the first `auto_map` with entries in a config or a config inside it; None without one."""
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


def folders_of_modules(source: Source) -> tuple[str, ...]:
    """Return the folders that modules.json names, without the checkpoint's own, each with a final "/".

    Raises `UnsupportedCheckpointError` when one leads out, or the file is not as sentence-transformers writes it.
    """
    folders = []
    for path, _ in _modules(source):
        folder = normpath(path)
        if isabs(folder) or ".." in folder.split("/"):
            raise UnsupportedCheckpointError(
                f"{MODULES} of {source.name!r} names {path!r:.60}, a path outside it. Do not trust it."
            )
        folders.append(f"{folder}/")
    return tuple(folder for folder in folders if folder != "./")


def _modules(source: Source) -> list[tuple[str, str]]:
    """Return path and class of each module."""
    if MODULES not in source.files:
        return []
    content = read_json_value(source, MODULES)
    modules = content if isinstance(content, list) else [None]
    entries: list[tuple[Any, Any]]
    entries = [(module.get("path"), module.get("type")) for module in modules if isinstance(module, dict)]
    if len(entries) != len(modules) or not all(isinstance(text, str) for entry in entries for text in entry):
        raise UnsupportedCheckpointError(
            f"{MODULES} of {source.name!r} is no list of modules with path and type. Download it again."
        )
    return entries
