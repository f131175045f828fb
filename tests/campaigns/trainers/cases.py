"""What each tool does with a base and with its conversion, and what is expected of it."""

import json
from dataclasses import dataclass, field

from tests.pages import REPOSITORY, read, snippets


@dataclass(frozen=True)
class Case:
    """A job of a tool, run on the base and on its conversion.

    tool: a key of `tools.TOOLS`. does: what it does, for the table. options: of the tool's script.
    needs: what the conversion needs that its base doesn't, for the table; without it, `without` are the options, and
    `message` is part of what goes wrong. because: why the conversion is refused; `message` is part of the error.
    ranks: how many processes form a group; 0 for none. has_package: whether they can import this package.
    """

    tool: str
    does: str
    options: dict = field(hash=False)
    needs: str = ""
    without: dict = field(default_factory=dict, hash=False)
    because: str = ""
    message: str = ""
    ranks: int = 0
    has_package: bool = False

    @property
    def verdict(self) -> str:
        """Return the table's cell."""
        if self.because:
            return f"refused, because {self.because}"
        return f"needs {self.needs}" if self.needs else "as the base"


def snippet(word: str) -> str:
    """Return the one block of code on the page that has this word."""
    (code,) = [code for language, code in snippets("docs/trainers.md") if language != "text" and word in code]
    return code


def config(name: str) -> dict:
    """Return a config of the examples."""
    return json.loads(read(f"examples/configs/{name}"))


BF16 = {"bf16": {"enabled": True}}
PACKED = {"sample_packing": True, "sequence_len": 64, "sample_packing_sequentially": True}  # in rows of some samples


def deepspeed() -> list[Case]:
    """Return ZeRO by Transformers' Trainer, by accelerate, and by this package's Trainer."""
    cases = []
    for ranks in (1, 2):
        for stage in (1, 2, 3):
            for by in ("Trainer", "accelerate"):
                name = f"ZeRO-{stage} by {by}, {ranks} rank{'s' * (ranks > 1)}"
                cases.append(Case("DeepSpeed", f"{name}, float32", {"stage": stage, "by": by}, ranks=ranks))
    for by in ("Trainer", "accelerate"):
        options = {"stage": 2, "by": by}
        autocast = {**options, "sections": config("zero2.json")}
        rounding = {**options, "sections": BF16, "arguments": {"bf16": True}}
        needs = "`torch_autocast` instead of `bf16`, which rounds connections"
        name = f"ZeRO-2 by {by}, 1 rank, bfloat16"
        cases.append(Case("DeepSpeed", name, autocast, needs, rounding, message="in bfloat16", ranks=1))
    autocast = {"stage": 3, "by": "Trainer", "sections": config("zero3.json")}
    cases.append(Case("DeepSpeed", "ZeRO-3 by Trainer, 1 rank, `torch_autocast`", autocast, ranks=1))
    for stage in (1, 2):
        options = {"stage": stage, "by": "HCTrainer", "sections": BF16, "arguments": {"bf16": True}}
        cases.append(
            Case("DeepSpeed", f"ZeRO-{stage} by `HCTrainer`, 1 rank, `bf16=True`", options, ranks=1, has_package=True)
        )
    cases.append(
        Case(
            "DeepSpeed",
            "ZeRO-2 by `HCTrainer`, 1 rank, `fp16=True`",
            {"stage": 2, "by": "HCTrainer", "sections": {"fp16": {"enabled": True}}, "arguments": {"fp16": True}},
            because="DeepSpeed casts every parameter, and training by autocast in float16 did not learn",
            message="DeepSpeed's fp16 casts every parameter",
            ranks=1,
            has_package=True,
        )
    )
    return cases


TRUSTED = {"trust_remote_code": True}
CONNECTIONS = {"modules_to_save": ["attn_hc", "mlp_hc", "hc_head"]}
SAVED_WHOLE = '`modules_to_save=["attn_hc", "mlp_hc", "hc_head"]`'
FROZEN = "connections are not saved"


