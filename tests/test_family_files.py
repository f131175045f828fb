"""The two files of a family, written from Transformers' source, and the modules that are made of them."""

import ast
import inspect
import pickle
import re
import subprocess
import sys
import traceback
from contextlib import suppress
from importlib import import_module

import pytest
import torch
import transformers

import hf_hyperconn
from hf_hyperconn import registration
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import family_of_class, find_family
from hf_hyperconn.families.family_files import configuration_text, modeling_text
from hf_hyperconn.families.modules import MODELS, code_text
from hf_hyperconn.families.reading.read_family import read_family
from hf_hyperconn.models import transformers_seam

from .other_families import RELEASE
from .pages import REPOSITORY
from .stub import stub
from .tested import TESTED

OF_ANOTHER_FORM = {
    "minimax": "the forward of MiniMaxDecoderLayer is not a chain",
    "doge": "the forward of DogeDecoderLayer is not a chain",
    "wav2vec2": "Wav2Vec2Model has layers at several places",
    "bart": "the forward of BartEncoderLayer .* changes the stream by more than additions",
    "bert": "the forward of BertLayer is not a chain",
    "albert": "AlbertModel has no list of layers whose classes",
    "sam3_vit_model": "the forward of Sam3ViTLayer .* the stream has rows and columns, where a sequence is expected",
    "unheard-of": "has no model type 'unheard-of'",
}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Both files of every tested family of the installed Transformers, by name."""
    files = {}
    other_forms = () if transformers.__version__ == RELEASE else (UnsupportedCheckpointError,)
    for model_type in TESTED:
        if model_type in transformers.CONFIG_MAPPING:
            with suppress(*other_forms):
                files |= {name: code_text(name) for name in find_family(model_type).files}
    assert len(files) > 130
    return files


def test_the_committed_files_are_those_of_llama_as_the_rule_writes_them():
    committed = {path.name: path.read_text(encoding="utf-8") for path in MODELS.glob("*_hc_*.py")}
    source = read_family("llama")
    written = configuration_text(source), modeling_text(source)
    assert committed == dict(zip(find_family("llama").files, written, strict=True))


def test_every_file_is_plain_and_passes_the_linter(texts, tmp_path):
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
        assert not calls & {"exec", "eval", "type", "compile", "__import__", "setattr"}, name
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--config", str(REPOSITORY / "pyproject.toml"), "--no-cache", "."]
    # a line of Bloom's attention is too long once `self` is `self.self_attention` in it
    formatting = ["format", "--check", "--exclude", "modeling_hc_bloom.py"]
    for command in (["check", "--ignore", "E501,F821,UP,SIM,RET,B,PIE"], formatting):
        done = subprocess.run([*ruff, *command, *settings], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_branch_that_is_not_norm_and_sub_layer_stands_in_the_file():
    granite, llama = code_text("modeling_hc_granite.py"), code_text("modeling_hc_llama.py")
    assert "return hidden_states * self.residual_multiplier" in granite
    assert f'cut_from = CutFrom(\n        "{transformers.__version__}",' in granite
    assert "_branch" not in llama
    assert "cut_from" not in llama


@pytest.mark.parametrize(("model_type", "reason"), OF_ANOTHER_FORM.items())
def test_another_form_is_refused(model_type, reason):
    with pytest.raises(UnsupportedCheckpointError, match=reason):
        find_family(model_type)


def test_reading_imports_nothing_of_transformers_or_torch():
    """So a conversion starts fast, and a checkpoint's model type runs no code."""
    program = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
