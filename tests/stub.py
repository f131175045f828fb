"""Write hf_hyperconn/__init__.pyi: for editors and type checkers, the classes that are made when asked for.

    python -m tests.stub

`make types` and `make dist` do so; git leaves the file out.
"""

from collections.abc import Iterator
from contextlib import suppress

from hf_hyperconn import _EXPORTS
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import Family, family_of_class, find_family

from .pages import REPOSITORY
from .tested import TESTED


def stub() -> str:
    """Write what the package exports, and the classes of every tested family that the installed Transformers has."""
    lines = [
        "# Written by `python -m tests.stub`: what the package exports, and the classes of the tested families.",
        *_imports(),
        "",
        "__version__: str",
    ]
    for family in _families():
        lines += ["", *_classes(family)]
    return "\n".join(lines) + "\n"


def _families() -> Iterator[Family]:
    for model_type in TESTED:
        with suppress(UnsupportedCheckpointError):
            yield find_family(model_type)


def _imports() -> list[str]:
    exported = [f"from .{module} import {name} as {name}" for name, module in sorted(_EXPORTS.items())]
    named = [
        f"from transformers.models.{module} import {', '.join(names)}"
        for family in _families()
        for module, names in (
            (family.source.configuration, [family.source.config]),
            (family.source.modeling, [name for name in dict.fromkeys(family.heads.values()) if _is_of(name, family)]),
        )
        if names
    ]
    mixins = [
        "from .models.configuration_composite import HyperConnectionCompositeConfig",
        "from .models.modeling_hyper_connections import HyperConnectionPreTrainedModel",
    ]
    return [*named, *exported, *mixins]


def _classes(family: Family) -> list[str]:
    config = family.source.config
    mixin = "HyperConnectionConfig" if family.part is None else "HyperConnectionCompositeConfig"
    return [
        f"class HC{config}({mixin}, {config}): ...",
        *(
            f"class HC{name}(HyperConnectionPreTrainedModel, {name}): ..."
            for name in dict.fromkeys(family.heads.values())
            if _is_of(name, family)
        ),
    ]


def _is_of(name: str, family: Family) -> bool:
    """Return whether `hf_hyperconn.HC<name>` is this family's class; some families share Llama's."""
    return family_of_class(f"HC{name}") == family


if __name__ == "__main__":
    (REPOSITORY / "hf_hyperconn" / "__init__.pyi").write_text(stub(), encoding="utf-8")
