"""Serving by Transformers: batching, drafts, compiled decoding, exported graphs, and the server."""

import copy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaForCausalLM,
)
from transformers.utils.import_utils import is_serve_available

from hf_hyperconn import HCLlamaForCausalLM, convert_model
from hf_hyperconn.conversion.convert import convert_checkpoint

from .conftest import llama_config, randomise_connections
from .isolated import printed
from .pages import snippets
from .processes import serving, without_package
from .tolerances import COMPILED, ONNX

GREEDY = {"do_sample": False, "pad_token_id": 0}
PROMPTS = ["Once upon a time, there was a", "The big dog", "One day, Lily went to the park with her mom and"]
BASE, CONVERTED = "Llama-3.2-1B", "Llama-3.2-1B-HCx4"  # on the page
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def place(stories, tmp_path_factory) -> Path:
    """A folder with the pretrained Llama, given a chat template, and its conversion under the names on the page."""
    place = tmp_path_factory.mktemp("serving")
    shutil.copytree(stories, place / BASE)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(place / BASE)
    convert_checkpoint(str(place / BASE), place / CONVERTED, verify="off")
    return place


@pytest.fixture(scope="module")
def models(place) -> tuple[LlamaForCausalLM, HCLlamaForCausalLM]:
    """The pretrained Llama and its conversion, which never stop by themselves."""
    classes = {BASE: LlamaForCausalLM, CONVERTED: HCLlamaForCausalLM}
    loaded = tuple(each.from_pretrained(place / name).eval() for name, each in classes.items())
    for model in loaded:
        model.generation_config.eos_token_id = None
    return loaded


@pytest.fixture(scope="module")
def trained(models) -> HCLlamaForCausalLM:
    """The conversion with connections that are no longer its base's."""
    return randomise_connections(copy.deepcopy(models[1]))


@pytest.fixture(scope="module")
def prompts(stories) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(stories)(PROMPTS)["input_ids"]


def page(language: str, word: str) -> str:
    """The one block of code in a language on the page about serving that has this word."""
    (code,) = [code for each, code in snippets("docs/serving.md") if each == language and word in code]
    return code


def test_continuous_batching_answers_as_generate(models, trained, prompts):
    """And a conversion as its base. The cache is small: on a CPU, one of the default size takes a minute to make."""
    config = GenerationConfig(max_new_tokens=16, eos_token_id=-1, **GREEDY)
    sizes = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)
    answers = []
    for model in (*models, trained):
        one_by_one = [
            model.generate(torch.tensor([ids]), max_new_tokens=16, **GREEDY)[0, len(ids) :].tolist() for ids in prompts
        ]
        batched = model.generate_batch(prompts, config, continuous_batching_config=sizes)
        answers.append([list(output.generated_tokens) for output in batched.values()])
        assert answers[-1] == one_by_one
    assert answers[0] == answers[1] != answers[2]


def test_base_and_conversion_draft_for_each_other(models, trained, prompts):
    base, converted = models
    ids = torch.tensor(prompts[:1])
    for model, assistant in ((converted, base), (base, converted), (trained, base), (base, trained)):
        expected = model.generate(ids, max_new_tokens=16, **GREEDY)
        assisted = model.generate(ids, max_new_tokens=16, assistant_model=assistant, **GREEDY)
        assert torch.equal(assisted, expected)


@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [False, True])
def test_decoding_compiled_with_a_static_cache(is_trained, ids):
    """One graph for every token: `fullgraph`, and Dynamo told to fail rather than compile again."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config(num_hidden_layers=1, initializer_range=0.2)).eval()
    base.generation_config.eos_token_id = None
    model = convert_model(copy.deepcopy(base))
    if is_trained:
        randomise_connections(model)
    compiled = CompileConfig(fullgraph=True, mode="default")
    compiled._compile_all_devices = True  # Transformers compiles on GPUs alone unless told otherwise
    settings = {"max_new_tokens": 12, **GREEDY}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = model.generate(ids, cache_implementation="static", compile_config=compiled, **settings)
    assert "_compiled_call" in vars(model)
    assert torch.equal(found, model.generate(ids, **settings))
    assert torch.equal(found, base.generate(ids, **settings)) != is_trained


# exported graphs


def assert_runs_as(model, run, tolerance) -> None:
    """What `run` returns for inputs of several sizes, some of them padded, is the model's logits."""
    for batch, length in ((2, 16), (1, 7), (3, 40)):
        ids = torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(length))
        mask = (torch.arange(length) >= torch.arange(batch)[:, None]).long()
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
        found = run({"input_ids": ids, "attention_mask": mask})
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], **tolerance)


