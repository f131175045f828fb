"""HC-Llamas from a checkpoint: embeddings, heads, devices."""

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from hf_hyperconn import (
    HCLlamaConfig,
    HCLlamaForCausalLM,
    HCLlamaForQuestionAnswering,
    HCLlamaForSequenceClassification,
    HCLlamaForTokenClassification,
    HCLlamaModel,
    convert_model,
)
from hf_hyperconn.errors import UnsupportedCheckpointError
from tests.conftest import llama_config


def test_from_prenorm_takes_fields_of_the_config_as_from_pretrained_does(stories, ids):
    asked = {"use_cache": False, "num_hidden_layers": 2, "attn_implementation": "eager", "dtype": torch.bfloat16}
    hc, base = (
        load(stories, **asked).eval() for load in (HCLlamaForCausalLM.from_prenorm, LlamaForCausalLM.from_pretrained)
    )
    for name in ("use_cache", "num_hidden_layers", "_attn_implementation", "dtype"):
        assert getattr(hc.config, name) == getattr(base.config, name)
    assert torch.equal(hc(ids).logits, base(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_resized_embeddings(tied, tmp_path, ids):
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config(tie_word_embeddings=tied, initializer_range=0.2)).eval()
    hc = convert_model(base)
    assert (hc.lm_head.weight is hc.model.embed_tokens.weight) == tied
    assert torch.equal(hc(ids).logits, base(ids).logits)
    hc.resize_token_embeddings(100)
    hc.save_pretrained(tmp_path)
    loaded = HCLlamaForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded(ids).logits.shape == (2, 24, 100)
    assert torch.equal(loaded(ids).logits, hc(ids).logits)


@pytest.mark.parametrize(
    ("auto", "base_class", "hc_class"),
    [
        (AutoModel, LlamaModel, HCLlamaModel),
        (AutoModelForCausalLM, LlamaForCausalLM, HCLlamaForCausalLM),
        (AutoModelForSequenceClassification, LlamaForSequenceClassification, HCLlamaForSequenceClassification),
        (AutoModelForTokenClassification, LlamaForTokenClassification, HCLlamaForTokenClassification),
        (AutoModelForQuestionAnswering, LlamaForQuestionAnswering, HCLlamaForQuestionAnswering),
    ],
)
def test_heads(auto, base_class, hc_class, tmp_path, ids):
    torch.manual_seed(0)
    base = base_class(llama_config(initializer_range=0.2)).eval()
    base.save_pretrained(tmp_path / "base")
    hc = hc_class.from_prenorm(tmp_path / "base", hc_mult=2)
    hc.save_pretrained(tmp_path / "hc")
    loaded = auto.from_pretrained(tmp_path / "hc")
    assert type(loaded) is hc_class
    with torch.no_grad():
        for model in (hc, loaded, convert_model(base, hc_mult=2)):
            assert torch.equal(model(ids)[0], base(ids)[0])


def test_device_map(llama_folder, llama, ids, tmp_path):
    pytest.importorskip("accelerate")
    spread = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    spread.update({f"model.layers.{i}": "disk" for i in range(3)})
    convert_model(llama).save_pretrained(tmp_path / "hc")
    model = HCLlamaForCausalLM.from_pretrained(tmp_path / "hc", device_map=spread, offload_folder=tmp_path / "disk")
    assert model.model.layers[0].attn_hc.static_alpha.device.type == "meta"
    with torch.no_grad():
        assert torch.equal(model(ids).logits, llama(ids).logits)
    with pytest.raises(ValueError, match="offloaded to disk"):
        HCLlamaForCausalLM.from_prenorm(llama_folder, device_map=spread, offload_folder=tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="several devices"):
        convert_model(LlamaForCausalLM.from_pretrained(llama_folder, device_map=spread, offload_folder=tmp_path))


def test_the_config_may_be_a_folder_s(llama_folder, llama, ids):
    hc = HCLlamaForCausalLM.from_prenorm(llama_folder, config=str(llama_folder))
    with torch.no_grad():
        assert torch.equal(hc(ids).logits, llama(ids).logits)


def test_a_config_of_ones_own_runs(llama, ids):
    class MyConfig(HCLlamaConfig):
        model_type = "my_llama"

    model = HCLlamaForCausalLM(MyConfig.from_prenorm(llama.config))
    assert torch.isfinite(model(ids).logits).all()


def test_from_prenorm_refuses_a_checkpoint_without_the_weights(tmp_path):
    LlamaModel(llama_config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no weights for lm_head.weight"):
        HCLlamaForCausalLM.from_prenorm(tmp_path)


def test_from_prenorm_reports_what_was_missing(llama_folder):
    model, info = HCLlamaForCausalLM.from_prenorm(llama_folder, output_loading_info=True)
    assert info["missing_keys"]
    assert all("_hc." in key for key in info["missing_keys"])
