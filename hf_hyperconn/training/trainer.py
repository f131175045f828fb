"""Training hyper-connection models: weight decay, learning rate, what is frozen.

Weight decay pulls a parameter to zero. For the static part of a hyper-connection zero means no residual connection at
all, so it is left alone, and so are scales; what predicts the dynamic part decays (HC paper, Section 4).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.utils import logging

from ..errors import HyperConnError
from ..models.sub_layers import is_of_connection
from ..wrappers import modules_in_use
from .checkpoints import is_saved_whole, load_weights

logger = logging.get_logger(__name__)

WIDTH = ("static_alpha", "dynamic_alpha_fn", "dynamic_alpha_scale")
DEPTH = ("static_beta", "dynamic_beta_fn", "dynamic_beta_scale")


def hc_param_groups(
    model: nn.Module, lr: float, weight_decay: float, hc_lr: float | None = None
) -> list[dict[str, object]]:
    """Parameter groups for a `torch.optim` optimizer: what decays and what doesn't, connections apart.

    model: a hyper-connection model, also inside a wrapper such as PEFT's.
    lr, weight_decay: of the base; norms and biases do not decay, as in Transformers' Trainer.
    hc_lr: learning rate of the connections; by default that of the base.

    Frozen parameters are in no group, groups without parameters are left out.

    Raises `HyperConnError` when a model without hyper-connections is given a rate for them.
    """
    _tell_of_no_connections(model, hc_lr)
    of_no_training = Trainer.__new__(Trainer)  # its rule reads nothing but the model
    decayed = set(decayed_names(model, of_no_training.get_decay_parameter_names(model)))
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((is_of_connection(name), name in decayed), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": hc_lr if of_connection and hc_lr is not None else lr,
            "weight_decay": weight_decay if decays else 0.0,
        }
        for (of_connection, decays), parameters in sorted(groups.items(), key=lambda group: group[0], reverse=True)
    ]


def decayed_names(model: nn.Module, usual: Iterable[str]) -> list[str]:
    """Names of the parameters that weight decay applies to.

    usual: those that a Trainer would name, which hold outside of connections.
    """
    decays = dict.fromkeys(usual, True)
    for path, module in model.named_modules():
        if hasattr(module, "decayed"):
            for name, _ in module.named_parameters(path, recurse=False):
                decays[name] = name.rpartition(".")[2] in module.decayed
    return [name for name, applies in decays.items() if applies]


def freeze_base(model: nn.Module) -> None:
    """Leave only the hyper-connections trainable; of those in PEFT's `modules_to_save`, the active adapter's copies.

    Raises `HyperConnError` for a model without any.
    """
    parameters = dict(model.named_parameters())
    if not any(map(is_of_connection, parameters)):
        raise _no_connections(model)
    used = {id(parameter) for _, module in modules_in_use(model) for parameter in module.parameters(recurse=False)}
    for name, parameter in parameters.items():
        parameter.requires_grad_(is_of_connection(name) and id(parameter) in used)


def freeze_hc(model: nn.Module, *, width: bool = True, depth: bool = True) -> None:
    """Freeze hyper-connections, whole or in part; what is not frozen here stays as it is.

    width: the width connections: reads and mixes, static and dynamic ("WC" in the paper's Table 3).
    depth: the depth connections: writes, static and dynamic ("B").

    Raises `HyperConnError` for a model without hyper-connections, or for one part of connections whose parts have
    parameters in common (mHC, iHC).
    """
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if is_of_connection(name)]
    if not parameters:
        raise _no_connections(model)
    has_parts = any(name.endswith(WIDTH) for name, _ in parameters)
    if width != depth and not has_parts:
        raise HyperConnError(
            "the connections of this model have parameters that width and depth share. Freeze both or none."
        )
    for name, parameter in parameters:
        frozen = width if name.endswith(WIDTH) else depth if name.endswith(DEPTH) else width and depth
        if frozen:
            parameter.requires_grad_(False)


def _tell_of_no_connections(model: nn.Module, hc_lr: float | None) -> None:
    """Say so when a model has no hyper-connections, as the base to compare with; an error with a rate for them."""
    # some have no parameters, as Keel's with a norm that has none
    if any(is_of_connection(path) for path, _ in model.named_modules()):
        return
    if hc_lr is not None:
        raise _no_connections(model)
    logger.warning(f"{_no_connections(model)} It is trained as the base that it is.")


def _no_connections(model: nn.Module) -> HyperConnError:
    return HyperConnError(f"{type(model).__name__} has no hyper-connections. Convert it first (`convert_model`).")


if TYPE_CHECKING:  # what the mixin below stands before
    Base = Trainer
else:
    Base = object


class HCTrainerMixin(Base):
    """Before a Trainer class: weight decay and learning rate of hyper-connections. See `hc_param_groups`.

    Checkpoints are resumed from, and the best one loaded, with all weights: also those that have other names on disk.

    hc_lr: learning rate of the connections, to be scheduled like that of the rest, which is the default.

    Raises `HyperConnError` when it is given a rate and a model without hyper-connections, a rate and an optimizer that
    has been made already, or a model whose connections DeepSpeed has cast.
    """

    def __init__(self, *args, hc_lr: float | None = None, **kwargs):
        self.hc_lr = hc_lr
        super().__init__(*args, **kwargs)
        model: Any = self.model
        _tell_of_no_connections(model, hc_lr)
        if self.is_deepspeed_enabled:
            refuse_cast_by_zero_init(model)
        self._has_its_optimizer = self.optimizer is not None
        if hc_lr is not None and self.optimizer is not None:
            raise HyperConnError(
                f"hc_lr={hc_lr} has no effect on an optimizer that the Trainer is given. Make that one of "
                f"hc_param_groups(model, ..., hc_lr={hc_lr}), or leave it to the Trainer."
            )

    def create_accelerator_and_postprocess(self) -> None:
        """As Transformers' own, but 16 bits are autocast's under FSDP and DeepSpeed, too.

        Their own mixed precision casts every parameter, FSDP's while it gathers them, which would round the
        coefficients of the connections.
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
        """As Transformers' own, but under FSDP matrix products are in 16 bits by autocast, as they are without it."""
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
        """Load a checkpoint as `from_pretrained` would; as Transformers' Trainer does where that can't be.

        Raises `HyperConnError` when the checkpoint lacks weights.
        """
        model: Any = getattr(self.model, "_orig_mod", self.model)  # what was compiled
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not is_saved_whole(model, folder):
            usual()
        else:
            load_weights(model, folder)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As the Trainer's own, but in connections nothing decays that would lose what it starts as."""
        return decayed_names(model, super().get_decay_parameter_names(model))

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        whole: Any = model or self.model
        if is_new and self.hc_lr is not None:
            named = whole.named_parameters()
            _give_rate(optimizer, {id(parameter) for name, parameter in named if is_of_connection(name)}, self.hc_lr)
        if not self._has_its_optimizer:
            self._refuse_lost_settings(whole, optimizer)
        return optimizer

    def _refuse_lost_settings(self, model: nn.Module, optimizer: Any) -> None:
        """Make sure that an optimizer has what the connections are to have.

        Raises `HyperConnError` where their rate is lost, or a weight decay meets what should not decay.
        """
        if self.is_deepspeed_enabled:
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            made = [name for name in ("optimizer", "scheduler") if name in config]
            decays = "optimizer" in made and config["optimizer"].get("params", {}).get("weight_decay", 0) != 0
            if made and (self.hc_lr is not None or decays):
                raise HyperConnError(
                    f"DeepSpeed's config has a section {' and a section '.join(made)}, which "
                    f"{'gives' if len(made) == 1 else 'give'} all parameters one learning rate and one weight decay. "
                    f"Remove it, so that HCTrainer gives the connections theirs; or, without hc_lr and with a "
                    f"weight_decay of 0, keep it."
                )
        made_by = getattr(self.args.optim, "value", self.args.optim)
        groups = {id(p): group for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        decayed = set(self.get_decay_parameter_names(model))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not is_of_connection(name):
                continue
            group = groups.get(id(parameter), {})
            if self.hc_lr is not None and group.get("lr") != self.hc_lr:
                raise HyperConnError(
                    f"hc_lr={self.hc_lr} has no effect on {name} with optim={made_by!r}, which "
                    f"{'has no group with it' if not group else 'has a rate of its own for it'}. Leave hc_lr out, or "
                    f"choose another optim, such as 'adamw_torch'."
                )
            if name not in decayed and group.get("weight_decay", 0) != 0:
                raise HyperConnError(
                    f"optim={made_by!r} applies a weight decay to {name}, which pulls it to zero, where "
                    f"there is no residual connection. Set weight_decay=0, or choose another optim."
                )


class HCTrainer(HCTrainerMixin, Trainer):
    """Transformers' Trainer, with weight decay and learning rate of hyper-connections as they should be.

    For another Trainer, such as trl's: `class HCSFTTrainer(HCTrainerMixin, SFTTrainer): pass`.
    """


def use_autocast(plugin: Any) -> None:
    """Put DeepSpeed's training in bfloat16 by autocast in the place of that which casts every parameter.

    plugin: accelerate's, with DeepSpeed's config.

    Raises `HyperConnError` for float16, in which DeepSpeed's training by autocast did not learn.
    """
    config = plugin.deepspeed_config
    if config.get("fp16", {}).get("enabled") is True:
        raise HyperConnError(
            "DeepSpeed's fp16 casts every parameter, and connections can't learn in 16 bits. Use bf16=True, or train "
            "in float32."
        )
    if config.get("bf16", {}).get("enabled") is True:
        config["bf16"]["enabled"] = False
        config["torch_autocast"] = {"dtype": "bfloat16", **config.get("torch_autocast", {}), "enabled": True}
        plugin.hf_ds_config._dtype = torch.float32  # of the inputs


def refuse_cast_by_zero_init(model: nn.Module) -> None:
    """Raise `HyperConnError` when DeepSpeed's ZeRO-3 has loaded the connections of a model in 16 bits."""
    for name, parameter in model.named_parameters():
        if is_of_connection(name) and hasattr(parameter, "ds_shape") and parameter.dtype.itemsize < 4:
            raise HyperConnError(
                f"DeepSpeed has loaded {name} in {str(parameter.dtype).removeprefix('torch.')}, where it can't learn: "
                f"1.003 is 1. Leave bf16 and fp16 out of TrainingArguments, and write in DeepSpeed's config, instead "
                f'of its sections bf16 and fp16: "torch_autocast": {{"enabled": true, "dtype": "bfloat16"}}'
            )


def _give_rate(optimizer: torch.optim.Optimizer, parameters: set[int], lr: float) -> None:
    """Move the parameters with these ids into groups of their own, with a learning rate of their own."""
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in parameters]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in parameters]
            optimizer.add_param_group({**group, "params": moved, "lr": lr})
