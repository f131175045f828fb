"""Transformers' Trainer for hyper-connections: weight decay, learning rate, mixed precision, resuming."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from ..errors import HyperConnError
from ..models.sub_layers import is_of_connection
from .checkpoints import is_saved_whole, load_weights
from .deepspeed import refuse_cast_by_zero_init, refuse_shared_settings, use_autocast
from .muon import give_to_muon, hidden_matrices, refuse_orthogonalized
from .parameter_groups import check_connections, decayed_names


class HCTrainerMixin(Trainer):
    """Mixin before a Trainer class: weight decay and learning rate of hyper-connections. See `hc_param_groups`.

    Checkpoints are resumed from, and the best one loaded, with all weights, even weights with other names on disk.

    hc_lr: learning rate of the connections, scheduled like the base's rate, which is the default.
    muon: whether torch's Muon trains the matrices inside of layers, and AdamW the rest. See `hc_param_groups`.

    Raises `HyperConnError` for `hc_lr` with a model without hyper-connections, or with an optimizer that exists
    already. Raises it for `muon` with another optimizer or DeepSpeed, and for connections that DeepSpeed has cast.
    """

    def __init__(self, *args, hc_lr: float | None = None, muon: bool = False, **kwargs):
        self.hc_lr, self.muon = hc_lr, muon
        super().__init__(*args, **kwargs)
        model: Any = self.model
        check_connections(model, hc_lr)
        if self.is_deepspeed_enabled:
            refuse_cast_by_zero_init(model)
        self._has_its_optimizer = self.optimizer is not None
        if hc_lr is not None and self._has_its_optimizer:
            raise HyperConnError(
                f"hc_lr={hc_lr} has no effect on an optimizer that the Trainer is given. Make its groups by "
                f"hc_param_groups(model, ..., hc_lr={hc_lr}), or leave it to the Trainer."
            )
        if muon:
            self._refuse_besides_muon()

    def create_accelerator_and_postprocess(self) -> None:
        """Do as Transformers, with 16 bits by autocast under FSDP and DeepSpeed, too.

        Their own mixed precision casts every parameter, which would round the connections' coefficients.
        """
        from accelerate.utils import AutocastKwargs  # comes with the extra "train", which the rest can do without

        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            use_autocast(self.accelerator.state.deepspeed_plugin)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and self.accelerator.mixed_precision != "no":
            plugin.set_mixed_precision("fp32", override=True)
            # else the 16-bit copy of every weight would stay until the end of the forward
            self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)

    def autocast_smart_context_manager(self, *args, **kwargs) -> AbstractContextManager:
        """Do as Transformers, with autocast under FSDP, too."""
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        usual = super()._load_from_checkpoint
        self._load_weights(resume_from_checkpoint, lambda: usual(resume_from_checkpoint, model))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None  # or there would be nothing to load
        self._load_weights(self.state.best_model_checkpoint, super()._load_best_model)

    def _load_weights(self, folder: str, usual: Callable[[], None]) -> None:
        """Load a checkpoint as `from_pretrained` would, or else as Transformers' Trainer does.

        Raises `HyperConnError` when the checkpoint lacks weights.
        """
        model: Any = getattr(self.model, "_orig_mod", self.model)  # what was compiled
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not is_saved_whole(model, folder):
            usual()
        else:
            load_weights(model, folder)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the Trainer's names, without parameters of connections that zero would break."""
        return decayed_names(model, super().get_decay_parameter_names(model))

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        trained: Any = model or self.model
        if is_new and self.hc_lr is not None:
            _give_rate(optimizer, trained, self.hc_lr)
        if is_new and self.muon:
            matrices = hidden_matrices(trained, set(self.get_decay_parameter_names(trained)))
            self.optimizer = optimizer = give_to_muon(optimizer, matrices)
        refuse_orthogonalized(trained, optimizer)
        if not self._has_its_optimizer:
            if self.is_deepspeed_enabled:
                refuse_shared_settings(self.accelerator.state.deepspeed_plugin.deepspeed_config, self.hc_lr)
            self._refuse_lost_settings(trained, optimizer)
        return optimizer

    def _refuse_besides_muon(self) -> None:
        """Raise `HyperConnError` for settings that exclude `muon`."""
        optim = getattr(self.args.optim, "value", self.args.optim)
        if self.is_deepspeed_enabled:
            raise HyperConnError(
                "muon=True needs matrices, which DeepSpeed flattens. Use FSDP2, or leave muon out. DeepSpeed's own "
                "Muon would orthogonalize connections."
            )
        if self._has_its_optimizer or self.optimizer_cls_and_kwargs is not None:
            raise HyperConnError(
                "muon=True has no effect on an optimizer that the Trainer is given. Make its groups by "
                "hc_param_groups(model, ..., muon=True), or leave it to the Trainer."
            )
        if optim not in ("adamw_torch", "adamw_torch_fused"):
            raise HyperConnError(
                f"muon=True needs optim='adamw_torch' or 'adamw_torch_fused' for the rest (got {optim!r}). Choose one."
            )

    def _refuse_lost_settings(self, model: nn.Module, optimizer: Any) -> None:
        """Raise `HyperConnError` when an optimizer has another rate or weight decay for connections than requested."""
        optim = getattr(self.args.optim, "value", self.args.optim)
        groups = {id(p): group for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        decayed = set(self.get_decay_parameter_names(model))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not is_of_connection(name):
                continue
            group = groups.get(id(parameter), {})
            if self.hc_lr is not None and group.get("lr") != self.hc_lr:
                raise HyperConnError(
                    f"hc_lr={self.hc_lr} has no effect on {name} with optim={optim!r}, which "
                    f"{'has a rate of its own for it' if group else 'has no group with it'}. Leave hc_lr out, or "
                    f"choose another optim, such as 'adamw_torch'."
                )
            if name not in decayed and group.get("weight_decay", 0) != 0:
                raise HyperConnError(
                    f"optim={optim!r} applies a weight decay to {name}, which pulls it to zero, where "
                    f"there is no residual connection. Set weight_decay=0, or choose another optim."
                )


class HCTrainer(HCTrainerMixin, Trainer):
    """Transformers' Trainer, with the right weight decay and learning rate for hyper-connections.

    For another Trainer, such as trl's: `class HCSFTTrainer(HCTrainerMixin, SFTTrainer): pass`.
    """


def _give_rate(optimizer: torch.optim.Optimizer, model: nn.Module, hc_lr: float) -> None:
    """Move the parameters of connections into groups of their own, with their learning rate."""
    connections = {id(parameter) for name, parameter in model.named_parameters() if is_of_connection(name)}
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in connections]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in connections]
            optimizer.add_param_group({**group, "params": moved, "lr": hc_lr})
