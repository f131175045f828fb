"""The commands and snippets of docs/vision.md, on tiny models: the example script, and diffusers."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, ViTForImageClassification

pytest.importorskip("accelerate")
pytest.importorskip("diffusers")

from diffusers import AutoencoderKL, DDPMScheduler, DiTPipeline, DiTTransformer2DModel

from examples.image_classification import SHAPES, draw_shapes, find_images, load_images, main
from examples.image_classification import Recipe as Settings
from hf_hyperconn import HCViTForImageClassification

from .pages import snippets

PAGE = "docs/vision.md"
SMALL = shlex.split(
    "--drawn 96 --layers 2 --hidden_size 32 --base_steps 4 --max_steps 4 --per_device_train_batch_size 8 --use_cpu "
    "--disable_tqdm true --logging_steps 1"
)


def snippet(word: str) -> str:
    """The one snippet of the page with this word, in one line if it is a command."""
    (code,) = [code for _, code in snippets(PAGE) if word in code]
    return code.replace("\\\n", "")


def run(word: str, *added: str, **replaced: str) -> dict[str, float]:
    """Run a documented command in this process; what it measured."""
    python, script, *arguments = shlex.split(snippet(word))
    assert (python, script) == ("python", "examples/image_classification.py")
    main([*(replaced.get(argument, argument) for argument in arguments), *SMALL, *added])
    return measured(Path(arguments[arguments.index("--output_dir") + 1]))


def measured(folder: Path) -> dict[str, float]:
    """What a run measured."""
    return json.loads((folder / "all_results.json").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder to work in."""
    folder = tmp_path_factory.mktemp("vision")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def shapes(place) -> Path:
    """The folder of a run without images and without a model."""
    run("--base_steps")
    return place / "runs" / "shapes"


def test_the_conversion_begins_where_the_base_ended(shapes):
    base, conversion = measured(shapes / "base"), measured(shapes)
    for name in ("loss", "accuracy"):
        assert conversion[f"before_{name}"] == base[f"after_{name}"]
    assert conversion["after_loss"] != conversion["before_loss"]
    assert type(AutoModelForImageClassification.from_pretrained(shapes / "base")) is ViTForImageClassification
    model = AutoModelForImageClassification.from_pretrained(shapes)
    assert type(model) is HCViTForImageClassification
    assert tuple(model.config.id2label.values()) == SHAPES
    assert any(block.attn_hc.static_beta.ne(1).any() for block in model.vit.layers)
    assert (shapes / "figures" / "connections.png").stat().st_size > 5000


def test_what_it_drew_is_studied(shapes):
    for name, (picture, _) in zip(("cat", "dog"), draw_shapes(2, 40), strict=True):
        picture.save(f"{name}.png")
    exec(snippet("AutoImageProcessor"), {})
    assert Path("connections.png").stat().st_size > 5000


def test_images_of_ones_own(shapes):
    """With a model of other classes, whose head is new, and without hyper-connections."""
    for part, number in (("train", 24), ("test", 8)):
        for place, (picture, label) in enumerate(draw_shapes(number, 20)):
            folder = Path("cifar10", part, SHAPES[label % 2])
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{place}.png")
    model = {"google/vit-base-patch16-224": str(shapes / "base")}
    assert run("runs/cifar10", **model)["after_accuracy"] in {part / 8 for part in range(9)}
    tensors = load_file("runs/cifar10/model.safetensors")
    assert tensors["classifier.weight"].shape == (2, 32)
    assert any("attn_hc" in name for name in tensors)
    run("runs/cifar10", "--connection", "none", **model)
    assert not any("_hc" in name for name in load_file("runs/cifar10/model.safetensors"))


def test_a_tenth_is_held_out_and_folders_are_required(place):
    classes, training, held_out = load_images(Settings(drawn=80))
    assert (classes, len(training), len(held_out)) == (list(SHAPES), 72, 8)
    assert sorted(label for _, label in held_out) == [0, 0, 1, 1, 2, 2, 3, 3]
    Path("flat").mkdir()
    with pytest.raises(ValueError, match="flat has 0 sub-folders with images .* Give a folder with a sub-folder"):
        find_images("flat")
    for folder in ("one/a", "one/b", "two/a", "two/c"):
        Path(folder).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(Path(folder, "0.png"))
    with pytest.raises(ValueError, match="two has the classes a, c, but the training images have a, b"):
        load_images(Settings(images="one", held_out_images="two"))


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (["--connection", "dch"], "connection must be 'shc', 'dhc'"),
        (["--hc_mult", "0"], "hc_mult must be a whole number, at least 1"),
        (["--images", "nowhere"], "nowhere has 0 sub-folders with images"),
        (["--model", "nowhere"], "(find them|nowhere)"),
        (["--sizes", "3"], "not used by the HfArgumentParser"),
    ],
)
def test_what_it_refuses_before_a_base_is_trained(place, added, message):
    with pytest.raises(SystemExit, match=f"(?s)^error: .*{message}"):
        main(["--output_dir", "refused", *SMALL, *added])
    assert not Path("refused").exists()


def test_a_pipeline_of_diffusers(place):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 32, "patch_size": 8}
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=2, latent_channels=4, **blocks)
    transformer = DiTTransformer2DModel(in_channels=4, out_channels=8, **sizes)
    DiTPipeline(transformer, vae, DDPMScheduler()).save_pretrained("base")
    hub = "facebook/DiT-XL-2-256"
    trained, loaded = {}, {}
    exec(snippet("hc_param_groups").replace(hub, "base"), trained)
    exec(snippet("load_hc").replace(hub, "base"), loaded)
    ours, theirs = trained["model"].state_dict(), loaded["again"].transformer.state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    connections = loaded["pipeline"].transformer.state_dict()
    moved = [name for name, value in ours.items() if "_hc." in name and value.ne(value.round()).any()]
    assert moved
    assert all(torch.equal(connections[name], ours[name]) for name in moved)
