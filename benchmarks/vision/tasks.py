"""The two tasks: how their models are built, what they lose on images, and how they are evaluated."""

from collections.abc import Iterator

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.pretraining.runs import Run
from benchmarks.pretraining.train import READOUT, divide_projections
from hf_hyperconn import HCViTConfig, HCViTForImageClassification, convert_model

from .images import Images
from .studies import Task, fields

EVALUATED_TOGETHER, SHOWN = 250, 50  # images
TIMES = 1000  # of the diffusion


class Classifying:
    """Images are told apart; in training half of them are mirrored."""

    def __init__(self, task: Task, images: Images):
        self.task, self.images = task, images

    def new(self, run: Run) -> nn.Module:
        """A model from scratch; with connections as the HC paper has it: output projections / √n, streams summed."""
        shape = {**self.task.shape, "num_labels": len(self.images.classes)}
        shape |= {"image_size": self.images.training[0].shape[-1], "num_channels": self.images.training[0].shape[1]}
        plain = ViTForImageClassification(ViTConfig(**shape))
        if (own := fields(run)) is None:
            return plain
        model = HCViTForImageClassification(HCViTConfig(**shape, **{**READOUT.get(own["connection"], {}), **own}))
        model.load_state_dict(plain.state_dict(), strict=False)
        divide_projections(model)
        return model

    def load(self, folder) -> nn.Module:
        """Return a plain model that was trained before."""
        return ViTForImageClassification.from_pretrained(folder)

    def loss(self, model: nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Cross entropy on the training images with these numbers, `[B]`."""
        pixels, labels = (part[chosen] for part in self.images.training)
        mirrored = torch.rand(len(chosen), 1, 1, 1) < 0.5
        pixels = torch.where(mirrored, pixels.flip(-1), pixels)
        return model(**self.inputs(pixels), labels=labels).loss

    def evaluate(self, model: nn.Module, number: int) -> dict[str, float]:
        """Held-out cross entropy, in nats, and the share of images whose class was found."""
        losses, right = 0.0, 0
        for pixels, labels in _some(self.images, number):
            logits = model(**self.inputs(pixels)).logits
            losses += F.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(-1) == labels).sum().item()
        return {"loss": losses / number, "accuracy": right / number}

    def inputs(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Images, uint8, as the model takes them."""
        return {"pixel_values": pixels.float() / 127.5 - 1}

    @property
    def shown(self) -> dict[str, torch.Tensor]:
        """Held-out images on which connections are looked at."""
        pixels, _ = next(_some(self.images, SHOWN))
        return self.inputs(pixels)


class Denoising:
    """Noise is told from images, given their class and how much of it there is (DDPM, epsilon)."""

    def __init__(self, task: Task, images: Images):
        self.task, self.images = task, images
        self.scheduler = DDPMScheduler(num_train_timesteps=TIMES)

    def new(self, run: Run) -> nn.Module:
        """A model from scratch, its gates and its output at zero as in the DiT paper; converted with connections."""
        height, channels = self.images.training[0].shape[-1], self.images.training[0].shape[1]
        sizes = {"sample_size": height, "in_channels": channels, "num_embeds_ada_norm": len(self.images.classes)}
        plain = DiTTransformer2DModel(**self.task.shape, **sizes)
        for module in (
            plain.proj_out_1,
            plain.proj_out_2,
            *(block.norm1.linear for block in plain.transformer_blocks),
        ):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        return plain if fields(run) is None else convert_model(plain, **fields(run))

    def loss(self, model: nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return mean squared error on the training images with these numbers, `[B]`."""
        pixels, labels = (part[chosen] for part in self.images.training)
        return self._error(model, pixels, labels).mean()

    def evaluate(self, model: nn.Module, number: int) -> dict[str, float]:
        """Held-out mean squared error, always with the same noise."""
        generator, errors = torch.Generator().manual_seed(0), 0.0
        for pixels, labels in _some(self.images, number):
            errors += self._error(model, pixels, labels, generator).mean((1, 2, 3)).sum().item()
        return {"loss": errors / number}

    def _error(
        self,
        model: nn.Module,
        pixels: torch.Tensor,
        labels: torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        inputs, noise = self._noisy(pixels, labels, generator)
        return (model(**inputs).sample - noise).square()

    def _noisy(
        self, pixels: torch.Tensor, labels: torch.Tensor, generator: torch.Generator | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Images, uint8, with noise, as the model takes them, and that noise."""
        noise = torch.randn(pixels.shape, generator=generator)
        times = torch.randint(0, TIMES, (len(pixels),), generator=generator)
        noisy = self.scheduler.add_noise(pixels.float() / 127.5 - 1, noise, times)
        return {"hidden_states": noisy, "timestep": times, "class_labels": labels}, noise

    @property
    def shown(self) -> dict[str, torch.Tensor]:
        """Held-out images on which connections are looked at."""
        pixels, labels = next(_some(self.images, SHOWN))
        return self._noisy(pixels, labels, torch.Generator().manual_seed(0))[0]


def _some(images: Images, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """That many held-out images, evenly from all, and their classes, in batches."""
    chosen = torch.arange(number) * len(images.held_out[1]) // number
    for part in chosen.split(EVALUATED_TOGETHER):
        yield tuple(tensor[part] for tensor in images.held_out)


KINDS = {"ViT": Classifying, "DiT": Denoising}
