"""Hyper-connections of a model in a small file of their own, enough to save when the base is frozen."""

import json
import math
import os
import secrets
import stat
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import HyperConnectionFileError, UnsupportedCheckpointError
from ..families.family import name_of_family
from ..families.reading.classes import FamilyName
from ..in_memory.convert_model import convert_with_fields
from ..kinds import FIELDS as DEFAULTS
from ..kinds import kind_of, readout_of
from ..models.configuration_hyper_connections import HyperConnectionConfig
from ..models.connection_fields import CHOICES
from ..models.connection_weights import gathered, warn_of_narrow, warn_of_old_places
from ..models.sub_layers import is_of_connection
from ..wrappers import config_of, connection_config, is_of_diffusers, modules_in_use, outermost_model

FILE = "hyper_connections.safetensors"
METADATA = "hyper_connections"  # the entry of the file's metadata with model type and connection fields, as JSON
FIELDS = {field.name: field.type for field in fields(HyperConnectionConfig)}
MAX_HEADER = 10_000_000  # bytes; a model of 100 layers has a fiftieth
LARGEST = {"hc_mult": 1024, "hc_block": 2**31, "hc_sinkhorn_iters": 1000}
DTYPES = ("F64", "F32", "F16", "BF16")


def hc_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's hyper-connections, by their names in the model of Transformers or diffusers.

    Of connections in PEFT's `modules_to_save`, these are the active adapter's copies.

    model: a model with hyper-connections, or a wrapper of one: PEFT's, a compiled or a distributed one.

    Raises `HyperConnectionFileError` when the connections themselves carry adapters.
    """
    parameters: dict[str, nn.Parameter] = {}
    for path, module in modules_in_use(_model(model)):
        if is_of_connection(path.rpartition(".")[2]):
            parameters |= {f"{path}.{name}": value for name, value in module.named_parameters()}
    for name in parameters:
        if "base_layer" in name.split("."):
            modules = sorted({part for path in parameters for part in path.split(".") if is_of_connection(part)})
            raise HyperConnectionFileError(
                f"an adapter changes {name!r}. Merge it first (merge_and_unload), or train connections whole, by "
                f"modules_to_save={modules}."
            )
    return parameters


def save_hc(model: nn.Module, path: str | os.PathLike) -> Path:
    """Write the hyper-connections of a model, with their fields, to one safetensors file.

    The file appears only when it is complete. With a sharded model every rank has to call this.

    model: as for `hc_parameters`.
    path: a file whose name ends in `.safetensors`, or a folder for `hyper_connections.safetensors`.

    Returns the file. Raises `HyperConnectionFileError` when the model has no hyper-connections, they carry adapters or
    are offloaded.
    """
    config = config_of(_model(model))
    if not _has_hyper_connections(config):
        kind = getattr(config, "model_type", type(model).__name__)
        raise HyperConnectionFileError(
            f"save_hc got a {kind!r} model without hyper-connections; give it one that convert_model or from_prenorm "
            f"returned."
        )
    warn_of_old_places(_model(model))
    parameters = hc_parameters(model)
    with gathered(parameters.values()):
        tensors = {name: _whole(name, parameter.detach()) for name, parameter in parameters.items()}
    fields_config = connection_config(config)
    saved = {"model_type": config.model_type, **{name: getattr(fields_config, name) for name in FIELDS}}
    warn_of_narrow({name: tensor.dtype for name, tensor in tensors.items()})
    file = _file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".hyperconn-{secrets.token_hex(8)}.part")  # ranks on other machines may have the same pid
    try:
        save_file(tensors, part, {"format": "pt", METADATA: json.dumps(saved)})
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file


def load_hc(model: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Give a model the hyper-connections of a file that `save_hc` wrote.

    model: a model with hyper-connections of the same fields, or a wrapper of one, which is changed; or their base,
        which stays unchanged and shares its tensors with the returned model, as in `convert_model`.
    path: the file, or the folder with it.

    Returns the model with these hyper-connections. Raises `HyperConnectionFileError` when the file can't be read or
    belongs to another model, and the errors of `convert_model` for a base. The model is then unchanged.
    """
    file = _file(path)
    saved, shapes = _read_header(file)
    stack = FamilyName.of(saved.get("model_type", "")).stack
    _refuse_other_fields(file, saved, _model(model), stack)
    if not _has_hyper_connections(config_of(_model(model))):
        connection_fields = {name: value for name, value in saved.items() if name != "model_type"}
        try:
            model = convert_with_fields(
                _model(model),
                connection_fields,
                stack,
                lambda converted: _matched_parameters(file, shapes, converted),
            )
        except (HyperConnectionFileError, UnsupportedCheckpointError):
            raise
        except (ValueError, TypeError, ArithmeticError, StrictDataclassError) as error:
            raise HyperConnectionFileError(f"no hyper-connections can be built as '{file}' says: {error}") from error
    parameters = _matched_parameters(file, shapes, model)
    for name, parameter in parameters.items():
        if parameter.is_meta or isinstance(parameter, DTensor) or hasattr(parameter, "ds_shape"):
            raise HyperConnectionFileError(f"{name!r} of the model is offloaded or sharded. Call load_hc before that.")
    with torch.no_grad(), safe_open(file, framework="pt") as opened:
        values = {name: opened.get_tensor(name) for name in parameters}
        warn_of_narrow({name: value.dtype for name, value in values.items()})
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    return model


