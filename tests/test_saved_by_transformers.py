"""What Transformers saves and loads is converted and verified: its loading report decides what tensors are right."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import hf_hyperconn
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.push.folder import open_checked
from hf_hyperconn.conversion.verify import verify_checkpoint
from hf_hyperconn.errors import UnsupportedCheckpointError

from .conftest import TINY, randomise_connections
from .edits import configure, edit_tensors
from .families import FAMILIES
from .marks import few
from .other_families import LONG_TAIL
from .other_families import tiny as other
from .tiny import tiny

# settings of a family that change which tensors there are, or their names
SETTINGS = {
    "tied": {"tie_word_embeddings": True},
    "not tied": {"tie_word_embeddings": False},
    "rotary": {"position_embedding_type": "rotary", "mask_token_id": 32, "token_dropout": True},
    "absolute": {"position_embedding_type": "absolute", "mask_token_id": 32},
    "relative": {"position_embedding_type": "relative_key", "mask_token_id": 32},
}
FAST = ["llama tied", "esm rotary"]
CASES = [
    *(f"{model_type} {setting}" for model_type in [*FAMILIES, *LONG_TAIL] for setting in ("tied", "not tied")),
    *(f"esm {setting}" for setting in ("rotary", "absolute", "relative")),
]
STAND_FOR_ALL = {"llama", "gpt2", "opt", "t5", "clip", "llava", "esm"}  # of each way of naming tensors


def _with_marks(case: str):
    slow = [] if case in FAST else [pytest.mark.slow]
    return pytest.param(case, marks=slow if case.split()[0] in STAND_FOR_ALL else [*slow, pytest.mark.tail])


def base_of(case: str) -> PreTrainedModel:
    """The tiny base of a case, which no test changes."""
    model_type, _, setting = case.partition(" ")
    model = (tiny if model_type in FAMILIES else other)(model_type)
    fields = SETTINGS[setting]
    if any(not hasattr(model.config, field) for field in fields if field != "tie_word_embeddings"):
        pytest.skip(f"{model_type} has no such setting")
    if all(getattr(model.config, field, None) == value for field, value in fields.items()):
        return model
    config = type(model.config).from_dict({**model.config.to_dict(), **fields})
    torch.manual_seed(0)
    return type(model)(config).eval()


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def converted_and_saved(base: Path, out: Path, class_name: str, *, trained: bool) -> Path:
    """The conversion of a base, trained by a random step if asked, as Transformers saves it."""
    model = getattr(hf_hyperconn, f"HC{class_name}").from_prenorm(base, hc_mult=2)
    return saved(randomise_connections(model) if trained else model, out)


@pytest.mark.parametrize("case", [*map(_with_marks, dict.fromkeys(CASES))])
def test_what_transformers_saves_is_converted_and_verified(case, tmp_path):
    model = base_of(case)
    base = saved(model, tmp_path / "base")
    convert_checkpoint(str(base), tmp_path / "out", hc_mult=2, verify="structure")
    for trained in (False, True):
        folder = converted_and_saved(base, tmp_path / f"saved {trained}", type(model).__name__, trained=trained)
        for against in (None, str(base)):
            report = verify_checkpoint(folder, against, mode="structure")
            assert (report.failure, report.trained) == (None, trained)
        assert report.changed == 0
    assert open_checked(folder, (), False, lambda line: None).names


@pytest.fixture
def hub_gpt2(tmp_path) -> Path:
    """GPT-2 with names as the Hub's has them: no prefix, and masks."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    base = saved(transformers.GPT2LMHeadModel(config), tmp_path / "base")
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(base / WEIGHTS).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32) for i in range(2)}
    save_file(tensors, base / WEIGHTS, metadata={"format": "pt"})
    return base


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("trained", [False, True])
def test_names_of_older_releases(trained, hub_gpt2, tmp_path):
    """Saving gives tensors the names of the installed Transformers; by their bytes they are known all the same."""
    folder = converted_and_saved(hub_gpt2, tmp_path / "saved", "GPT2LMHeadModel", trained=trained)
    report = verify_checkpoint(folder, str(hub_gpt2))
    assert (report.failure, report.trained, report.changed) == (None, trained, 0)
    (file,) = folder.glob("*.safetensors")
    edit_tensors(file, lambda tensors: tensors["transformer.h.1.mlp.c_fc.weight"][0, 0].add_(1))
    report = verify_checkpoint(folder, str(hub_gpt2), mode="structure")
    assert report.changed == 1
    assert report.passed is trained