def trl() -> list[Case]:
    """Return TRL's trainers, without and with LoRA."""
    sft = {
        "SFT": {},
        "SFT, `packing=True`": {"packing": True},
        'SFT, `packing=True`, `packing_strategy="wrapped"`': {"packing": True, "packing_strategy": "wrapped"},
        "SFT, `padding_free=True`": {"padding_free": True, "max_length": None},
    }
    cases = [Case("TRL", name, {"trainer": "SFT", "arguments": arguments}) for name, arguments in sft.items()]
    assistant = {"trainer": "SFT", "data": "assistant", "arguments": {"assistant_only_loss": True}}
    cases.append(Case("TRL", "SFT, `assistant_only_loss=True`", assistant))
    cases.append(Case("TRL", "Reward", {"trainer": "Reward"}))
    for name in ("DPO", "KTO", "GRPO"):
        options = {"trainer": name}
        needs = "`trust_remote_code=True` in its config, for the reference"
        message = "trust_remote_code"
        cases.append(Case("TRL", name, {**options, "arguments": TRUSTED}, needs, options, message=message))
    for name in ("SFT", "Reward", "DPO", "KTO", "GRPO"):
        options, task = {"trainer": name, "arguments": TRUSTED}, {"task_type": "SEQ_CLS"} if name == "Reward" else {}
        with_lora, without = {**options, "lora": {**task, **CONNECTIONS}}, {**options, "lora": task}
        cases.append(Case("TRL", f"{name}, LoRA", with_lora, SAVED_WHOLE, without, message=FROZEN))
    return cases


def others() -> list[Case]:
    """Return Lightning, embedding models, evaluation and merges."""
    module = {"code": snippet("LightningModule")}
    cases = [
        Case("Lightning", f'`precision="{name}"`', {**module, "precision": name})
        for name in ("32-true", "bf16-mixed", "bf16-true")
    ]
    for name, word in (("sentence-transformers", "SentenceTransformerTrainer"), ("SetFit", "SetFitModel")):
        cases.append(Case("sentence-transformers, SetFit", name, {"code": snippet(word)}))
    cases.append(Case("lighteval", "log-probabilities of answers", {"command": snippet("lighteval accelerate")}))
    merge = {"command": snippet("mergekit-yaml"), "repository": str(REPOSITORY)}
    for method in ("linear", "slerp", "ties"):
        options, rounded = ({**merge, "method": method, "dtype": dtype} for dtype in ("float32", "bfloat16"))
        needs = "`dtype: float32` in the merge's YAML"
        cases.append(Case("mergekit", method, options, needs, rounded, message="in bfloat16"))
    return cases


ALL_LINEAR = {"optim_target_modules": "all-linear"}
OPTIMIZERS = {
    "galore_adamw": ALL_LINEAR,
    "galore_adamw_layerwise": ALL_LINEAR,
    "apollo_adamw": ALL_LINEAR,
    "schedule_free_adamw": {},
}


def optimizers() -> list[Case]:
    """Return optimizers of Transformers' Trainer, with and without a rate for connections, and Muon."""
    cases = []
    for name, arguments in OPTIMIZERS.items():
        options = {"arguments": {"optim": name, **arguments}}
        cases.append(Case("Optimizers", f"`{name}` by Trainer", options))
        refused = {"because": "the Trainer has no parameter groups there", "message": "has no group with it"}
        more = refused if name.endswith("layerwise") else {}
        by_ours = {**options, "by": "HCTrainer"}
        cases.append(Case("Optimizers", f"`{name}` by `HCTrainer` with `hc_lr`", by_ours, has_package=True, **more))
    cases.append(Case("Optimizers", "torch's Muon for the matrices of the base, AdamW for the rest", {"by": "Muon"}))
    return cases


def yaml_tools() -> list[Case]:
    """Return tools that are commands with a YAML."""
    cases = []
    for stage in ("pt", "sft"):
        full = {"settings": {"stage": stage, "finetuning_type": "full"}}
        lora = {"stage": stage, "finetuning_type": "lora", "lora_target": "q_proj,v_proj"}
        whole = {"settings": {**lora, "additional_target": "attn_hc,mlp_hc,hc_head"}}
        needs = "`additional_target: attn_hc,mlp_hc,hc_head`"
        cases += [
            Case("LLaMA-Factory", f"`stage: {stage}`", full),
            Case("LLaMA-Factory", f"`stage: {stage}`, LoRA", whole, needs, {"settings": lora}, message=FROZEN),
        ]
    options = {"yaml": str(REPOSITORY / "examples/configs/axolotl.yaml"), "settings": {}}
    needs = "`lora_modules_to_save: [attn_hc, mlp_hc, hc_head]`"
    frozen = {**options, "settings": {"lora_modules_to_save": None}}
    whole = {"adapter": None, **frozen["settings"]}
    return [
        *cases,
        Case("axolotl", "all weights", {**options, "settings": whole}),
        Case("axolotl", "`sample_packing: true`", {**options, "settings": {**whole, **PACKED}}),
        Case("axolotl", "LoRA, examples/configs/axolotl.yaml", options, needs, frozen, message=FROZEN),
    ]


CASES = (*deepspeed(), *trl(), *others(), *optimizers(), *yaml_tools())
