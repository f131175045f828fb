"""The model families with hyper-connections, as plain data: reading it imports neither torch nor transformers."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

SHARED_CODE = (
    "configuration_hyper_connections.py",
    "hyper_connections.py",
    "modeling_hyper_connections.py",
)


@dataclass(frozen=True)
class Family:
    """One Pre-Norm family and the classes that give it hyper-connections.

    name: as Transformers spells it in class names; the hyper-connection classes are `HC<name>...`.
    model_type: of the Pre-Norm base.
    heads: suffix of each model class, by its Auto class.
    norm_parameters: names of the parameters of the family's norm.
    """

    name: str
    model_type: str
    heads: dict[str, str]
    norm_parameters: tuple[str, ...]

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
        models = {auto: f"modeling_{self.hc_model_type}.HC{self.name}{suffix}" for auto, suffix in self.heads.items()}
        return {"AutoConfig": f"configuration_{self.hc_model_type}.HC{self.name}Config", **models}

    @property
    def architectures(self) -> dict[str, str]:
        """The hyper-connection class name for the name of each base class."""
        return {f"{self.name}{suffix}": f"HC{self.name}{suffix}" for suffix in self.heads.values()}

    def configuration_module(self) -> ModuleType:
        """Import the file with the family's config."""
        return import_module(f"hf_hyperconn.models.configuration_{self.hc_model_type}")

    def modeling_module(self) -> ModuleType:
        """Import the file with the family's models."""
        return import_module(f"hf_hyperconn.models.modeling_{self.hc_model_type}")


LLAMA_HEADS = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}

FAMILIES = {
    family.model_type: family
    for family in [
        Family("Llama", "llama", heads=LLAMA_HEADS, norm_parameters=("weight",)),
    ]
}
