"""Code that was cut from one release of Transformers, run on another whose source differs."""

import ast
import inspect
import json
import pickle
import shutil
import textwrap
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers

import hf_hyperconn
from hf_hyperconn import HCGPT2Config, HCGPT2LMHeadModel
from hf_hyperconn.conversion import cli
from hf_hyperconn.families.reading.read_family import read_family
from hf_hyperconn.families.reading.source_files import FunctionSource
from hf_hyperconn.models import layer_source
from hf_hyperconn.models.layer_source import (
    CACHE_NAMES,
    CutFrom,
    SourceDiffersError,
    digest_of_functions,
    has_other_cache_names,
)

from . import other_families
from .isolated import printed
from .marks import few
from .recipe import run_on_ranks

INSTALLED = transformers.__version__
OTHER = "5.0.0"  # a release that nobody has
NEW_NAME = "past_key_value"  # of the cache, which no release uses in a layer that is changed here

# Loads a module of Transformers from another file, then a base and its conversion, and says how these compare.
COMPARE = """
import json, sys
from importlib.util import module_from_spec, spec_from_file_location
import torch, transformers
transformers.logging.set_verbosity_error()
name, path, base, converted, compiled = sys.argv[1:]
spec = spec_from_file_location(name, path)
sys.modules[name] = module = module_from_spec(spec)
spec.loader.exec_module(module)
base = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
assert sys.modules[type(base).__module__].__file__ == path
found = []
try:
    model = transformers.AutoModelForCausalLM.from_pretrained(converted, trust_remote_code=True).eval()
except ImportError as error:
    found, model = [type(error).__name__, str(error)], None
ids = torch.arange(3, 24).view(1, -1)
if model is not None:
    if compiled == "compiled":
        model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        found.append(torch.equal(base(ids).logits, model(ids).logits))
    for use_cache in (True, False):
        settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache, "pad_token_id": 0}
        found.append(torch.equal(base.generate(ids, **settings), model.generate(ids, **settings)))
print(json.dumps(found))
"""


class RenamedCache(ast.NodeTransformer):
    """Renames the cache in some classes, and in the arguments that a model gives its layers."""

    def __init__(self, classes: tuple[str, ...]):
        self.classes, self.inside, self.called = classes, False, ""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.inside = node.name in self.classes
        self.generic_visit(node)
        self.inside = False
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if self.inside:
            node.decorator_list = [part for part in node.decorator_list if "deprecate" not in ast.unparse(part)]
        self.generic_visit(node)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        self.called = ast.unparse(node.target).rpartition(", ")[2].rstrip(")")
        self.generic_visit(node)
        self.called = ""
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = NEW_NAME if self.inside and node.id in CACHE_NAMES else node.id
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = NEW_NAME if self.inside and node.arg in CACHE_NAMES else node.arg
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if self.inside or (self.called and ast.unparse(node.func) == self.called):
            for keyword in node.keywords:
                keyword.arg = NEW_NAME if keyword.arg in CACHE_NAMES else keyword.arg
        return node


def renamed(*classes: str):
    return lambda text: ast.unparse(RenamedCache(classes).visit(ast.parse(text)))


def replaced(old: str, new: str, count: int = 1):
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, count)

    return change