sys.argv = ["hf-hyperconn"]
from hf_hyperconn.families.family import find_family
print(find_family("glm4").architectures["Glm4ForCausalLM"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "HCGlm4ForCausalLM\n", done.stderr


def test_a_made_module_is_a_module_like_any():
    model_class = hf_hyperconn.HCGlm4ForCausalLM
    module = import_module("hf_hyperconn.models.modeling_hc_glm4")
    assert model_class is module.HCGlm4ForCausalLM
    assert inspect.getsource(module) == code_text("modeling_hc_glm4.py")
    source = inspect.getsource(module.HCGlm4DecoderLayer.mlp_branch)
    assert source.startswith("    def mlp_branch(self, hidden_states, **kwargs):")
    with pytest.raises(AttributeError) as raised:
        module.HCGlm4DecoderLayer.mlp_branch(None, None)
    assert "self.post_attention_layernorm(hidden_states)" in "".join(traceback.format_exception(raised.value))
    assert isinstance(hf_hyperconn.HCGlm4Config(), transformers.Glm4Config)


@pytest.mark.slow
def test_it_can_be_pickled_into_another_process():
    pickled = pickle.dumps(hf_hyperconn.HCExaone4Model)
    program = f"import pickle; print(pickle.loads({pickled!r}).__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "HCExaone4Model\n", done.stderr


def test_names_that_no_family_has():
    for name in ("HCBertModel", "HCNothing", "Glm4Model"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(hf_hyperconn, name)
    for name in ("modeling_hc_bert", "modeling_hc_nothing", "modeling_glm4"):
        with pytest.raises(ModuleNotFoundError):
            import_module(f"hf_hyperconn.models.{name}")
    with pytest.raises(FileNotFoundError):
        code_text("modeling_hc_nothing.py")


def test_the_stub_for_editors_has_classes_of_families(texts):
    text = stub()
    for name in ("HCGemma3ForCausalLM", "HCInternLM3Config", "HCHeliumForSequenceClassification", "HCLlamaModel"):
        if family_of_class(name) is not None:  # some came with later releases
            assert f"class {name}(" in text
            assert getattr(hf_hyperconn, name).__name__ == name


@pytest.mark.slow
@pytest.mark.tail
def test_every_name_of_the_stub_is_there():
    names = re.findall(r"^class (HC\w+)\(", stub(), re.M)
    assert len(names) > 500
    for name in names:
        assert getattr(hf_hyperconn, name).__name__ == name


@pytest.mark.parametrize("name", ["HCGPT2Config", "HCQwen3_5ForCausalLM"])
def test_a_name_that_several_model_types_have(name):
    """GPT-2's config is also that of gpt-sw3, which has no models; Qwen3.5 and its text model have one causal head."""
    if family_of_class(name) is None:
        pytest.skip("this release has no such model")
    assert getattr(hf_hyperconn, name).__name__ == name


def test_the_auto_classes_make_a_family_when_they_are_asked():
    config = transformers.AutoConfig.for_model("hc_helium", hidden_size=32, num_hidden_layers=1, vocab_size=96)
    assert type(config) is hf_hyperconn.HCHeliumConfig
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model) is hf_hyperconn.HCHeliumForCausalLM
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        transformers.AutoModelForQuestionAnswering.from_config(config)
    with pytest.raises(ValueError, match="hc_nothing"):
        transformers.AutoConfig.for_model("hc_nothing")


def test_auto_classes_that_can_not_be_told_so_are_left_alone(monkeypatch):
    warnings = []
    monkeypatch.setattr(registration, "CONFIG_MAPPING", object())
    monkeypatch.setattr(transformers_seam.logger, "warning_once", warnings.append)
    registration.register_auto_classes()
    assert len(warnings) == 1
    assert "Auto classes may not find" in warnings[0]


def test_arguments_that_a_layer_takes_by_their_place():
    """Those that the model of its family gives so, and no others."""
    layer = hf_hyperconn.HCViTModel(tiny_config(hf_hyperconn.HCViTConfig, image_size=16, patch_size=4)).layers[1]
    streams, mask = torch.randn(1, 5, 4, 32), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    assert torch.equal(layer(streams, mask), layer(streams, attention_mask=mask))
    assert not torch.equal(layer(streams, mask), layer(streams, None))
    with pytest.raises(TypeError, match="received 2 arguments by their place .* but takes attention_mask so"):
        layer(streams, mask, mask)
    layer = hf_hyperconn.HCLlamaModel(tiny_config(hf_hyperconn.HCLlamaConfig)).layers[1]
    with pytest.raises(TypeError, match="received 1 arguments by their place .* but takes none so"):
        layer(streams, mask)


def tiny_config(config_class: type, **fields):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return config_class(**sizes, **fields)
