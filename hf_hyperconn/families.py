"""The model families with hyper-connections, as plain data: reading it imports neither torch nor transformers."""

from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType

SHARED_CODE = (
    "altup_connection.py",
    "attention_residuals.py",
    "configuration_hyper_connections.py",
    "dual_residual.py",
    "dynamic_activations.py",
    "frac_connections.py",
    "history_start.py",
    "hyper_connections.py",
    "hyper_connections_autograd.py",
    "hyper_connections_kernels.py",
    "hyper_connections_layer.py",
    "hyper_connections_step.py",
    "hyper_connections_torch.py",
    "hyper_connections_triton.py",
    "keel_connection.py",
    "manifold_hyper_connections.py",
    "manifold_hyper_connections_kernels.py",
    "manifold_hyper_connections_triton.py",
    "modeling_hyper_connections.py",
    "norm_forms.py",
    "operators.py",
    "peft_defaults.py",
    "sinkhorn.py",
)


@dataclass(frozen=True)
class Family:
    """One family of Transformers and the classes that give it hyper-connections.

    name: as Transformers spells it in class names; the hyper-connection classes are `HC<name>...`.
    model_type: of the base.
    heads: suffixes of the classes with a head; each belongs to the Auto class of that suffix.
    norm: initial value of each parameter of the family's norm.
    """

    name: str
    model_type: str
    heads: tuple[str, ...]
    norm: dict[str, float] = field(default_factory=lambda: {"weight": 1.0})

    @property
    def hc_model_type(self) -> str:
        return f"hc_{self.model_type}"

    @property
    def code(self) -> tuple[str, ...]:
        """The files that a Hub repo of this family ships."""
        return (f"configuration_{self.hc_model_type}.py", f"modeling_{self.hc_model_type}.py", *SHARED_CODE)

    @property
    def auto_map(self) -> dict[str, str]:
        """`file.Class` by Auto class, as in a config.json."""
        file, name = f"modeling_{self.hc_model_type}", f"HC{self.name}"
        return {
            "AutoConfig": f"configuration_{self.hc_model_type}.{name}Config",
            "AutoModel": f"{file}.{name}Model",
            **{f"AutoModel{suffix}": f"{file}.{name}{suffix}" for suffix in self.heads},
        }

    @property
    def architectures(self) -> dict[str, str]:
        """The hyper-connection class name for the name of each base class."""
        return {f"{self.name}{suffix}": f"HC{self.name}{suffix}" for suffix in ("Model", *self.heads)}

    @property
    def exports(self) -> dict[str, str]:
        """The file of every public class."""
        classes = (reference.split(".") for reference in self.auto_map.values())
        return {name: file for file, name in classes}

    def configuration_module(self) -> ModuleType:
        """Import the file with the family's config."""
        return import_module(f"hf_hyperconn.models.configuration_{self.hc_model_type}")

    def modeling_module(self) -> ModuleType:
        """Import the file with the family's models."""
        return import_module(f"hf_hyperconn.models.modeling_{self.hc_model_type}")


CLASSIFIERS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
ALL_HEADS = (*CLASSIFIERS, "ForQuestionAnswering")

FAMILIES = {
    family.model_type: family
    for family in [
        Family("Llama", "llama", ALL_HEADS),
        Family("Mistral", "mistral", ALL_HEADS),
        Family("Qwen2", "qwen2", ALL_HEADS),
        Family("Qwen3", "qwen3", ALL_HEADS),
        Family("SmolLM3", "smollm3", ALL_HEADS),
        Family("SeedOss", "seed_oss", ALL_HEADS),
        Family("Phi3", "phi3", CLASSIFIERS),
        Family("Starcoder2", "starcoder2", CLASSIFIERS, norm={"weight": 1.0, "bias": 0.0}),
        Family("Gemma", "gemma", CLASSIFIERS, norm={"weight": 0.0}),
        Family("Gemma2", "gemma2", CLASSIFIERS, norm={"weight": 0.0}),
        Family("Olmo", "olmo", ("ForCausalLM", "ForSequenceClassification"), norm={}),
        Family("Olmo2", "olmo2", ("ForCausalLM", "ForSequenceClassification")),
        Family("Olmo3", "olmo3", ("ForCausalLM", "ForSequenceClassification")),
        Family("Granite", "granite", ("ForCausalLM",)),
        Family("Olmoe", "olmoe", ("ForCausalLM",)),
        Family("Mixtral", "mixtral", ALL_HEADS),
        Family("Qwen2Moe", "qwen2_moe", ALL_HEADS),
        Family("Qwen3Moe", "qwen3_moe", ALL_HEADS),
        Family("GptOss", "gpt_oss", CLASSIFIERS),
        Family("DeepseekV3", "deepseek_v3", CLASSIFIERS),
    ]
}