def _model(model: nn.Module) -> nn.Module:
    """Return the outermost model of Transformers or diffusers in a model or a wrapper."""
    if (outermost := outermost_model(model)) is None:
        raise HyperConnectionFileError(
            f"got a {type(model).__name__}; give a Transformers model, one of diffusers, or a wrapper of one."
        )
    return outermost


def _has_hyper_connections(config) -> bool:
    # also for the classes of a Hub repo's own files, which are no subclasses of ours
    return hasattr(config, "base_model_type")


def _whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU, gathered if it is sharded."""
    if tensor.is_meta:
        raise HyperConnectionFileError(f"{name!r} is offloaded. Load the model without offloading, and save it then.")
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()


def _file(path: str | os.PathLike) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / FILE


def _read_header(file: Path) -> tuple[dict, dict[str, torch.Size]]:
    """Return the checked model type and connection fields of a file, and the shapes of its tensors."""
    try:
        _refuse_special_and_oversized(file)
        with safe_open(file, framework="pt") as opened:
            saved = json.loads((opened.metadata() or {}).get(METADATA, "null"), parse_constant=_no_number)
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            shapes = {name: torch.Size(part.get_shape()) for name, part in slices.items()}
            dtypes = {part.get_dtype() for part in slices.values()}
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise HyperConnectionFileError(
            f"'{file}' can't be read as a safetensors file: {_quoted(str(error))}. Give load_hc what save_hc returned."
        ) from error
    if not isinstance(saved, dict):
        raise HyperConnectionFileError(
            f"'{file}' was not written by save_hc: its metadata has no {METADATA!r}. Give load_hc a file that was."
        )
    if strange := sorted(dtypes.difference(DTYPES)):
        raise HyperConnectionFileError(
            f"'{file}' has tensors of dtype {', '.join(strange)}; accepted are {', '.join(DTYPES)}."
        )
    for name, value in saved.items():
        if (accepted := _accepted(name, value)) is not None:
            raise HyperConnectionFileError(
                f"'{file}' says {_quoted(name)}: {_quoted(value)}; accepted {accepted}. Give load_hc what save_hc "
                f"returned."
            )
    _refuse_other_numbers_of_streams(file, saved, shapes)
    return saved, shapes


def _quoted(value: object) -> str:
    """Return a value of a file as a message shows it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _refuse_special_and_oversized(file: Path) -> None:
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError("it is not a regular file")
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
    if size > MAX_HEADER:
        raise OSError(f"its header has {size} bytes, at most {MAX_HEADER} are accepted")


def _no_number(constant: str) -> None:
    raise ValueError(f"its metadata holds {constant}")