def test_a_base_that_lacks_what_the_conversion_has_is_no_older_name(hub_gpt2, tmp_path):
    folder = converted_and_saved(hub_gpt2, tmp_path / "saved", "GPT2LMHeadModel", trained=True)
    edit_tensors(hub_gpt2 / WEIGHTS, lambda tensors: tensors.pop("h.1.mlp.c_fc.weight"))
    assert "is missing in the base" in verify_checkpoint(folder, str(hub_gpt2), mode="structure").failure


@pytest.fixture
def with_mtp(tmp_path) -> Path:
    """A GLM-4 MoE with one layer more than it runs, which its class ignores by its number."""
    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(
        **{**TINY, "num_hidden_layers": 46, "head_dim": 8, "moe_intermediate_size": 8, "intermediate_size": 8},
        **{"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
        first_k_dense_replace=45,
    )
    base = saved(transformers.Glm4MoeForCausalLM(config), tmp_path / "base")
    tensors = load_file(base / WEIGHTS)
    of_last = {name: value for name, value in tensors.items() if ".layers.45." in name}
    tensors |= {name.replace(".45.", ".46."): value.clone() for name, value in of_last.items()}
    tensors["model.layers.46.eh_proj.weight"] = torch.ones(32, 64)
    save_file(tensors, base / WEIGHTS, metadata={"format": "pt"})
    return base


@pytest.mark.parametrize(
    ("count", "verify"), few([(0, "structure"), (0, "full"), (1, "full"), (None, "full")], (0, "structure"))
)
def test_layers_that_transformers_ignores(count, verify, with_mtp, tmp_path):
    change(with_mtp, num_nextn_predict_layers=count)
    report = convert_checkpoint(str(with_mtp), tmp_path / "out", hc_mult=2, verify=verify).verification
    assert report.passed
    assert all(comparison.equal for comparison in report.comparisons)


def change(folder: Path, **fields) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def rename(folder: Path, name_of) -> Path:
    tensors = {name_of(name): value for name, value in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def refusal(folder: Path, verify: str = "structure") -> str:
    with pytest.raises(UnsupportedCheckpointError) as refused:
        convert_checkpoint(str(folder), folder.parent / "out", verify=verify)
    assert not (folder.parent / "out").exists()
    return str(refused.value)


def test_layers_that_transformers_does_not_ignore(source):
    """In any mode, as the model would be another one."""
    change(source, num_hidden_layers=2)
    for verify in ("off", "structure"):
        message = refusal(source, verify)
        assert "num_hidden_layers is 2, and there are 3; a LlamaForCausalLM has no tensor model.layers.2." in message


@pytest.mark.parametrize("verify", ["off", "structure"])
def test_a_tensor_of_no_layer_that_transformers_does_not_ignore(verify, source):
    edit_tensors(source / WEIGHTS, lambda tensors: tensors.update({"model.layers.x.weight": torch.ones(1)}))
    assert "the tensor 'model.layers.x.weight' belongs to no layer; a LlamaForCausalLM has" in refusal(source, verify)


def test_a_tensor_too_many_goes_when_transformers_saves(source, tmp_path):
    """What the message says is done: loaded, saved and converted."""
    edit_tensors(source / WEIGHTS, lambda tensors: tensors.update({"rope.freqs": torch.ones(4)}))
    message = refusal(source)
    assert (
        "a LlamaForCausalLM has no tensor rope.freqs. If the model doesn't need that tensor, load it with" in message
    )
    assert "download" not in message
    again = saved(transformers.AutoModelForCausalLM.from_pretrained(source), tmp_path / "again")
    assert convert_checkpoint(str(again), tmp_path / "out").verification.passed


@pytest.mark.parametrize(
    ("wrapper", "name_of"),
    [
        ("_orig_mod.", lambda name: f"_orig_mod.{name}"),
        ("module.", lambda name: f"module.{name}"),
        ("base_model.model.", lambda name: f"base_model.model.{name}"),
        ("_orig_mod.", lambda name: name.replace("layers.1.", "layers.1._orig_mod.")),
        ("_checkpoint_wrapped_module.", lambda name: name.replace("mlp.", "mlp._checkpoint_wrapped_module.")),
    ],
)
def test_what_wrappers_put_into_names(wrapper, name_of, source):
    message = refusal(rename(source, name_of))
    assert f"A wrapper put '{wrapper}' into the names. Take that off, and convert the result." in message
    assert "download" not in message


def test_a_wrapper_is_not_blamed_for_what_is_missing(source):
    rename(source, lambda name: f"module.{name}")
    edit_tensors(source / WEIGHTS, lambda tensors: tensors.pop("module.model.layers.0.mlp.up_proj.weight"))
    assert "Copy or download it again, or name in config.json the class that was saved" in refusal(source)


def test_what_transformers_can_not_load(source):
    message = refusal(change(source, pad_token_id=1000))
    assert "Transformers can't load it (" in message
    assert "Load it with Transformers to see its fault" in message


def test_code_of_its_own_of_a_type_that_transformers_has(source, tmp_path):
    change(source, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    assert "Transformers has a llama of its own. If that is the same model, remove auto_map from" in refusal(source)
    configure(source, auto_map=None)
    assert convert_checkpoint(str(source), tmp_path / "out", verify="structure").verification.passed


def test_code_of_its_own_of_a_type_that_transformers_has_not(source):
    change(source, auto_map={"AutoModelForCausalLM": "m.M"}, model_type="of_its_own")
    assert "Transformers has no of_its_own of its own, so it can't be converted." in refusal(source)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("model-Q4_K_M.gguf", r"Load it with Transformers (gguf_file=...), save it with save_pretrained"),
        ("model.fp16.safetensors", r"Load it with Transformers (variant=...), save it"),
        ("model.fp16-00001-of-00002.safetensors", r"Load it with Transformers (variant=...), save it"),
        ("consolidated.safetensors", "Transformers doesn't read that format"),
        ("consolidated-00001-of-00002.safetensors", "Transformers doesn't read that format"),
        ("tf_model.h5", "Load it with Transformers 4 (from_tf=True)"),
        ("flax_model.msgpack", "Load it with Transformers 4 (from_flax=True)"),
    ],
)
def test_weights_in_other_formats(name, remedy, source):
    (source / WEIGHTS).rename(source / name)
    message = refusal(source)
    assert f"has no {WEIGHTS} or {WEIGHTS}.index.json, only {name}. {remedy}" in message


def test_a_config_that_begins_with_a_byte_order_mark(source):
    """As editors on Windows write it; Transformers can't read it."""
    path = source / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    message = refusal(source, "off")
    assert "begins with a byte-order mark, and Transformers can't read it. Save it as UTF-8 without one." in message


@pytest.fixture(scope="module")
def trained(llama_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    return converted_and_saved(llama_folder, out, "LlamaForCausalLM", trained=True)


def test_of_what_fails_early_it_is_not_known_whether_it_is_trained(trained, tmp_path, capsys):
    folder = shutil.copytree(trained, tmp_path / "out")
    (file,) = folder.glob("*.safetensors")
    edit_tensors(file, lambda tensors: tensors.pop("model.norm.weight"))
    report = verify_checkpoint(folder)
    assert (report.trained, report.failure) == (None, "the tensor model.norm.weight is missing")
    assert report.lines()[0].endswith("tensors; whether the hyper-connections are trained is not known")
    assert main(["verify", str(folder), "--json"]) == 3
    printed = json.loads(capsys.readouterr().out)
    assert printed["trained"] is None
    assert type(report).from_dict(printed_report(printed)) == report


def printed_report(printed: dict) -> dict:
    return {name: value for name, value in printed.items() if name not in ("folder", "against")}


def test_notes_are_kept_when_models_can_not_be_compared(llama_folder, tmp_path, monkeypatch):
    """As where one of them can't be run."""
    from hf_hyperconn.conversion.verify import numeric
    from hf_hyperconn.errors import VerificationError

    out = convert_checkpoint(str(llama_folder), tmp_path / "out", verify="structure").path
    (out / "more.py").write_text("print('mine')\n")
    expected = verify_checkpoint(out, str(llama_folder), mode="structure")

    def fail(*arguments, **options):
        raise VerificationError("it does not run")

    monkeypatch.setattr(numeric, "compare_models", fail)
    report = verify_checkpoint(out, str(llama_folder), mode="full")
    assert report.failure == "it does not run"
    assert report.notes == expected.notes == ("more.py is not of the model's code",)
    assert (report.as_converted, report.changed) == (True, 0)
