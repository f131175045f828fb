"""The model families with hyper-connections, as plain data: reading it imports neither torch nor transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from ..errors import UnsupportedCheckpointError
from ..models.shipped_code import code_of, modules_in
from ..models.sub_layers import SubLayer
from .family_files import auto_map, stem
from .family_source import PLACE_MARK, FamilySource, InnerModel
from .modules import code_text
from .reading.classes import MAPPINGS, FamilyName
from .reading.read_family import fields_of_stacks, read_family
from .reading.source_files import table
from .reading.stacks import TEXT

# the families whose classes `dir(hf_hyperconn)` names
LISTED_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "smollm3", "seed_oss", "phi3", "starcoder2", "gemma", "gemma2"),
    *("olmo", "olmo2", "olmo3", "granite", "olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3"),
)
# of several Auto classes that find a class with other models in it
PREFERRED_HEADS = ("ForImageTextToText", "ForSpeechSeq2Seq", "ForSeq2SeqLM")
# the family's first of these is the head of a checkpoint whose config names no class
USUAL_HEADS = ("ForCausalLM", "ForImageTextToText", "ForMultimodalLM", "ForSpeechSeq2Seq", "ForSeq2SeqLM", "Model")

# fields that the config of a part has, too, and that are read from the config of the whole
WHOLE_FIELDS = (
    *("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "_name_or_path"),
    *("tie_word_embeddings", "hc_format", "hc_version", "hc_base_model", "hc_base_commit"),
)


@dataclass(frozen=True)
class Family:
    """A family of Transformers and the classes that give it hyper-connections.

    model_type: the base's model type; a `FamilyName` where another inner model than the usual one has the layers.
    source: the family as Transformers' files describe it.
    """

    model_type: str
    source: FamilySource

    @property
    def name(self) -> str:
        """Return the family's name, as Transformers spells it in the name of its config."""
        return self.source.config.removesuffix("Config")

    @property
    def base_model_type(self) -> str:
        """Return the model type in a base's config."""
        return FamilyName.of(self.model_type).own

    @property
    def hc_model_type(self) -> str:
        """Return the model type in a conversion's config."""
        return f"hc_{self.model_type}"

    @property
    def norm(self) -> dict[str, float]:
        """Return initial value of each parameter of the norm that predicts dynamic coefficients."""
        return self.source.norm

    @property
    def sub_layers(self) -> tuple[SubLayer, ...]:
        """Return the sub-layers of a decoder layer, in their order."""
        return self.source.sub_layers

    @property
    def heads(self) -> dict[str, str]:
        """Return the name of the base class behind each Auto class, by suffix; `Model` is the base model's."""
        return self.source.heads

    @property
    def stacks(self) -> tuple["Family", ...]:
        """Return the families of encoder and decoder; of another model, the family itself."""
        return tuple(Family(inner.source.model_type, inner.source) for inner in self.source.inner) or (self,)

    @property
    def place(self) -> str:
        """Return the attribute of this model in another, as "decoder"; "" for a whole model."""
        return self.model_type.partition(PLACE_MARK)[2]

    @property
    def part(self) -> "Family | None":
        """Return the family of the model in it that has the layers, such as its language model; None without any."""
        part = self.source.part
        return None if part is None else Family(part.source.model_type, part.source)

    @property
    def part_field(self) -> str | None:
        """Return the field of a config with the config of that model; None without any."""
        return None if self.source.part is None else self.source.part.field

    def part_config(self, config: Mapping) -> Mapping | None:
        """Return the config of the part in a config; None without one."""
        of_part = config.get(self.part_field) if self.part_field else None
        return of_part if isinstance(of_part, Mapping) else None

    def observed(self, model: Any) -> Any:
        """Return the module to run in order to observe the layers: the tower, or the whole model."""
        tower = self.source.tower
        return model if tower is None else getattr(model.base_model, tower.attribute)

    def head_of(self, architecture: str) -> str:
        """Return the suffix of the Auto class for a class of the base or of ours; "Model" if unknown."""
        suffixes = [suffix for suffix, base in self.heads.items() if base == architecture.removeprefix("HC")]
        if self.part is not None or self.source.inner:
            suffixes.sort(key=lambda suffix: (suffix not in PREFERRED_HEADS, suffix == "Model"))
        return next(iter(suffixes), "Model")

    def types_of_base(self, config: Mapping) -> dict:
        """Return the model types of the base's config, for a config of a base or of a conversion."""
        types: dict = {"model_type": self.base_model_type}
        if self.part is not None and (of_part := self.part_config(config)) is not None:
            types[self.part_field] = {**of_part, "model_type": self.part.model_type}
        return types

    @property
    def auto_map(self) -> dict[str, str]:
        """Return `file.Class` by Auto class, as in a config.json."""
        return auto_map(self.source)

    @property
    def architectures(self) -> dict[str, str]:
        """Return the hyper-connection class name for the name of each base class."""
        return {name: f"HC{name}" for name in self.heads.values()}

    @property
    def usual_architecture(self) -> str:
        """Return the base class of a checkpoint whose config names none: the language model, if there is one."""
        return next(self.heads[suffix] for suffix in USUAL_HEADS if suffix in self.heads)

    @property
    def files(self) -> tuple[str, str]:
        """Return the names of its two files: config and models."""
        return f"configuration_{stem(self.model_type)}.py", f"modeling_{stem(self.model_type)}.py"

    def code(self, config: Mapping) -> dict[str, str]:
        """Return the text of each file of code in a folder with this config.json, by its name."""
        chosen = config if (of_part := self.part_config(config)) is None else of_part
        modules = code_of(lambda name: code_text(f"{name}.py"), modules_in(self.auto_map), chosen)
        return {f"{name}.py": text for name, text in modules.items()}

    def configuration_module(self) -> ModuleType:
        """Import the file with the family's config."""
        return import_module(f"hf_hyperconn.models.configuration_{stem(self.model_type)}")

    def modeling_module(self) -> ModuleType:
        """Import the file with the family's models."""
        return import_module(f"hf_hyperconn.models.modeling_{stem(self.model_type)}")

    def base_class(self, name: str) -> type:
        """Import Transformers' own class of that name."""
        return getattr(import_module(f"transformers.models.{self.source.modeling}"), name)


