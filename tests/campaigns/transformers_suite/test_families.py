"""Transformers' own tests, by family. `CausalLMModelTest` says which tests there are."""

import unittest

from tests.causal_lm_tester import CausalLMModelTest
from tests.encoder_testers import ImageModelTest, SequenceToSequenceModelTest


class HCLlamaModelTest(CausalLMModelTest, unittest.TestCase):
    """Llama, the plainest family."""

    family = "Llama"


class HCQwen3ModelTest(CausalLMModelTest, unittest.TestCase):
    """Qwen3: norms of queries and keys, a head dimension of its own, optional sliding windows."""

    family = "Qwen3"
    config_fields = {"head_dim": 12}


class HCGemma2ModelTest(CausalLMModelTest, unittest.TestCase):
    """Gemma2: norms after its branches, sliding windows, soft-capped logits."""

    family = "Gemma2"
    config_fields = {"head_dim": 12, "query_pre_attn_scalar": 12}


class HCGlm4ModelTest(CausalLMModelTest, unittest.TestCase):
    """GLM-4: four norms in a layer, and a fused MLP."""

    family = "Glm4"
    config_fields = {"head_dim": 24, "pad_token_id": 0}


class HCOlmoeModelTest(CausalLMModelTest, unittest.TestCase):
    """OLMoE: experts."""

    family = "Olmoe"
    config_fields = {"num_experts": 8, "num_experts_per_tok": 2}


class HCGraniteMoeModelTest(CausalLMModelTest, unittest.TestCase):
    """Granite MoE: experts, and branches that are multiplied by a number."""

    family = "GraniteMoe"
    config_fields = {"num_local_experts": 8, "num_experts_per_tok": 2, "residual_multiplier": 0.5}


class HCGPTNeoXModelTest(CausalLMModelTest, unittest.TestCase):
    """GPT-NeoX, the layers of Pythia: attention and MLP in parallel."""

    family = "GPTNeoX"
    config_fields = {"num_key_value_heads": 4}


class HCMamba2ModelTest(CausalLMModelTest, unittest.TestCase):
    """Mamba-2: one addition in a layer, and states instead of attention."""

    family = "Mamba2"
    config_fields = {
        "hidden_size": 64,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 4,
    }
    has_attentions = False


class HCViTModelTest(ImageModelTest, unittest.TestCase):
    """ViT: an encoder of images."""

    family = "ViT"
    tasks = ("Model", "ForImageClassification")
    config_fields = {
        "image_size": 30,
        "patch_size": 2,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 37,
    }


class HCT5ModelTest(SequenceToSequenceModelTest, unittest.TestCase):
    """T5: an encoder and a decoder with three sub-layers in a layer."""

    family = "T5"
    tasks = (
        "Model",
        "ForConditionalGeneration",
        "ForSequenceClassification",
        "ForQuestionAnswering",
    )
    config_fields = {
        "vocab_size": 99,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.1,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
