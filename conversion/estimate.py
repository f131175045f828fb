"""`hf-hyperconn estimate`: memory and time of training with connections, from a config and the headers of weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_hyperconn.analysis.estimates import ITEM_SIZES, Estimate, estimate
from hf_hyperconn.errors import ConversionError, UnsupportedCheckpointError
from hf_hyperconn.models.connection_fields import GivenFields
from hf_hyperconn.models.sub_layers import is_of_connection

from .checkpoint.checkpoint import open_conversion
from .checkpoint.checkpoint_files import read_raw_config
from .checkpoint.connection_options import describe, fields_of_conversion
from .checkpoint.source import open_source
from .inspection import fields_of, flops_of_base, quantization_method, written_count
from .planning.plan import open_base
from .terminal import written_bytes

DTYPES = tuple(ITEM_SIZES)


@dataclass(frozen=True)
class TrainingEstimate:
    """An estimate for a checkpoint.

    fields: of its connections.
    dtype: of its weights.
    """

    model: str
    fields: Mapping[str, Any]
    dtype: str
    estimate: Estimate

    def lines(self) -> list[str]:
        """Return the estimate for people, as a table of the plain model and the model with connections."""
        estimate = self.estimate
        head = [
            f"{self.model}, {describe(dict(self.fields))}",
            f"Estimates for {'1 GPU' if estimate.gpus == 1 else f'each of {estimate.gpus} GPUs'}, "
            f"{estimate.tokens:,} tokens a step, weights in {self.dtype}, AdamW:",
        ]
        rows = [
            ("parameters", written_count(estimate.parameters), f"+{written_count(estimate.added_parameters)}"),
            ("FLOPs, a token's forward", written_count(estimate.flops), f"+{written_count(estimate.added_flops)}"),
            ("weights, gradients, AdamW", written_bytes(estimate.state), f"+{written_bytes(estimate.added_state)}"),
        ]
        if estimate.gpus > 1:
            state = (written_bytes(count / estimate.gpus) for count in (estimate.state, estimate.added_state))
            rows.append(("  sharded by FSDP", next(state), f"+{next(state)}"))
        rows.append(("kept by connections", "", f"+{written_bytes(estimate.kept)}"))
        if estimate.added_layer_inputs is not None:
            rows.append(
                (
                    "  with checkpointing",
                    written_bytes(estimate.layer_inputs),
                    f"+{written_bytes(estimate.added_layer_inputs)}",
                )
            )
        time = "measure it" if estimate.time is None else f"{estimate.time:.2f}x, compiled on an H100"
        rows.append(("time of a step", "1.00x", time))
        table = [f"{name:<27} {plain:>12}  {added}" for name, plain, added in (("", "plain", "connections"), *rows)]
        return [*head, "", *table, "", "Not in it: what the plain model keeps within layers, buffers, fragmentation."]

    def as_dict(self) -> dict:
        """Return the estimate for machines."""
        return {"model": self.model, **self.fields, "dtype": self.dtype, **asdict(self.estimate)}


def estimate_training(
    model: str,
    *,
    fields: GivenFields | None = None,
    stack: str | None = None,
    revision: str | None = None,
    tokens: int = 4096,
    gpus: int = 1,
    dtype: str = "float32",
) -> TrainingEstimate:
    """Estimate the training of a base with connections, or of a conversion.

    model: local folder or Hub id. Of a Hub repo only headers of weights and small JSON files are fetched.
    fields: of the connections to add; a conversion has its own.
    stack: of a base, as for `plan_conversion`.
    revision: branch, tag or commit of a Hub repo.
    tokens: tokens of a step on one GPU.
    gpus: number of GPUs.
    dtype: of the weights, "float32" or "bfloat16".

    Raises `UnsupportedCheckpointError` for a model that can't be read or converted, and `ConversionError` for fields
    that it does not accept.
    """
    source = open_source(model, revision)
    if str(read_raw_config(source).get("model_type")).startswith("hc_"):
        if fields or stack:
            raise ConversionError(f"{model!r} has connections already. Leave out their options.")
        checkpoint = open_conversion(source)
        chosen = fields_of(checkpoint)
        if method := quantization_method(checkpoint.config):
            raise UnsupportedCheckpointError(
                f"the weights of {model!r} are quantized by {method}, and packed weights are not trained. "
                f"Give its base."
            )
    else:
        chosen = fields_of_conversion(**(fields or {}))
        checkpoint = open_base(source, stack, chosen)
    base = [tensor for name, tensor in checkpoint.weights.tensors.items() if not is_of_connection(name)]
    figures = estimate(
        {**checkpoint.config, **chosen},
        checkpoint.family.norm,
        parameters=sum(tensor.size for tensor in base),
        flops=flops_of_base(checkpoint),
        tokens=tokens,
        gpus=gpus,
        dtype=dtype,
    )
    return TrainingEstimate(checkpoint.name, chosen, dtype, figures)
