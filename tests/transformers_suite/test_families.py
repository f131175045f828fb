"""Transformers' own tests, by family. `CausalLMModelTest` says which tests there are."""

import unittest

from tests.causal_lm_tester import CausalLMModelTest


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
