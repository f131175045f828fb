"""What Transformers' tests have to be told about models that live outside Transformers, and the outcomes."""

import json
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers.models.auto import modeling_auto

from hf_hyperconn import HyperConnection
from hf_hyperconn.families.family import find_family
from hf_hyperconn.families.modules import code_text
from tests.classes import CONTROL
from tests.distributed_testing_utils import _start_rank_processes

# the tests tell the task of a class, and so its labels, by looking its name up in these tables
TASKS = {
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "AutoModelForImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
EXPECTED_TO_FAIL = {
    "test_tp_generation_quantized": "random weights decide: Transformers' own Llama fails with two of eight seeds",
    "HCMamba2ModelTest::test_retain_grad_hidden_states_attentions": "its first hidden state is that after a layer, "
    "which returns streams: what is recorded is read out of them, beside the path of the gradient",
}
# the tests open the file of a class; most families' files are nowhere but in memory
FILES = TemporaryDirectory()
for family in map(
    find_family, ("llama", "qwen3", "gemma2", "glm4", "olmoe", "granitemoe", "gpt_neox", "mamba2", "vit", "t5")
):
    for auto, reference in family.auto_map.items():
        if auto in TASKS:
            TASKS[auto][family.hc_model_type] = reference.partition(".")[2]
    for file in family.files:
        module = import_module(f"hf_hyperconn.models.{file.removesuffix('.py')}")
        module.__file__ = str(Path(FILES.name, file))
        Path(module.__file__).write_text(code_text(file), encoding="utf-8")

# Transformers runs its distributed tests on a few models only; None means every model with a plan
for name, models in {
    "test_tensor_parallel_mixin": "TP_DISTRIBUTED_TEST_MODEL_TYPES",
    "test_expert_parallel_mixin": "EP_DISTRIBUTED_TEST_MODEL_TYPES",
    "test_fsdp_mixin": "FSDP_DISTRIBUTED_TEST_MODEL_TYPES",
}.items():
    try:
        setattr(import_module(f"tests.{name}"), models, None)
    except ModuleNotFoundError as error:  # a mixin that this Transformers does not have yet
        if error.name != f"tests.{name}":
            raise

# ranks are processes on the CPU, of which a core can run several: the tests of four and eight run everywhere
import_module("tests.test_fsdp_mixin")._get_available_fsdp_workers = lambda: 8
torch.multiprocessing.spawn = _start_rank_processes  # what Transformers before 5.23 starts ranks with

initial_values = HyperConnection.initial_values


def separated_values(self):
    """Initial values near the equivalent initialisation: at that, all streams are equal, and a test that mixed them
    up would not notice.
    """
    noise = torch.Generator("cpu").manual_seed(self.sub_layer)
    return {
        name: value + 0.05 * torch.randn(value.shape, generator=noise, device="cpu").to(value.device)
        for name, value in initial_values(self).items()
    }


HyperConnection.initial_values = separated_values


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, help="write each test's outcome to this JSON file")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # of several processes, the one that hears of all tests
        config.pluginmanager.register(OutcomeKeeper(config), "outcome-keeper")


def pytest_collection_modifyitems(items):
    for item in items:
        for test, reason in EXPECTED_TO_FAIL.items():
            if item.nodeid.endswith(test) and not (CONTROL and "::" in test):
                item.add_marker(pytest.mark.xfail(reason=reason))


class OutcomeKeeper:
    """Keeps one outcome of a test: failed if any phase or subtest of it failed, skipped if all of it was skipped."""

    def __init__(self, config):
        self.path = config.getoption("--outcomes")
        self.outcomes = {}

    def pytest_runtest_logreport(self, report):
        outcomes = self.outcomes.setdefault(report.nodeid, {"whole": set(), "subtests": set()})
        part = "subtests" if hasattr(report, "context") else "whole"
        if report.when == "call" or report.outcome != "passed":
            outcomes[part].add(report.outcome)

    def pytest_sessionfinish(self):
        if self.path:
            outcomes = {nodeid: summary(**parts) for nodeid, parts in self.outcomes.items()}
            self.path.write_text(json.dumps(outcomes), encoding="utf-8")


def summary(whole: set[str], subtests: set[str]) -> str:
    """Return the outcome of a test from those of its phases and of its subtests."""
    if "failed" in whole | subtests:
        return "failed"
    return "skipped" if "skipped" in whole or subtests == {"skipped"} else "passed"
