"""Give an image classifier hyper-connections, train it further, and draw the reads of its sub-layers.

    python examples/image_classification.py --output_dir runs/shapes
    python examples/image_classification.py --images cifar10/train --held_out_images cifar10/test \\
        --model google/vit-base-patch16-224 --output_dir runs/cifar10

Without --images it classifies drawn shapes. Without --model it trains a small ViT first, and converts it. Settings are
the fields of `Recipe` and of Transformers' `TrainingArguments`. docs/vision.md describes a run.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from matplotlib import pyplot
from PIL import Image, ImageDraw
from torch.utils.data import Dataset, default_collate
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_hyperconn import HCTrainer, convert_model
from hf_hyperconn.analysis import plots
from hf_hyperconn.analysis.study import study
from hf_hyperconn.errors import HyperConnError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
SHAPES = ("circle", "cross", "square", "triangle")
ONE_IN = 10  # images is held out where no held-out images are given


@dataclass
class Recipe:
    """The model to train, its data and the settings of both."""

    images: str | None = field(default=None, metadata={"help": "A folder with a sub-folder of images for each class."})
    held_out_images: str | None = field(default=None, metadata={"help": "Another such folder, to evaluate on."})
    model: str | None = field(default=None, metadata={"help": "A base or a converted model: a folder or a Hub id."})
    connection: str = field(default="dhc", metadata={"help": "Kind of connection; none trains the base as it is."})
    hc_mult: int = field(default=2, metadata={"help": "Number of streams; the paper's ViTs have two."})
    hc_lr: float | None = field(default=None, metadata={"help": "Learning rate of the connections."})
    image_size: int = field(default=32, metadata={"help": "Of the small ViT."})
    patch_size: int = field(default=8, metadata={"help": "Of the small ViT."})
    hidden_size: int = field(default=64, metadata={"help": "Of the small ViT."})
    layers: int = field(default=6, metadata={"help": "Of the small ViT."})
    base_steps: int = field(default=300, metadata={"help": "Steps of the small ViT before its conversion."})
    drawn: int = field(default=4000, metadata={"help": "Number of drawn shapes, where no images are given."})


class Pictures(Dataset):
    """Images, or files of images, each with the number of its class, as inputs of a model."""

    def __init__(self, pictures: Sequence[tuple[Image.Image | Path, int]], processor):
        self.pictures, self.processor = pictures, processor

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict:
        picture, label = self.pictures[index]
        picture = (Image.open(picture) if isinstance(picture, Path) else picture).convert("RGB")
        pixels = self.processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": label}


@contextmanager
def without_traceback() -> Iterator[None]:
    """End the script with one line of error where its settings, its model or its images are wrong."""
    try:
        yield
    except (OSError, ValueError, HyperConnError, StrictDataclassError) as error:
        raise SystemExit(f"error: {error}") from error


def find_images(folder: str) -> tuple[list[str], list[tuple[Path, int]]]:
    """Return the names of the sub-folders, and every image with the number of its sub-folder.

    Raises `ValueError` when fewer than two sub-folders contain images.
    """
    paths = sorted(path for path in Path(folder).glob("*/*") if path.suffix.lower() in ENDINGS)
    classes = sorted({path.parent.name for path in paths})
    if len(classes) < 2:
        raise ValueError(
            f"{folder} has {len(classes)} sub-folders with images ({', '.join(ENDINGS)}). Give a folder with a "
            f"sub-folder for each class, as the train/ of an extracted CIFAR-10."
        )
    return classes, [(path, classes.index(path.parent.name)) for path in paths]


def draw_shapes(number: int, size: int) -> list[tuple[Image.Image, int]]:
    """Draw bright shapes of any size and place on dark backgrounds, always the same ones."""
    draws, pictures = random.Random(0), []
    for index in range(number):
        dark, bright = (tuple(draws.randint(*ends) for _ in range(3)) for ends in ((0, 80), (160, 255)))
        picture = Image.new("RGB", (size, size), dark)
        radius = draws.uniform(size / 5, size / 3)
        x, y = (draws.uniform(radius, size - radius) for _ in range(2))
        box, pen = (x - radius, y - radius, x + radius, y + radius), ImageDraw.Draw(picture)
        match SHAPES[label := index % len(SHAPES)]:
            case "circle":
                pen.ellipse(box, bright)
            case "square":
                pen.rectangle(box, bright)
            case "triangle":
                pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], bright)
            case "cross":
                pen.line([(x - radius, y), (x + radius, y)], bright, round(radius / 2))
                pen.line([(x, y - radius), (x, y + radius)], bright, round(radius / 2))
        pictures.append((picture, label))
    return pictures


def load_images(recipe: Recipe) -> tuple[list[str], list, list]:
    """Return the names of the classes, and the images to train on and to evaluate on."""
    if recipe.images is None:
        classes, pictures = list(SHAPES), draw_shapes(recipe.drawn, recipe.image_size)
    else:
        classes, pictures = find_images(recipe.images)
    if recipe.held_out_images is None:
        places = range(len(pictures))
        held_out = [pictures[place] for place in places if place // len(classes) % ONE_IN == 0]
        return classes, [pictures[place] for place in places if place // len(classes) % ONE_IN], held_out
    others, held_out = find_images(recipe.held_out_images)
    if others != classes:
        raise ValueError(
            f"{recipe.held_out_images} has the classes {', '.join(others)}, but the training images have "
            f"{', '.join(classes)}. Give a folder with the same sub-folders."
        )
    return classes, pictures, held_out


def small_vit(recipe: Recipe, classes: list[str]) -> tuple[PreTrainedModel, ViTImageProcessor]:
    """Return a new ViT and its image processor."""
    config = ViTConfig(
        image_size=recipe.image_size,
        patch_size=recipe.patch_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=4 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=max(recipe.hidden_size // 32, 1),
        **labels(classes),
    )
    size = {"height": recipe.image_size, "width": recipe.image_size}
    return ViTForImageClassification(config), ViTImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def load_base(model: str, classes: list[str]) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """Return a trained model, with a new head if its classes differ, and its image processor."""
    loaded = AutoModelForImageClassification.from_pretrained(
        model, **labels(classes), ignore_mismatched_sizes=True, trust_remote_code=False
    )
    return loaded, AutoImageProcessor.from_pretrained(model)


def labels(classes: list[str]) -> dict:
    """Return the fields of a config that name the classes."""
    return {"id2label": dict(enumerate(classes)), "label2id": {name: place for place, name in enumerate(classes)}}


def accuracy(evaluated) -> dict[str, float]:
    """Return the share of images with the right class."""
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def draw(model: PreTrainedModel, pictures: Pictures, folder: Path) -> None:
    """Draw the unfolded matrices of the connections: the weights with which sub-layers read earlier ones."""
    some = [pictures[place] for place in range(0, len(pictures), max(len(pictures) // 64, 1))]
    inputs = {"pixel_values": default_collate([picture["pixel_values"] for picture in some])}
    folder.mkdir(parents=True, exist_ok=True)
    plots.connections_figure(study(model, [inputs]).matrices).savefig(folder / "connections.png", dpi=110)
    pyplot.close("all")


def main(arguments: list[str]) -> None:
    """Load or train a base, convert it, train it further, evaluate, save and draw."""
    with without_traceback():
        recipe, args = HfArgumentParser((Recipe, TrainingArguments)).parse_args_into_dataclasses(arguments)
        torch.manual_seed(args.seed)
        classes, training, held_out = load_images(recipe)
        base, processor = small_vit(recipe, classes) if recipe.model is None else load_base(recipe.model, classes)
        model = base
        if recipe.connection != "none" and not hasattr(base.config, "hc_mult"):
            # shares the weights of the base, so it learns with the base
            model = convert_model(base, hc_mult=recipe.hc_mult, connection=recipe.connection)
    training, held_out = Pictures(training, processor), Pictures(held_out, processor)
    data = {"train_dataset": training, "eval_dataset": held_out, "compute_metrics": accuracy}
    data["processing_class"] = processor
    if recipe.model is None:
        of_base = replace(args, output_dir=f"{args.output_dir}/base", max_steps=recipe.base_steps)
        train(Trainer(base, of_base, **data))
    train(HCTrainer(model, args, **data, hc_lr=recipe.hc_lr if hasattr(model.config, "hc_mult") else None))
    if hasattr(model.config, "hc_mult"):
        draw(model, held_out, Path(args.output_dir, "figures"))


def train(trainer: Trainer) -> None:
    """Train and save a model, and evaluate it before and after."""
    evaluate(trainer, "before")
    trainer.train()
    trainer.save_model()
    evaluate(trainer, "after")


def evaluate(trainer: Trainer, when: str) -> None:
    """Print the figures of a model on the held-out images, and save them in `all_results.json`."""
    metrics = trainer.evaluate(metric_key_prefix=when)
    trainer.log_metrics(when, metrics)
    trainer.save_metrics(when, metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