@pytest.fixture
def exportable() -> HCLlamaForCausalLM:
    """A Llama of two layers whose connections are no longer its base's."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config(num_hidden_layers=2, initializer_range=0.2)).eval()
    return randomise_connections(convert_model(base))


@pytest.mark.slow
def test_exported_by_dynamo(exportable, ids):
    pytest.importorskip("transformers.exporters.metadata", reason="needs exporters that return a model to run")
    from transformers.exporters import DynamoConfig, DynamoExporter

    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exported = DynamoExporter().export(exportable, inputs, config=DynamoConfig(dynamic=True))
    assert_runs_as(exportable, lambda inputs: exported(**inputs).logits, COMPILED)


@pytest.mark.slow
def test_exported_to_onnx_as_the_page_says(exportable, tmp_path, monkeypatch):
    pytest.importorskip("transformers.exporters.metadata", reason="needs exporters that return a model to run")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    copy.deepcopy(exportable).to(torch.bfloat16).save_pretrained(tmp_path / CONVERTED)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(page("python", "OnnxExporter"), names)
    with torch.no_grad():
        expected = names["model"](names["ids"]).logits
    torch.testing.assert_close(torch.from_numpy(names["logits"]), expected, **ONNX)
    session = onnxruntime.InferenceSession("onnx/model.onnx")

    def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        (logits,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
        return torch.from_numpy(logits)

    assert_runs_as(names["model"], run, ONNX)


@pytest.mark.slow
def test_exported_to_openvino_as_the_page_says(exportable):
    pytest.importorskip("openvino")
    ids = torch.randint(3, 90, (3, 24))
    inputs = {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()}
    names = {"torch": torch, "model": exportable, "ids": ids, "inputs": inputs}
    exec(page("python", "openvino.convert_model"), names)
    with torch.no_grad():
        expected = exportable(ids).logits
    torch.testing.assert_close(torch.from_numpy(names["traced"]), expected, **ONNX)


# the page


@pytest.mark.slow
@pytest.mark.skipif(not is_serve_available(), reason="needs what `transformers serve` needs")
@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(
            ["--continuous-batching", "--cb-num-blocks", "8", "--cb-max-batch-tokens", "256"], marks=pytest.mark.slow
        ),
    ],
    ids=["one by one", "continuous batching"],
)
def test_a_client_gets_what_generate_gives(options, place, tmp_path):
    """The page's server and its client, neither with hf_hyperconn."""
    from openai import OpenAI

    environment = without_package(tmp_path)
    (place / "serve.py").write_text(page("python", "import app"), encoding="utf-8")
    python, *command = shlex.split(page("bash", "serve.py"))
    assert python == "python"
    tokenizer = AutoTokenizer.from_pretrained(place / BASE)
    model = HCLlamaForCausalLM.from_pretrained(place / CONVERTED).eval()

    def generated(ids: list[int]) -> str:
        ids = torch.tensor([ids])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, **GREEDY)
        return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

    with serving([sys.executable, *command, *options, "--device", "cpu"], place, environment) as address:
        client = page("python", "OpenAI").replace("http://localhost:8000", address)
        assert address in client
        done = subprocess.run([sys.executable, "-c", client], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout == generated(tokenizer("Once upon a time")["input_ids"]) + "\n"

        messages = [{"role": "user", "content": PROMPTS[2]}]
        chat = OpenAI(base_url=f"{address}/v1", api_key="none").chat.completions
        answer = chat.create(model=CONVERTED, messages=messages, max_tokens=20, temperature=0)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert answer.choices[0].message.content == generated(ids)


@pytest.mark.slow
def test_the_page_generates(place, tmp_path):
    printed(page("python", "generate_batch"), place=place, modules=tmp_path / "modules")
