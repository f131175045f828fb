"""Images to train on and images held out, from an archive or a folder: `train/CLASS/FILE` and `test/CLASS/FILE`."""

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image

ENDINGS = (".png", ".jpg", ".jpeg")
PARTS = ("train", "test")


@dataclass(frozen=True)
class Images:
    """Images `[T, C, H, W]` uint8, their classes `[T]`, and what identifies them.

    training, held_out: both, of either part.
    classes: their names.
    sha256: of all files with their names, in the order of these.
    """

    training: tuple[torch.Tensor, torch.Tensor]
    held_out: tuple[torch.Tensor, torch.Tensor]
    classes: tuple[str, ...]
    sha256: str

    def describe(self) -> dict:
        """What results record of the images they were obtained on."""
        counts = {"training": len(self.training[1]), "held_out": len(self.held_out[1])}
        return {**counts, "classes": len(self.classes), "sha256": self.sha256}


@cache
def read(place: Path) -> Images:
    """Return the images of a tar archive or a folder, in color unless all of them are grey.

    Raises `ValueError` when either part has none.
    """
    found: dict[str, list[tuple[str, np.ndarray]]] = {part: [] for part in PARTS}
    digest = hashlib.sha256()
    for name, content in sorted(_files(place)):
        digest.update(name.encode() + hashlib.sha256(content).digest())
        part, label, _ = PurePosixPath(name).parts
        found[part].append((label, np.asarray(Image.open(BytesIO(content)))))
    if missing := [part for part, images in found.items() if not images]:
        raise ValueError(
            f"{place} has no images in {missing[0]}/. Give an archive or a folder with train/CLASS/FILE and "
            f"test/CLASS/FILE, of {', '.join(ENDINGS)} files."
        )
    classes = tuple(sorted({label for images in found.values() for label, _ in images}))
    return Images(*(_tensors(found[part], classes) for part in PARTS), classes, digest.hexdigest())


def _files(place: Path) -> Iterator[tuple[str, bytes]]:
    """Name, from `train` or `test` on, and content of each image."""
    if place.is_dir():
        for path in place.rglob("*"):
            if name := _name(path.relative_to(place).parts):
                yield name, path.read_bytes()
        return
    with tarfile.open(place) as archive:
        for member in archive:
            if member.isfile() and (name := _name(PurePosixPath(member.name).parts)):
                yield name, archive.extractfile(member).read()


def _name(parts: tuple[str, ...]) -> str | None:
    *_, part, _, file = ("", "", *parts)
    return "/".join(parts[-3:]) if part in PARTS and file.lower().endswith(ENDINGS) else None


def _tensors(images: list[tuple[str, np.ndarray]], classes: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.from_numpy(np.stack([pixels for _, pixels in images]))
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return pixels, torch.tensor([classes.index(label) for label, _ in images])
