"""Testers and test classes that put encoders, and encoders with a decoder, under Transformers' test mixins."""

import copy

import torch
from transformers import set_seed
from transformers.testing_utils import torch_device

from . import test_modeling_common
from .classes import class_of
from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor


class EncoderTester:
    """What the testers of this file share: the classes of one family that there are.

    tasks: what its classes are for, the base model first.
    config_fields: of a config with which a model has a few ten thousand parameters.
    """

    batch_size = 5
    is_training = True
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4

    def __init__(self, family: str, tasks: tuple[str, ...], config_fields: dict):
        self.config_class = class_of(family, "Config")
        self.all_model_classes = tuple(class_of(family, task) for task in tasks)
        self.config_fields = config_fields

    def get_config(self):
        return self.config_class(**self.config_fields)


class ImageTester(EncoderTester):
    """Of models that see images of 30 × 30 in patches of 2 × 2, with a token for the class before them."""

    image_size = 30
    patch_size = 2
    mask_length = (image_size // patch_size) ** 2
    seq_length = mask_length + 1
    num_masks = 9

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        return config, {
            "pixel_values": floats_tensor([self.batch_size, config.num_channels, self.image_size, self.image_size])
        }


class SequenceToSequenceTester(EncoderTester):
    """Of encoders with a decoder: text that ends in `eos_token_id`, of which the first row begins with padding."""

    batch_size = 13  # rows that tests add to fewer than seven do not end
    encoder_seq_length = decoder_seq_length = seq_length = 7

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        inputs = {}
        for prefix in ("", "decoder_"):
            ids = ids_tensor([self.batch_size, self.seq_length], config.vocab_size - 3) + 3
            ids[:, -1] = config.eos_token_id
            mask = torch.ones_like(ids)
            mask[0, 0] = 0
            inputs |= {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}
        return config, inputs


class EncoderTest(ModelTesterMixin):
    """The mixin of all models, and the loss of each class; the other mixins train and distribute text decoders only.

    Random numbers start from the same seed in every test.

    family, tasks, config_fields: see `EncoderTester`.
    """

    kind_of_tester: type[EncoderTester]
    family: str
    tasks: tuple[str, ...]
    config_fields: dict
    common_fields: dict = {}
    model_tester = None

    def setUp(self):
        self.model_tester = self.kind_of_tester(self.family, self.tasks, self.config_fields)
        self.all_model_classes = self.model_tester.all_model_classes
        self.config_tester = ConfigTester(self, config_class=self.model_tester.config_class, **self.common_fields)
        set_seed(0)
        test_modeling_common.global_rng.seed(0)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_loss(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes[1:]:
            labelled = self._prepare_for_class(inputs, model_class, return_labels=True)
            model = model_class(copy.deepcopy(config)).to(torch_device)
            model(**labelled).loss.backward()
            assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)


class ImageModelTest(EncoderTest):
    kind_of_tester = ImageTester
    common_fields = {"has_text_modality": False, "hidden_size": 64}
    test_resize_embeddings = False  # they have none of tokens


class SequenceToSequenceModelTest(EncoderTest):
    kind_of_tester = SequenceToSequenceTester
    is_encoder_decoder = True