@cache
def find_family(model_type: str) -> Family:
    """Return the family of a model type of the installed Transformers.

    Raises `UnsupportedCheckpointError` with the reason when it can't have hyper-connections.
    """
    return Family(model_type, read_family(model_type))


def family_of_config(config: Mapping) -> Family | None:
    """Return the family of a config, as in a config.json; None where it can't have hyper-connections."""
    try:
        return find_family(name_of_family(config))
    except UnsupportedCheckpointError:
        return None


def family_of_class(name: str) -> Family | None:
    """Return the family of a hyper-connection class; None for an unknown name."""
    base = name.removeprefix("HC")
    if base == name:
        return None
    configs = table("CONFIG_MAPPING_NAMES")
    model_types = dict.fromkeys(
        model_type
        for variable in ("CONFIG_MAPPING_NAMES", *MAPPINGS.values())
        for model_type, class_name in table(variable).items()
        if class_name == base
    )
    prefixes = {model_type: configs.get(model_type, "?").removesuffix("Config") for model_type in model_types}
    for model_type in sorted(model_types, key=lambda model_type: not base.startswith(prefixes[model_type])):
        try:
            family = find_family(model_type)
        except UnsupportedCheckpointError:
            continue
        if base in (f"{family.name}Config", *family.heads.values()):
            return family
    return None


def hc_class_names(model_type: str) -> tuple[str, ...]:
    """Return the names of a family's hyper-connection classes; none where the installed Transformers lacks it."""
    try:
        family = find_family(model_type)
    except UnsupportedCheckpointError:
        return ()
    return tuple(dict.fromkeys((f"HC{family.name}Config", *family.architectures.values())))


def refuse_other_stacks(name: str, model_type: str | None, stack: str | None) -> None:
    """Refuse a stack that the model `name` can't have; None is the usual stack.

    Raises `UnsupportedCheckpointError`.
    """
    if stack is not None and stack not in (accepted := fields_of_stacks(str(model_type))):
        choices = " or ".join(accepted) or "None, for its one list of layers,"
        raise UnsupportedCheckpointError(f"stack must be {choices} in {name} (got {stack!r:.40}).")


def name_of_family(config: Mapping, stack: str | None = None) -> str:
    """Return the name that `find_family` accepts, for a config.json of a base or of a conversion.

    It is the model type, followed by the part's model type where the config chooses an unusual one.

    stack: the attribute of an unusual part; None for the usual one.
    """
    model_type = str(config.get("model_type")).removeprefix("hc_")
    if model_type not in table("CONFIG_MAPPING_NAMES"):
        return model_type
    field: str | None = TEXT
    if stack is not None:
        fields = fields_of_stacks(model_type)
        field = fields.get(stack)
        stack = None if field == TEXT or fields == {stack: ""} else stack
    usual, of_part = FamilyName(model_type, stack=stack), config.get(field) if field else None
    chosen = of_part.get("model_type") if isinstance(of_part, Mapping) else None
    if not isinstance(chosen, str):
        return str(usual)
    chosen = chosen.removeprefix("hc_")
    for name in (usual, FamilyName(model_type, chosen, stack)):
        try:
            part = read_family(str(name)).part
        except UnsupportedCheckpointError:
            continue
        if part is not None and part.source.model_type == chosen:
            return str(name)
    return str(usual)


def usual_names(config: Mapping) -> dict:
    """Return a config, as in a config.json, with the usual names of its sizes besides its own.

    GPT-2's `n_layer` is usually `num_hidden_layers`. Where a part has the layers, such as a language model, sizes and
    connections are the part's.
    """
    if (family := family_of_config(config)) is None:
        return dict(config)
    if (of_part := family.part_config(config)) is None:
        return {**_renamed(config, family.source), **config}
    own = {name: value for name, value in of_part.items() if name not in WHOLE_FIELDS}
    return {**config, **family.source.sizes, **_renamed(of_part, family.source), **own}


def _renamed(config: Mapping, source: FamilySource) -> dict:
    """Return the sizes of a config by their usual names."""
    kinds = config.get("layers_block_type")
    counted = {"num_hidden_layers": len(kinds)} if isinstance(kinds, list) else {}
    return counted | {usual: config[own] for usual, own in source.renamed.items() if own in config}


def tower_of(config: Mapping) -> InnerModel | None:
    """Return the tower of a config, as in a config.json; None for another model."""
    family = family_of_config(config)
    return None if family is None else family.source.tower


def configs_of_stacks(config: Mapping) -> list[dict]:
    """Return a config with usual names for each stack, with the stack's own sizes.

    An encoder-decoder has two stacks, another model has one. A decoder without a depth in the config, as T5's may be,
    is as deep as the encoder.
    """
    config = usual_names(config)
    family, usual = family_of_config(config), config.get("num_hidden_layers")
    return [
        {
            **config,
            "model_type": f"hc_{inner.source.model_type}",
            "num_hidden_layers": usual if (own := config.get(inner.source.count)) is None else own,
        }
        for inner in (family.source.inner if family else ())
    ] or [config]
