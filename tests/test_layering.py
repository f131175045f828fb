"""Who imports whom, read from the source."""

import ast
import re
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hf_hyperconn
from hf_hyperconn.families.modules import code_text
from hf_hyperconn.models.shipped_code import code_of, modules_in

from .families import FAMILIES
from .pages import read

PACKAGE = Path(hf_hyperconn.__file__).parent
MODELS = sorted(path for path in (PACKAGE / "models").glob("*.py") if path.name != "__init__.py")
KINDS = sorted((PACKAGE / "kinds").glob("*.py"))
CONVERSION = PACKAGE.parent / "conversion"
SHIPPED_IMPORTS = {
    *("torch", "transformers", "huggingface_hub"),
    *("ast", "collections", "contextlib", "contextvars", "copy", "dataclasses", "functools", "hashlib", "importlib"),
    *("inspect", "math", "operator", "os", "pathlib", "re", "sys", "textwrap", "threading", "typing", "weakref"),
}
GUARDED_IMPORTS = {"triton"}  # optional, inside `try`


def imports(path: Path) -> set[str]:
    """Absolute names of all modules a file imports, those of ours from `hf_hyperconn`."""
    source = code_text(path.name) if path.parent.name == "models" else path.read_text(encoding="utf-8")
    root = PACKAGE if PACKAGE in path.parents else PACKAGE.parent
    package = ["hf_hyperconn", *path.parent.relative_to(root).parts]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            names.add(".".join([*parents, *filter(None, [node.module])]))
    return names


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_what_ships_to_the_hub_is_flat(path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in block.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            allowed = SHIPPED_IMPORTS | GUARDED_IMPORTS if id(node) in guarded else SHIPPED_IMPORTS
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in SHIPPED_IMPORTS
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1
            assert node.module is not None
            assert (path.parent / f"{node.module}.py").is_file()
    statements = {f".{node.module}" for node in ast.walk(tree) if getattr(node, "level", 0) == 1}
    assert set(re.findall(r"^\s*from\s+(\.\S+)\s+import", source, flags=re.MULTILINE)) == statements
    assert "isinstance(config" not in source


def test_imports_go_one_way():
    for path in PACKAGE.rglob("*.py"):
        ours = {name for name in imports(path) if name.startswith("hf_hyperconn")}
        assert not any(name.startswith("hf_hyperconn.conversion") for name in ours), path
        if path.parent.name == "models":
            assert all(name.startswith("hf_hyperconn.models") for name in ours), path


def test_diffusers_is_imported_only_when_it_is_used():
    """By one file, which others import in functions alone."""
    for path in (*PACKAGE.rglob("*.py"), *CONVERSION.rglob("*.py")):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        modules = {f"{'.' * node.level}{node.module}" for node in top if isinstance(node, ast.ImportFrom)}
        assert not any(name.endswith(".diffusion") for name in modules), path
        uses = {name for name in imports(path) if name.partition(".")[0] == "diffusers"}
        assert not uses or path.name == "diffusion.py", path


def test_the_command_line_starts_light():
    """Nothing heavy at the top of what `--help`, `--dry-run` and a refusal need."""
    heavy = ("checkpoint/loading", "verify/numeric", "demo", "plot/models")
    light = set(CONVERSION.rglob("*.py")) - {CONVERSION / f"{name}.py" for name in heavy}
    for path in (*light, *KINDS, PACKAGE / "analysis" / "costs.py"):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        modules = {node.module for node in top if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        packages = {(module or "").partition(".")[0] for module in modules}
        assert not packages & {"torch", "transformers", "safetensors", "huggingface_hub"}, path


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_the_table_of_families_agrees_with_the_classes(family):
    modeling, configuration = family.modeling_module(), family.configuration_module()
    base_class = getattr(modeling, f"HC{family.source.pretrained}")
    assert base_class.auto_map == family.auto_map
    assert getattr(configuration, f"HC{family.name}Config").model_type == family.hc_model_type
    reached, pending = set(), [*family.files]
    while pending:
        name = pending.pop()
        reached.add(name)
        modules = imports(PACKAGE / "models" / name)
        siblings = {module for module in modules if module.startswith("hf_hyperconn.models.")}
        pending += {f"{module.rpartition('.')[2]}.py" for module in siblings} - reached
    everything = code_of(lambda name: code_text(f"{name}.py"), modules_in(family.auto_map))
    assert reached == {f"{name}.py" for name in everything}


ROOMS = {  # of the package: the rooms that each may import
    "models": (),
    "families": ("models",),
    "kinds": ("families", "models"),
    "analysis": ("families", "kinds", "models"),
    "in_memory": ("families", "models"),
    "training": ("analysis", "families", "in_memory", "kinds", "models"),
}
# of the converter, from below
FLOORS = ("terminal", "interrupts", "files", "checkpoint", "verify", "inspection", "planning", "card", "push", "plot")


def test_rooms_import_what_the_page_of_architecture_says():
    beside = {path.stem for path in PACKAGE.glob("*.py")}
    for room, others in ROOMS.items():
        for path in (PACKAGE / room).rglob("*.py"):
            modules = {name.split(".")[1] for name in imports(path) if name.startswith("hf_hyperconn.")}
            assert modules <= {room, *others, *beside}, path
            draws = any(name.startswith("matplotlib") for name in imports(path))
            assert draws == (path.name == "plots.py"), path


def test_imports_of_the_converter_go_down():
    for floor, room in enumerate(FLOORS):
        for path in [*CONVERSION.glob(f"{room}.py"), *(CONVERSION / room).rglob("*.py")]:
            names = {name for name in imports(path) if name.startswith("hf_hyperconn.conversion.")}
            assert {name.split(".")[2] for name in names} <= {*FLOORS[: floor + 1]}, path


def test_the_page_of_architecture_names_every_file():
    section = read("docs/architecture.md").partition("\n## Files\n")[2].partition("\n## ")[0]
    patterns = [name.replace("...", "*").rpartition("/")[2] for name in re.findall(r"`([\w./*]+\.py)`", section)]
    for path in (*PACKAGE.glob("*.py"), *MODELS):
        is_named = any(fnmatch(path.name, pattern) for pattern in patterns)
        assert is_named or path.stem.startswith("_"), f"{path.name} is not on the page"
    files = {path.name for folder in (PACKAGE, CONVERSION, PACKAGE.parent / "tests") for path in folder.rglob("*.py")}
    for pattern in patterns:
        assert any(fnmatch(name, pattern) for name in files), f"there is no {pattern}"


@pytest.mark.parametrize("root", [PACKAGE, CONVERSION, PACKAGE.parent / "benchmarks"], ids=lambda root: root.name)
def test_no_two_files_import_each_other(root):
    """Also inside functions and for type checkers."""
    graph = {}
    for path in root.rglob("*.py"):
        package = path.parent.relative_to(root.parent).parts
        module = ".".join([*package, *([path.stem] if path.stem != "__init__" else [])])
        imported = graph.setdefault(module, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                parents = package[: len(package) - node.level + 1] if node.level else ()
                origin = ".".join([*parents, *filter(None, [node.module])])
                imported |= {f"{origin}.{alias.name}" for alias in node.names} | {origin}
        imported.discard(module)
    # a package is imported with each of its modules: what its `__init__` names is not asked of them
    edges = {module: {other for other in imported if other in graph} for module, imported in graph.items()}
    packages = {module for module in graph if any(other.startswith(f"{module}.") for other in graph)}
    try:
        TopologicalSorter({module: others - packages for module, others in edges.items()}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1]))