def _accepted(name: str, value: object) -> str | None:
    """Say which values a field of the file accepts if it does not accept this value; else None."""
    if name == "model_type":
        return None if isinstance(value, str) else "is a text"
    if name not in FIELDS:
        return f"names are model_type, {', '.join(FIELDS)}"
    if (choices := CHOICES.get(name)) is not None:
        return None if value in choices else f"are {', '.join(map(repr, choices))}"
    if FIELDS[name] is bool:
        return None if isinstance(value, bool) else "are true and false"
    if value is None and FIELDS[name] == float | None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if FIELDS[name] is int else int | float):
        return f"is {'a whole' if FIELDS[name] is int else 'a'} number"
    if name in LARGEST:
        return None if 1 <= value <= LARGEST[name] else f"are numbers from 1 to {LARGEST[name]}"
    return None if math.isfinite(value) else "is a finite number"


def _refuse_other_fields(file: Path, saved: dict, model: Any, stack: str | None) -> None:
    """Refuse a file for another model: of other fields, or of another type than a base's conversion.

    stack: the stack with the connections of the file; None for the usual ones.
    """
    config = config_of(model)
    if _has_hyper_connections(config):
        fields_config = connection_config(config)
        expected = {name: getattr(fields_config, name, None) for name in saved}
        expected["model_type"] = config.model_type
    else:
        base_type = type(model).__name__ if is_of_diffusers(model) else name_of_family(config.to_dict(), stack)
        expected = {**saved, "model_type": f"hc_{base_type}"}
    differing = [
        f"{name}={_quoted(value)}, the model {expected[name]!r}"
        for name, value in saved.items()
        if expected[name] != value
    ]
    if differing:
        raise HyperConnectionFileError(
            f"'{file}' belongs to another model: it has {'; '.join(differing)}. Load it onto its base, or onto a "
            f"conversion with the same fields."
        )


def _refuse_other_numbers_of_streams(file: Path, saved: dict, shapes: dict[str, torch.Size]) -> None:
    """Refuse a number of streams that the tensors contradict, before anything of that size is made."""
    config = {**DEFAULTS, **saved, "hidden_size": 0}
    n, of_any_size = config["hc_mult"], {**kind_of(config).shapes(config, ()), **readout_of(config).shapes(config, ())}
    expected = {name: shape for name, shape in of_any_size.items() if 0 not in shape}
    for name, shape in shapes.items():
        expected_shape = expected.get(name.rpartition(".")[2])
        if expected_shape is not None and shape != expected_shape:
            raise HyperConnectionFileError(
                f"'{file}' contradicts itself: hc_mult is {n}, but {_quoted(name)} is {list(shape)}, not "
                f"{list(expected_shape)}. Give another file."
            )
    if n > 1 and expected and not any(name.rpartition(".")[2] in expected for name in shapes):
        raise HyperConnectionFileError(
            f"'{file}' contradicts itself: hc_mult is {n}, but it holds no connections. Give another file."
        )


def _matched_parameters(file: Path, shapes: dict[str, torch.Size], model: nn.Module) -> dict[str, nn.Parameter]:
    """Return each parameter of the model by the name of its tensor; the file may come from a model with a head."""
    prefix = f"{getattr(_model(model), 'base_model_prefix', '')}."
    parameters = {name.removeprefix(prefix): parameter for name, parameter in hc_parameters(model).items()}
    names = {name.removeprefix(prefix): name for name in shapes}
    if strange := sorted(parameters.keys() ^ names.keys()):
        where = "the model has no" if strange[0] in names else "the file has no"
        raise HyperConnectionFileError(
            f"'{file}' belongs to another model: {where} {_quoted(strange[0])}. Give the file of this model."
        )
    for name, parameter in parameters.items():
        if parameter.shape != shapes[names[name]]:
            raise HyperConnectionFileError(
                f"'{file}' belongs to another model: its {name!r} is {list(shapes[names[name]])}, the model's "
                f"{list(parameter.shape)}. Give the file of this model."
            )
    return {names[name]: parameter for name, parameter in parameters.items()}
