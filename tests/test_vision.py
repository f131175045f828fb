"""Classifiers of images: heads whose base model lacks a part, and studies of what they do on images."""

import json
import shutil
import types
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AutoBackbone,
    AutoModelForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    DPTConfig,
    DPTForDepthEstimation,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
)

from hf_hyperconn import HCViTForImageClassification, convert_model
from hf_hyperconn.analysis.study import study
from hf_hyperconn.conversion import cli
from hf_hyperconn.training.monitor import hc_figures

from .isolated import printed

SIZES = {"image_size": 16, "patch_size": 4, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 3, "initializer_range": 0.2, "num_labels": 5}
OF_HEADS = {
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "DPTForDepthEstimation": {
        "is_hybrid": False,
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
    },
    "VideoMAEForVideoClassification": {"num_frames": 4},
    "CLIPModel": {
        "text_config": {**SIZES, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        "vision_config": SIZES,
    },
    "ModernBertForMultipleChoice": {"vocab_size": 96, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
}
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def classifier() -> ViTForImageClassification:
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**SIZES)).eval()


def test_an_image_too_large_to_run_on_is_not_made(tmp_path, capsys):
    """DINOv3 has no weights whose shapes would say how large its images are."""
    config = DINOv3ViTConfig(**{name: value for name, value in SIZES.items() if name != "num_labels"})
    DINOv3ViTModel(config).save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_size": 2**16}))
    assert cli.main(["convert", str(tmp_path / "base"), str(tmp_path / "hc")]) == 3
    assert "DINOv3ViTModel takes [1, 3, 65536, 65536] values, too many here" in capsys.readouterr().err


def test_a_backbone_that_has_the_layers_is_the_reason(tmp_path, capsys):
    maps = {"out_features": ["stage1", "stage2", "stage3"], "reshape_hidden_states": False}
    sizes = {name: value for name, value in SIZES.items() if name != "num_labels"}
    backbone = Dinov2Config(**sizes, **maps)
    neck = {"neck_hidden_sizes": [8] * 3, "backbone_out_indices": [0, 1, 2], "fusion_hidden_size": 8}
    base = DPTForDepthEstimation(DPTConfig(backbone_config=backbone, is_hybrid=False, **neck))
    base.save_pretrained(tmp_path / "base")
    assert cli.main(["convert", str(tmp_path / "base"), str(tmp_path / "hc")]) == 1
    assert "has its layers in a backbone (backbone_config, 'dinov2')" in capsys.readouterr().err
    with pytest.raises(ValueError, match="HCDPTForDepthEstimation has no HCDPTModel in it"):
        convert_model(base)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A classifier, saved, and beside it its conversion."""
    folder = tmp_path_factory.mktemp("vit")
    classifier().save_pretrained(folder / "base")
    assert cli.main(["convert", str(folder / "base"), str(folder / "dhc2"), "-n", "2", "-q", "--verify", "full"]) == 0
    return folder


PROCESSOR = """
import sys
from transformers import AutoImageProcessor, AutoProcessor
for auto in (AutoImageProcessor, AutoProcessor):
    print(*(type(auto.from_pretrained(folder, trust_remote_code=True)).__name__ for folder in sys.argv[1:]))
