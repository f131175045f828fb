"""A tester and a test class that put a family of decoder models under all of Transformers' test mixins."""

import copy

import torch
from transformers import set_seed
from transformers.testing_utils import torch_device

from . import test_modeling_common
from .classes import class_of
from .generation.test_utils import GenerationTesterMixin
from .test_configuration_common import ConfigTester
from .test_fsdp_mixin import FSDPTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor
from .test_tensor_parallel_mixin import TensorParallelTesterMixin
from .test_training_mixin import TrainingTesterMixin

try:
    from .test_expert_parallel_mixin import ExpertParallelTesterMixin
except ModuleNotFoundError:  # Transformers before it had the mixin

    class ExpertParallelTesterMixin:
        """Nothing to test."""


class CausalLMModelTester:
    """Tiny configs and inputs for the classes of one family; a class that it does not have is None.

    family: as Transformers spells it in class names.
    config_fields: added to those that every family has, or in their place.
    """

    batch_size = 5
    seq_length = 7
    is_training = True

    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4

    def __init__(self, family: str, config_fields: dict):
        self.config_class = class_of(family, "Config")
        self.base_model_class = class_of(family, "Model")
        self.causal_lm_class = class_of(family, "ForCausalLM")
        self.sequence_classification_class = class_of(family, "ForSequenceClassification")
        self.token_classification_class = class_of(family, "ForTokenClassification")
        self.question_answering_class = class_of(family, "ForQuestionAnswering")
        self.config_fields = config_fields
        self.hidden_size = config_fields.get("hidden_size", self.hidden_size)

    @property
    def all_model_classes(self) -> tuple[type, ...]:
        """The classes of this family, the base model first."""
        classes = (
            self.base_model_class,
            self.causal_lm_class,
            self.sequence_classification_class,
            self.token_classification_class,
            self.question_answering_class,
        )
        return tuple(model_class for model_class in classes if model_class is not None)

    def get_config(self):
        """A config with which a model has a few ten thousand parameters."""
        fields = {
            "vocab_size": 99,
            "hidden_size": self.hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return self.config_class(**{**fields, **self.config_fields})

    def get_input_ids(self, config, batch_size: int | None = None) -> torch.Tensor:
        """Token ids `[batch, sequence]` without the special tokens."""
        return ids_tensor([batch_size or self.batch_size, self.seq_length], config.vocab_size - 3) + 3

    def prepare_config_and_inputs_for_common(self):
        """A config and the inputs that all classes take; the first row ends in padding."""
        config = self.get_config()
        attention_mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.long, device=torch_device)
        attention_mask[0, -1] = 0
        return config, {"input_ids": self.get_input_ids(config), "attention_mask": attention_mask}


class CausalLMModelTest(
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    TensorParallelTesterMixin,
    ExpertParallelTesterMixin,
    FSDPTesterMixin,
):
    """All the mixins and, for every class of the family, the shape of what it returns and its loss.

    family, config_fields: see `CausalLMModelTester`. Random numbers start from the same seed in every test.
    """

    family: str
    config_fields: dict = {}
    model_tester = None

    def setUp(self):
        self.model_tester = CausalLMModelTester(self.family, self.config_fields)
        self.all_model_classes = self.model_tester.all_model_classes
        fields = {**self.config_fields, "hidden_size": 64}
        self.config_tester = ConfigTester(self, config_class=self.model_tester.config_class, **fields)
        set_seed(0)
        test_modeling_common.global_rng.seed(0)

    def run_head(self, model_class, shape: tuple[int, ...], labels=None, **config_changes):
        """Check the shape of the logits of `model_class`, and that the loss for `labels` has gradients."""
        if model_class is None:
            self.skipTest("the family has no such class")
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for name, value in config_changes.items():
            setattr(config, name, value)
        outputs = model_class(copy.deepcopy(config)).to(torch_device)(**inputs, labels=labels)
        assert outputs.logits.shape == shape
        outputs.loss.backward()
        assert torch.isfinite(outputs.loss)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_model(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = self.model_tester.base_model_class(config).to(torch_device).eval()
        with torch.no_grad():
            outputs = model(**inputs, output_hidden_states=True)
        expected = (self.model_tester.batch_size, self.model_tester.seq_length, self.model_tester.hidden_size)
        assert outputs.last_hidden_state.shape == expected
        assert [state.shape for state in outputs.hidden_states] == [expected] * (config.num_hidden_layers + 1)
        torch.testing.assert_close(outputs.hidden_states[-1], outputs.last_hidden_state)

    def test_causal_lm(self):
        tester = self.model_tester
        labels = tester.get_input_ids(tester.get_config())
        self.run_head(tester.causal_lm_class, (tester.batch_size, tester.seq_length, 99), labels)

    def test_sequence_classification(self):
        tester = self.model_tester
        classes = torch.arange(tester.batch_size, device=torch_device) % 3
        for problem, labels in {
            "single_label_classification": classes,
            "multi_label_classification": torch.nn.functional.one_hot(classes, 3).float(),
            "regression": torch.randn(tester.batch_size, 3, device=torch_device),
        }.items():
            with self.subTest(problem):
                head = tester.sequence_classification_class
                self.run_head(head, (tester.batch_size, 3), labels, num_labels=3, problem_type=problem)

    def test_token_classification(self):
        tester = self.model_tester
        shape = (tester.batch_size, tester.seq_length)
        labels = torch.randint(0, 3, shape, device=torch_device)
        self.run_head(tester.token_classification_class, (*shape, 3), labels, num_labels=3)

    def test_question_answering(self):
        tester = self.model_tester
        if tester.question_answering_class is None:
            self.skipTest("the family has no such class")
        config, inputs = tester.prepare_config_and_inputs_for_common()
        answer = torch.ones(tester.batch_size, dtype=torch.long, device=torch_device)
        model = tester.question_answering_class(config).to(torch_device)
        outputs = model(**inputs, start_positions=answer, end_positions=answer + 1)
        for logits in (outputs.start_logits, outputs.end_logits):
            assert logits.shape == (tester.batch_size, tester.seq_length)
        outputs.loss.backward()
        assert torch.isfinite(outputs.loss)
