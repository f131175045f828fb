# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The fields every hyper-connection config shares, and their validation."""

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedConfig

CONNECTIONS = ("shc", "dhc")
READOUTS = ("mean", "sum")


@dataclass(kw_only=True, repr=False)
class HyperConnectionConfig:
    """Mixin before a family's config.

    connection (`str`, *optional*, defaults to `"dhc"`):
        `"shc"` for static, `"dhc"` for dynamic hyper-connections.
    hc_mult (`int`, *optional*, defaults to 4):
        Number of residual streams, at least 1 (the paper's expansion rate n).
    hc_tanh (`bool`, *optional*, defaults to `True`):
        Whether the dynamic part of the coefficients goes through tanh.
    hc_readout (`str`, *optional*, defaults to `"mean"`):
        How the streams become one before the final norm. `"mean"` keeps a converted model equal to its base; `"sum"`
        is the paper's, for training from scratch.
    """

    base_model_type: ClassVar[str]
    base_model_pp_plan: ClassVar[None] = None  # pipeline stages exchange [B, S, D]; streams are [B, S, N, D]

    connection: str = "dhc"
    hc_mult: int = 4
    hc_tanh: bool = True
    hc_readout: str = "mean"

    def validate_hyper_connections(self):
        """Part of the `@strict` validation.

        Raises `ValueError` when a hyper-connection field has a value that is not accepted.
        """
        if self.hc_mult < 1:
            raise ValueError(f"hc_mult is {self.hc_mult}; it counts residual streams and must be at least 1.")
        if self.connection not in CONNECTIONS:
            raise ValueError(f"connection is {self.connection!r}; accepted are {', '.join(map(repr, CONNECTIONS))}.")
        if self.hc_readout not in READOUTS:
            raise ValueError(f"hc_readout is {self.hc_readout!r}; accepted are {', '.join(map(repr, READOUTS))}.")

    @classmethod
    def from_prenorm(cls, config: PreTrainedConfig, **fields):
        """This family's config for the Pre-Norm `config`, with the hyper-connection `fields` given.

        Raises `ValueError` when `config` belongs to another family.
        """
        if config.model_type != cls.base_model_type:
            raise ValueError(
                f"{cls.__name__} is made from a {cls.base_model_type!r} config, not from {config.model_type!r}."
            )
        base = {
            name: value
            for name, value in config.to_dict().items()
            if name not in ("model_type", "architectures", "auto_map", "transformers_version")
        }
        return cls(**{**base, **fields}, attn_implementation=config._attn_implementation)