"""


def test_a_processor_that_only_the_config_tells(saved, tmp_path):
    """As in older repositories, whose files name none."""
    base, folder = tmp_path / "base", tmp_path / "hc"
    shutil.copytree(saved / "base", base)
    (base / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 16, "width": 16}}))
    assert cli.main(["convert", str(base), str(folder), "-n", "2", "-q"]) == 0
    for line in printed(PROCESSOR, base, folder, place=tmp_path).splitlines():
        of_base, ours = line.split()
        assert ours == of_base
        assert of_base.startswith("ViTImageProcessor")


@torch.no_grad()
def equal(model, other) -> bool:
    return torch.equal(model(pixel_values=IMAGES)[0], other(pixel_values=IMAGES)[0])


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [
        (ViTForImageClassification, ViTConfig),
        (ViTForMaskedImageModeling, ViTConfig),
        (ViTModel, ViTConfig),
        (DeiTForImageClassification, DeiTConfig),
    ],
)
def test_a_head_has_of_its_base_model_what_it_needs(model_class, config_class):
    """A classifier has no pooler; who fills masked patches in has a token for them."""
    torch.manual_seed(0)
    base = model_class(config_class(**SIZES)).eval()
    model = convert_model(base)
    assert equal(model, base)
    names = {name for name, _ in model.named_parameters() if "_hc." not in name}
    assert names == {name for name, _ in base.named_parameters()}


def test_a_classifier_is_converted_on_the_command_line(saved):
    model = AutoModelForImageClassification.from_pretrained(saved / "dhc2")
    assert type(model) is HCViTForImageClassification
    assert model.vit.pooler is None
    assert equal(model, classifier())
    assert equal(HCViTForImageClassification.from_prenorm(saved / "base"), classifier())


@pytest.mark.parametrize("name", ["Dinov2", "DINOv3ViT", "Beit"])
def test_a_backbone_has_the_maps_of_its_base(name, tmp_path, monkeypatch, capsys):
    """With what it reads out of the streams after any layer; Beit's has the base model in it."""
    of_hub = types.SimpleNamespace(repo_exists=lambda name: True)  # which AutoBackbone asks for a folder, too
    monkeypatch.setattr("transformers.models.auto.auto_factory.hf_api", lambda: of_hub)
    config = getattr(transformers, f"{name}Config")(**SIZES, out_indices=[1, 3], reshape_hidden_states=True)
    torch.manual_seed(0)
    base = getattr(transformers, f"{name}Backbone")(config).eval()
    base.save_pretrained(tmp_path / "base")
    folder = tmp_path / "hc"
    assert cli.main(["convert", str(tmp_path / "base"), str(folder), "-n", "2"]) == 0
    assert f'hf_hyperconn.HC{name}Backbone.from_pretrained("{folder}")' in capsys.readouterr().err
    for model in (
        convert_model(base, hc_mult=2),
        AutoBackbone.from_pretrained(folder),
        AutoBackbone.from_pretrained(folder, trust_remote_code=True),
    ):
        assert type(model).__name__ == f"HC{name}Backbone"
        assert any(parameter.endswith("1.mlp_hc.static_alpha") for parameter, _ in model.named_parameters())
        with torch.no_grad():
            outputs, expected = model(pixel_values=IMAGES), base(pixel_values=IMAGES)
        assert [features.shape for features in outputs.feature_maps] == [(2, 16, 4, 4)] * 2
        assert all(map(torch.equal, outputs.feature_maps, expected.feature_maps))


@pytest.mark.parametrize(
    ("architecture", "auto_class"),
    [
        ("ViTForMaskedImageModeling", "AutoModelForMaskedImageModeling"),
        ("ViTMAEForPreTraining", "AutoModelForPreTraining"),
        ("BeitForSemanticSegmentation", "AutoModelForSemanticSegmentation"),
        ("DPTForDepthEstimation", "AutoModelForDepthEstimation"),
        ("VideoMAEForVideoClassification", "AutoModelForVideoClassification"),
        ("ModernBertForMultipleChoice", "AutoModelForMultipleChoice"),
        ("CLIPModel", "AutoModelForZeroShotImageClassification"),
    ],
)
def test_other_heads_are_converted_and_found(architecture, auto_class, tmp_path):
    """By the package and by the code in the folder; verification runs both models on what the head takes."""
    base_class = getattr(transformers, architecture)
    config = base_class.config_class(**SIZES | OF_HEADS.get(architecture, {}))
    torch.manual_seed(0)
    base_class(config).save_pretrained(tmp_path / "base")
    arguments = [str(tmp_path / name) for name in ("base", "hc")]
    assert cli.main(["convert", *arguments, "-n", "2", "-q", "--verify", "full"]) == 0
    for settings in ({}, {"trust_remote_code": True}):
        model = getattr(transformers, auto_class).from_pretrained(tmp_path / "hc", **settings)
        assert type(model).__name__ == f"HC{architecture}"
    assert cli.main(["card", str(tmp_path / "hc")]) == 0


def test_images_are_studied():
    model = convert_model(classifier(), hc_mult=2)
    batches = [{"pixel_values": IMAGES}, {"pixel_values": IMAGES[:1]}]
    matrices = study(model, batches).matrices
    assert torch.equal(matrices.inputs, torch.ones(7, 7, dtype=torch.float64).tril())
    assert matrices.tokens == 3 * 17
    assert hc_figures(model, batches[0])["hc/stream_cosine"] == pytest.approx(1)
