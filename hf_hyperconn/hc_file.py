"""The hyper-connections of a model in a file of their own: small, and all there is to save when the base is frozen."""

import json
import os
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .errors import HyperConnectionFileError
from .in_memory import convert_with_fields
from .models.configuration_hyper_connections import HyperConnectionConfig
from .models.modeling_hyper_connections import ADDED

FILE = "hyper_connections.safetensors"
METADATA = "hyper_connections"  # the entry of the file's metadata with model type and connection fields, as JSON
FIELDS = tuple(field.name for field in fields(HyperConnectionConfig))


def hc_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model's hyper-connections, by their names in the Transformers model.

    model: a model with hyper-connections, or a wrapper of one: PEFT's, a compiled or a distributed one. Of connections
        in PEFT's `modules_to_save`, the copy of the active adapter.

    Raises `HyperConnectionFileError` when the connections themselves carry adapters.
    """
    parameters = {}
    for path, module in _transformers_model(model).named_modules():
        if path.rpartition(".")[2] in ADDED:
            parameters |= {f"{path}.{name}": value for name, value in _active_copy(module).named_parameters()}
    for name in parameters:
        if "base_layer" in name.split("."):
            raise HyperConnectionFileError(
                f"an adapter changes {name!r}. Merge it first (merge_and_unload), or train connections whole, by "
                f"modules_to_save=['attn_hc', 'mlp_hc']."
            )
    return parameters


def save_hc(model: nn.Module, path: str | os.PathLike) -> Path:
    """Write the hyper-connections of a model, and what is needed to build them again, to one safetensors file.

    The file appears only when it is complete. In a sharded model every rank has to take part.

    model: as for `hc_parameters`.
    path: a file whose name ends in `.safetensors`, or a folder, which will hold `hyper_connections.safetensors`.

    Returns the file. Raises `HyperConnectionFileError` when the model has no hyper-connections, they carry adapters or
    are offloaded.
    """
    config = _transformers_model(model).config
    if not _has_hyper_connections(config):
        raise HyperConnectionFileError(
            f"save_hc got a {config.model_type!r} model without hyper-connections; give it one that convert_model or "
            f"from_prenorm returned."
        )
    tensors = {name: _whole(name, parameter.detach()) for name, parameter in hc_parameters(model).items()}
    saved = {"model_type": config.model_type, **{name: getattr(config, name) for name in FIELDS}}
    file = _file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, {"format": "pt", METADATA: json.dumps(saved)})
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file


def load_hc(model: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Give a model the hyper-connections of a file that `save_hc` wrote.

    model: a model with hyper-connections of the same fields, or a wrapper of one, which is changed; or their base,
        which stays as it is and shares its tensors with the model returned, as in `convert_model`.
    path: the file, or the folder with it.

    Returns the model with these hyper-connections. Raises `HyperConnectionFileError` when the file can't be read or
    belongs to another model, and what `convert_model` raises when a base can't be converted so. The model is then
    unchanged.
    """
    file = _file(path)
    saved, tensors = _read(file)
    config = _transformers_model(model).config
    wanted = {"model_type": config.model_type, **{name: getattr(config, name, None) for name in saved}}
    if not _has_hyper_connections(config):
        wanted = {**saved, "model_type": f"hc_{config.model_type}"}
    differing = [
        f"{name}={value!r}, the model {wanted[name]!r}" for name, value in saved.items() if wanted[name] != value
    ]
    if differing:
        raise HyperConnectionFileError(
            f"'{file}' belongs to another model: it has {'; '.join(differing)}. Load it onto its base, or onto a "
            f"conversion with the same fields."
        )
    if not _has_hyper_connections(config):
        connection_fields = {name: value for name, value in saved.items() if name != "model_type"}
        model = convert_with_fields(_transformers_model(model), connection_fields)
    pairs = _matched(file, tensors, model)
    with torch.no_grad():
        for parameter, value in pairs:
            parameter.copy_(value)
    return model


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    """The outermost Transformers model in what may be a wrapper of it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise HyperConnectionFileError(f"got a {type(model).__name__}; give a Transformers model, or a wrapper of one.")


def _has_hyper_connections(config) -> bool:
    # also for the classes of a Hub repo's own files, which are no subclasses of ours
    return hasattr(config, "base_model_type")


def _active_copy(module: nn.Module) -> nn.Module:
    """The connection that computes, when `module` is PEFT's wrapper for `modules_to_save`."""
    if not hasattr(module, "original_module"):
        return module
    active = (
        [] if module.disable_adapters else [name for name in module.active_adapters if name in module.modules_to_save]
    )
    return module.modules_to_save[active[0]] if active else module.original_module


def _whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, gathered when it is sharded."""
    if tensor.is_meta:
        raise HyperConnectionFileError(f"{name!r} is offloaded. Load the model without offloading, and save it then.")
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()


def _file(path: str | os.PathLike) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / FILE


def _read(file: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Model type and connection fields of a file, and its tensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            saved = json.loads((opened.metadata() or {}).get(METADATA, "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise HyperConnectionFileError(
            f"'{file}' can't be read as a safetensors file: {error}. Give load_hc what save_hc returned."
        ) from error
    if not isinstance(saved, dict):
        raise HyperConnectionFileError(
            f"'{file}' was not written by save_hc: its metadata has no {METADATA!r}. Give load_hc a file that was."
        )
    return saved, tensors


def _matched(
    file: Path, tensors: dict[str, torch.Tensor], model: nn.Module
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter of the model with its tensor; names of a model with and without a head are the same ones."""
    prefix = f"{_transformers_model(model).base_model_prefix}."
    parameters = {name.removeprefix(prefix): parameter for name, parameter in hc_parameters(model).items()}
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if strange := sorted(parameters.keys() ^ tensors.keys()):
        where = "the model has no" if strange[0] in tensors else "the file has no"
        raise HyperConnectionFileError(f"'{file}' belongs to another model: {where} {strange[0]!r}.")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise HyperConnectionFileError(
                f"'{file}' belongs to another model: its {name!r} is {list(tensors[name].shape)}, the model's "
                f"{list(parameter.shape)}."
            )
        if parameter.is_meta or isinstance(parameter, DTensor):
            raise HyperConnectionFileError(f"{name!r} of the model is offloaded or sharded. Call load_hc before that.")
    return [(parameter, tensors[name]) for name, parameter in parameters.items()]
