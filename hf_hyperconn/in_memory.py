"""Conversion of a model that is already loaded."""

import torch
from transformers import PreTrainedModel

from .errors import UnsupportedCheckpointError
from .families import FAMILIES
from .generic import hyper_connection_class
from .models.modeling_hyper_connections import HyperConnectionPreTrainedModel, is_of_connection


def convert_model(
    model: PreTrainedModel,
    *,
    hc_mult: int = 4,
    connection: str = "dhc",
    hc_tanh: bool = True,
    hc_readout: str = "mean",
) -> PreTrainedModel:
    """Give a loaded model hyper-connections at the equivalent initialisation.

    The returned model shares the parameters and buffers of `model`: training one trains the other. It computes the
    same logits, bit for bit (with the mean readout).

    model: a Transformers model of a family in `hf_hyperconn.families.FAMILIES`, or any other whose decoder layers add
        two branches to a residual stream; the latter's conversion can be trained, but not saved whole.
    hc_mult, connection, hc_tanh, hc_readout: see `HyperConnectionConfig`.

    Raises `UnsupportedCheckpointError` for another kind of model, a quantised one, one spread over devices or one
    whose modules have been replaced or wrapped.
    """
    fields = {"hc_mult": hc_mult, "connection": connection, "hc_tanh": hc_tanh, "hc_readout": hc_readout}
    return convert_with_fields(model, fields)


def convert_with_fields(model: PreTrainedModel, fields: dict) -> PreTrainedModel:
    """`convert_model`, with any of the fields of `HyperConnectionConfig`."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or isinstance(model, HyperConnectionPreTrainedModel):
        raise UnsupportedCheckpointError(
            f"convert_model got a {name}; give it a Transformers model on one residual stream."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedCheckpointError(f"this {name} is quantised; load it in full precision and convert that.")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise UnsupportedCheckpointError(
            f"this {name} is spread over several devices; use from_prenorm(..., device_map=...) instead."
        )
    family = FAMILIES.get(model.config.model_type)
    if family is not None and name in family.architectures:
        hc_class = getattr(family.modeling_module(), family.architectures[name])
    else:
        hc_class = hyper_connection_class(model)
    config = hc_class.config_class.from_prenorm(model.config, **fields)
    with torch.device("meta"):
        converted = hc_class(config)
    _share_tensors(model, converted)
    converted.materialise_connections(model.device)
    converted.tie_weights()
    if model.can_generate():
        converted.generation_config = model.generation_config
    return converted.train(model.training)


def _share_tensors(model: PreTrainedModel, converted: PreTrainedModel) -> None:
    found = converted.load_state_dict(model.state_dict(keep_vars=True), strict=False, assign=True)
    strange = [*found.unexpected_keys, *(key for key in found.missing_keys if not is_of_connection(key))]
    if strange:
        raise UnsupportedCheckpointError(
            f"this {type(model).__name__} is not as Transformers builds it: {strange[0]} has no counterpart. "
            f"Merge or remove adapters and wrappers first."
        )
    persistent = model.state_dict()
    for name, buffer in model.named_buffers():
        if name not in persistent:
            owner, _, attribute = name.rpartition(".")
            setattr(converted.get_submodule(owner), attribute, buffer)