# what releases changed, by the model type; what the layer that is refused is called there
RIGHT = {
    ("gpt2", "the cache has another name"): renamed("GPT2Block", "GPT2Attention"),
    ("mamba", "the cache has another name"): renamed("MambaBlock", "MambaMixer"),
    ("falcon", "the cache has another name"): renamed("FalconDecoderLayer", "FalconAttention"),
    ("falcon", "annotations and comments"): replaced("residual: torch.Tensor, prob: float", "residual, prob: int"),
    ("gpt2", "layout"): lambda text: ast.unparse(ast.parse(text)),
}
REFUSED = {
    ("gpt2", "a branch adds more"): replaced("hidden_states = attn_output + residual", "hidden_states = residual"),
    ("falcon", "a function that adds"): replaced("out = residual + out", "out = residual + 2 * out"),
    ("gpt2", "an elif"): replaced("if encoder_hidden_states is not None", "if encoder_hidden_states", -1),
    ("mamba", "more is handed on"): replaced("attention_mask=attention_mask)", "attention_mask=attention_mask, a=1)"),
    ("mamba", "the loop over layers"): replaced(
        "for mixer_block in self.layers:",
        "for mixer_block in self.layers:\n            hidden_states = hidden_states + 1",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and its conversion of a model type, whose code says that it was cut from another release."""

    @cache
    def saved(model_type: str) -> tuple[Path, Path]:
        place = tmp_path_factory.mktemp(model_type)
        base, converted = place / "base", place / "converted"
        other_families.tiny(model_type).save_pretrained(base)
        assert cli.main(["convert", str(base), str(converted), "-q", "--verify", "structure"]) == 0
        say_cut_from(converted, OTHER)
        return base, converted

    return saved


def say_cut_from(folder: Path, release: str, **digests: str) -> None:
    """Let the code of a folder name another release, and other digests."""
    (path,) = folder.glob("modeling_hc_*.py")
    text = path.read_text(encoding="utf-8").replace(f'"{INSTALLED}",', f'"{release}",')
    assert f'"{release}",' in text
    for name, value in digests.items():
        before, _, after = text.partition(f'{name}="')
        text = f'{before}{name}="{value}"{after.partition(chr(34))[2]}'
    path.write_text(text, encoding="utf-8")


def compared(folders, model_type: str, change, place: Path, how: str = "eager") -> list:
    """How a conversion compares with its base where Transformers' module is changed."""
    name = f"transformers.models.{read_family(model_type).modeling}"
    changed = place / "changed.py"
    changed.write_text(change(inspect.getsource(import_module(name))), encoding="utf-8")
    # imports of the package that the module is in stay relative to it
    return json.loads(printed(COMPARE, name, changed, *folders(model_type), how, place=place))


@pytest.mark.parametrize(
    ("model_type", "what"), few(RIGHT, ("gpt2", "the cache has another name"), ("mamba", "the cache has another name"))
)
def test_the_same_layer_under_other_names_is_run(folders, model_type, what, tmp_path):
    assert compared(folders, model_type, RIGHT[model_type, what], tmp_path) == [True] * 3


@pytest.mark.parametrize(
    ("model_type", "what"), few(REFUSED, ("mamba", "the loop over layers"), ("falcon", "a function that adds"))
)
def test_another_layer_is_refused_with_what_helps(folders, model_type, what, tmp_path):
    kind, message = compared(folders, model_type, REFUSED[model_type, what], tmp_path)
    assert kind == "SourceDiffersError"
    assert f"cut from Transformers {OTHER}" in message
    assert f"differ in the installed {INSTALLED}. Install transformers=={OTHER}" in message
    assert "hf-hyperconn refresh FOLDER" in message


@pytest.mark.slow
def test_renamed_caches_compile_whole(folders, tmp_path):
    case = ("gpt2", "the cache has another name")
    assert compared(folders, "gpt2", RIGHT[case], tmp_path, "compiled") == [True] * 3


@pytest.mark.slow
def test_renamed_caches_are_split_and_sharded(folders, tmp_path):
    base, converted = folders("cohere2")
    copy = shutil.copytree(converted, tmp_path / "cohere2")
    say_cut_from(copy, OTHER, spelled="0")
    said = run_on_ranks(2, "tests/ranks/bridged.py", str(base), str(copy))
    for way in ("tp", "fsdp"):
        assert [said.count(f"{way}_size: logits agree on rank {rank}") for rank in (0, 1)] == [1, 1]


def test_what_counts_of_a_source():
    def of(text: str, **settings) -> str:
        return digest_of_functions([(ast.parse(textwrap.dedent(text)).body[0], "")], **settings)

    plain = of("def forward(self, x, cache=None):\n    y: int = self.a(x, cache=cache)\n    return x + y")
    same = """
    @deprecate_kwarg('past_key_values', new_name='cache')
    def forward(self, x: Tensor, past_key_values: Cache | None = None) -> Tensor:
        '''Of a layer.'''
        y = self.a(x, past_key_values=past_key_values)  # attention
        return x + y
    """
    assert of(same) == plain
    assert of(same, spelled=True) != plain
    for change in (("x + y", "y + x"), ("=past_key_values)", "=None)"), ("= None", "= 0"), ("x: Tensor", "z: Tensor")):
        assert of(same.replace(*change)) != plain
    assert of(same.replace("@deprecate_kwarg", "@no_grad")) != plain


def test_what_counts_of_a_loop_over_layers():
    def of(text: str) -> str:
        return digest_of_functions([(ast.parse(text).body[0], "layers")])

    loop = """
def forward(self, x, mask):
    x = self.embedded(x)
    for layer in self.layers:
        if self.training and self.layerdrop > 0.0:
            drawn = torch.rand([])
            if drawn < self.layerdrop:
                continue
        x = layer(x, mask=mask)
"""
    same = {"embedded(x)": "scaled(x)", "mask=mask": "mask=self.masks[0]", " and self.layerdrop > 0.0": ""}
    for change in same.items():
        assert of(loop.replace(*change)) == of(loop)
    others = {"mask=mask": "bias=mask", "x = layer(x": "x = x + layer(x", "drawn = torch.rand([])": "x = self.drop(x)"}
    for change in {**others, "self.layerdrop": "self.drop", "self.layers": "self.layers[1:]"}.items():
        assert of(loop.replace(*change)) != of(loop)


def test_what_counts_of_an_init():
    text = "def __init__(self, config):\n    self.a = config.a\n    self.mlp = MLP(config, {})"
    found = [digest_of_functions([(ast.parse(text.format(which)).body[0], "")]) for which in ("1", "2")]
    assert found[0] == found[1] != digest_of_functions([(ast.parse(text.replace("config.a", "config.b")).body[0], "")])
    annotated = text.replace("self.a =", "self.a: bool =").format("1")
    assert digest_of_functions([(ast.parse(annotated).body[0], "")]) == found[0]


def test_the_release_of_the_cut_is_not_proved(monkeypatch):
    cut = read_family("gpt2").layers[0].cut_from
    assert cut.release == INSTALLED

    def fails(*args):
        raise AssertionError("a source was read")

    monkeypatch.setattr(layer_source, "_parsed", fails)
    assert has_other_cache_names(cut, INSTALLED) is False


@pytest.mark.parametrize(
    "model_type", few(["gpt2", "falcon", "t5:decoder", "mamba", "vit", "gemma3_text"], "gpt2", "falcon")
)
def test_the_installed_source_is_its_own(model_type):
    """Read from files without an import, and from the functions that run."""
    for layer in read_family(model_type).layers:
        cut = layer.cut_from
        assert [FunctionSource.named(name).name for name in cut.functions] == [*cut.functions]
        assert has_other_cache_names(cut._replace(release=OTHER), INSTALLED) is False
        with pytest.raises(SourceDiffersError, match=f"differ in the installed {INSTALLED}"):
            has_other_cache_names(cut._replace(release=OTHER, same="0", spelled="0"), INSTALLED)


def test_what_can_not_be_read_is_refused():
    cut = read_family("gpt2").layers[0].cut_from
    for name in ("gpt2.modeling_gpt2:GPT2Gone.forward", "gone.modeling_gone:A.forward"):
        with pytest.raises(SourceDiffersError, match="can't be read there"):
            has_other_cache_names(CutFrom(OTHER, (name,), cut.same, cut.spelled), INSTALLED)


def test_a_hook_that_names_the_cache_is_copied_and_pickled():
    hook = layer_source.CacheNamedAs("cache")
    for each in (hook, deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert each(None, (1,), {"past_key_values": 2, "mask": 3}) == ((1,), {"cache": 2, "mask": 3})


def test_a_bridged_model_is_made_on_the_meta_device(monkeypatch):
    layer = HCGPT2LMHeadModel.layer_classes[0]
    monkeypatch.setattr(layer, "cut_from", layer.cut_from._replace(release=OTHER, spelled="0"))
    with torch.device("meta"):
        model = HCGPT2LMHeadModel(HCGPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8))
    hooks = model.transformer.h[0].attn._forward_pre_hooks.values()
    assert [type(hook) for hook in hooks] == [layer_source.CacheNamedAs]


def test_verify_inspect_and_refresh_say_the_release(folders, tmp_path, capsys):
    base, converted = folders("gpt2")
    copy = tmp_path / "converted"
    assert cli.main(["convert", str(base), str(copy), "-q"]) == 0
    say_cut_from(copy, OTHER, same="0")
    capsys.readouterr()
    assert cli.main(["inspect", str(copy)]) == 0
    assert f"cut from Transformers {OTHER}; releases with the same layers run it" in capsys.readouterr().out
    assert cli.main(["verify", str(copy), "--against", str(base)]) == 3
    assert (
        f"cut from Transformers {OTHER}, and GPT2Block.forward of the installed {INSTALLED}" in capsys.readouterr().err
    )
    assert cli.main(["refresh", str(copy), "--accept-changes"]) == 0
    assert cli.main(["verify", str(copy), "--against", str(base)]) == 0
    capsys.readouterr()
    assert cli.main(["card", str(copy)]) == 0
    assert f"cut from Transformers {INSTALLED}." in (copy / "README.md").read_text(encoding="utf-8")


def test_layers_keep_the_types_that_their_base_reads():
    """Transformers 5.16 renames those of code that is not its own, and LFM2-MoE's `forward` looks them up."""
    types = ["conv", "full_attention"]
    assert hf_hyperconn.HCLfm2MoeConfig(num_hidden_layers=2, layer_types=types).layer_types == types
