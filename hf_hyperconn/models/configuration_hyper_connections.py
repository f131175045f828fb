# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The fields every hyper-connection config shares, and their validation."""

import os
import re
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedConfig
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from .peft_defaults import share_peft_defaults

CONNECTIONS = ("shc", "dhc", "mhc", "ihc", "frac", "keel")
READOUTS = ("mean", "sum", "learned")
NORMS = (None, "dyt", "derf")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(kw_only=True, repr=False)
class HyperConnectionConfig:
    """Mixin before a family's config.

    connection (`str`, *optional*, defaults to `"dhc"`):
        `"shc"` for static, `"dhc"` for dynamic hyper-connections; `"mhc"` for manifold-constrained ones, `"ihc"` for
        these with unmixed streams; `"frac"` for frac-connections; `"keel"` for Keel, which has one stream and no
        Pre-Norm equivalent.
    hc_mult (`int`, *optional*, defaults to 4):
        Number of residual streams, at least 1 (the paper's expansion rate n); at least 2 for `"mhc"` and `"ihc"`. For
        `"frac"` the number of parts of the hidden state.
    hc_tanh (`bool`, *optional*, defaults to `True`):
        Whether the dynamic part of the coefficients of `"dhc"` and `"frac"` goes through tanh.
    hc_readout (`str`, *optional*, defaults to `"mean"`):
        How the streams become one before the final norm. `"mean"` keeps a converted model equal to its base; `"sum"`
        is the paper's, for training from scratch; `"learned"` predicts weights from the streams (DeepSeek-V4). The
        parts of `"frac"` are always put side by side.
    hc_sinkhorn_iters (`int`, *optional*, defaults to 20):
        For `"mhc"`, how often columns and rows of the mixing matrix are normalised.
    hc_eps (`float`, *optional*, defaults to 1e-6):
        For `"mhc"`, `"ihc"` and the learned readout, added to reads, divisors and the mean square of the norm.
    norm (`str`, *optional*):
        `"dyt"` or `"derf"` puts that function in the place of every norm, for training from scratch.
    norm_alpha_attention, norm_alpha_other (`float`, *optional*):
        For these, the initial alpha before and inside attention, and elsewhere; by default the papers'.
    """

    base_model_type: ClassVar[str]
    base_model_pp_plan: ClassVar[None] = None  # pipeline stages exchange [B, S, D]; streams are [B, S, N, D]

    connection: str = "dhc"
    hc_mult: int = 4
    hc_tanh: bool = True
    hc_readout: str = "mean"
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    norm: str | None = None
    norm_alpha_attention: float | None = None
    norm_alpha_other: float | None = None

    def __init_subclass__(cls, *args, **kwargs):
        super().__init_subclass__(*args, **kwargs)
        # AutoTokenizer looks the tokenizer's class up by model type, and so finds the base's
        names, overruled = TOKENIZER_MAPPING_NAMES, MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if cls.base_model_type in names:
            names[cls.model_type] = names[cls.base_model_type]
        if cls.base_model_type in overruled:
            overruled.add(cls.model_type)
        share_peft_defaults(cls.model_type, cls.base_model_type)

    def to_dict(self) -> dict:
        """As Transformers' own. PEFT reads a model's type from here, and then finds its defaults for the base."""
        share_peft_defaults(self.model_type, self.base_model_type)
        return super().to_dict()

    def validate_hyper_connections(self):
        """Part of the `@strict` validation.

        Raises `ValueError` when a hyper-connection field has a value that is not accepted.
        """
        if self.hc_mult < 1:
            raise ValueError(f"hc_mult is {self.hc_mult}; it counts residual streams and must be at least 1.")
        if self.connection in ("mhc", "ihc") and self.hc_mult < 2:
            raise ValueError(f"hc_mult is {self.hc_mult}; {self.connection!r} needs at least 2 residual streams.")
        if self.connection == "keel" and self.hc_mult != 1:
            raise ValueError(f"hc_mult is {self.hc_mult}; Keel carries one residual stream: set hc_mult=1.")
        if self.norm not in NORMS:
            raise ValueError(f"norm is {self.norm!r}; accepted are {', '.join(map(repr, NORMS))}.")
        if self.connection == "frac" and self.hidden_size % self.hc_mult:
            raise ValueError(f"hc_mult is {self.hc_mult}, which does not divide hidden_size, {self.hidden_size}.")
        if self.connection == "frac" and self.hc_readout != "mean":
            raise ValueError(f"hc_readout is {self.hc_readout!r}; the parts of 'frac' are joined: leave it at 'mean'.")
        if self.hc_sinkhorn_iters < 1:
            raise ValueError(f"hc_sinkhorn_iters is {self.hc_sinkhorn_iters}; it must be at least 1.")
        if self.connection not in CONNECTIONS:
            raise ValueError(f"connection is {self.connection!r}; accepted are {', '.join(map(repr, CONNECTIONS))}.")
        if self.hc_readout not in READOUTS:
            raise ValueError(f"hc_readout is {self.hc_readout!r}; accepted are {', '.join(map(repr, READOUTS))}.")

    @classmethod
    def from_prenorm(cls, config: PreTrainedConfig, **fields):
        """This family's config for the Pre-Norm `config`, with the hyper-connection `fields` given.

        That of a base on the Hub names it, as `hc_base_model`, wherever the model is saved later.

        Raises `ValueError` when `config` belongs to another family, or no model with `fields` is equivalent to it.
        """
        reason = None
        if fields.get("connection") == "keel":
            reason = "Keel norms the residual stream itself after every sub-layer."
        elif fields.get("norm") is not None:
            reason = "DyT and Derf compute another function than a norm."
        if reason:
            raise ValueError(
                f"{reason} No pretrained model computes the same. Train {cls.__name__}(...) from scratch."
            )
        if config.model_type != cls.base_model_type:
            raise ValueError(
                f"{cls.__name__} is made from a {cls.base_model_type!r} config, not from {config.model_type!r}."
            )
        base = {
            name: value
            for name, value in config.to_dict().items()
            if name not in ("model_type", "architectures", "auto_map", "transformers_version")
        }
        if HUB_ID.fullmatch(config.name_or_path or "") and not os.path.isdir(config.name_or_path):
            base["hc_base_model"] = config.name_or_path
        return cls(
            **{**base, **fields},
            attn_implementation=config._attn_implementation,
            experts_implementation=config._experts_implementation,
        )
