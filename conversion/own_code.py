"""Code that a base brings or names in its config.json, which is neither run nor copied."""

from hf_hyperconn.errors import UnsupportedCheckpointError

from .source import CONFIG, Source

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


def refuse_own_code(source: Source, config: dict) -> None:
    """Refuse a config that names classes of its own, or a kernel on the Hub.

    Raises `UnsupportedCheckpointError`.
    """
    if "auto_map" in config:
        raise UnsupportedCheckpointError(
            f"{source.name!r} brings code of its own (auto_map), which is not run. {_without_it(config['model_type'])}"
        )
    if kernel := _kernel_of(config):
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {source.name!r} has {kernel}, which is code on the Hub that would run when the model is "
            f"loaded. Remove that from {CONFIG}, or convert a checkpoint without it."
        )


def _without_it(model_type: str) -> str:
    """What to do with a checkpoint that brings code of its own."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return f"Transformers has no {model_type} of its own, so it can't be converted."
    return (
        f"Transformers has a {model_type} of its own. If that is the same model, remove auto_map from {CONFIG} of a "
        f"copy, and convert the copy."
    )


def _kernel_of(config: dict) -> str | None:
    """A kernel on the Hub that a config, or one in it, names as its implementation of attention or experts."""
    configs = [config]
    while configs:
        for field, value in configs.pop().items():
            names = list(value.values()) if isinstance(value, dict) else [value]
            kernel = next((name for name in names if isinstance(name, str) and "/" in name), None)
            if field.removeprefix("_") in IMPLEMENTATIONS and kernel is not None:
                return f"{field} {kernel!r:.60}"
            if isinstance(value, dict):
                configs.append(value)
    return None
