"""Images of the user's own: one folder per class, below one folder per site where there are sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adp2sgd.data.folder import Source, held_out, read_bytes
from adp2sgd.data.image_encoder import MODES, SUFFIXES, ImageEncoder, decode
from adp2sgd.data.records import Records, Units
from adp2sgd.errors import DataError


@dataclass(frozen=True)
class Normalize:
    """uint8 images [n, channels, h, w] → float32, (x / 255 − mean) / std per channel, with public constants."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        scale, shift = _affine(self.mean, self.std, images.device)
        return torch.addcmul(shift, images.float(), scale)


@lru_cache(maxsize=64)
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """x ↦ scale·x + shift. Kept on the device: a copy per batch would make the GPU wait for the host."""
    scale = torch.tensor([1 / (255 * s) for s in std], device=device).view(-1, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).view(-1, 1, 1)
    return scale, shift


@dataclass(frozen=True)
class _Image:
    path: Path
    label: str
    site: str
    unit: str
    test: bool | None  # None: to be decided by the content


def load(
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    sites: bool = False,
    unit: str | None = None,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    test_fraction: float = 0.25,
) -> Source:
    """PNG and JPEG files from FOLDER/[train|test/][site/]class/[unit/], uint8 [n, channels, height, width].

    Without train and test folders a file is held out by a hash of its content. Class indices follow `classes`; where
    they are not declared, the class folders that hold an image are taken, and `fitted` says so. All images have one
    shape, or `size` = (height, width) resizes them. `prepare` scales to [−1, 1].
    `unit` says what the folders below the classes stand for, such as "patient": images in folders of one name belong to
    one unit, are held out together, and a private run protects the unit as a whole.
    """
    if channels not in MODES:
        raise DataError(f"channels = {channels} is unknown; use one of {sorted(MODES)}")
    images = _list(Path(folder), sites, unit)
    names = list(classes) if classes is not None else sorted({image.label for image in images})
    site_names = tuple(sorted({image.site for image in images}))
    for image in images:
        if image.label not in names:
            raise DataError(f"{image.path}: class folder {image.label!r} is not in {names}; rename it or add the class")
    pixels, test = _read(images, channels, size, test_fraction)
    units = None if unit is None else Units.named([image.unit for image in images], unit)
    if test.all() or not test.any():
        raise DataError(f"{folder} has no {'training' if test.all() else 'test'} image; add some or change the split")
    targets = torch.tensor([names.index(image.label) for image in images])
    owners = torch.tensor([site_names.index(image.site) for image in images]) if sites else None
    records = Records(pixels, targets, owners, site_names if sites else (), units)
    train, held = (records.take(rows.nonzero()[:, 0]) for rows in (~test, test))
    half = (0.5,) * channels
    fitted = "the names of the classes" if classes is None else None
    encoder = ImageEncoder(size=tuple(pixels.shape[2:]), channels=channels, classes=tuple(names))
    return Source(
        train=train, test=held, classes=len(names), prepare=Normalize(half, half), fitted=fitted, encoder=encoder
    )


def _refuse_divided(images: list[_Image], test: list[bool]) -> None:
    """Refuse a unit that has images in train and in test."""
    held: dict[str, bool] = {}
    for image, out in zip(images, test, strict=True):
        if image.unit and held.setdefault(image.unit, out) != out:
            raise DataError(f"{image.path}: its unit has images in both train and test; move them to one")


def _list(folder: Path, sites: bool, unit: str | None) -> list[_Image]:
    """Every image below `folder`, in the order of their paths."""
    if not folder.is_dir():
        raise DataError(f"image folder {folder} does not exist; create it or correct the path")
    split = (folder / "train").is_dir() and (folder / "test").is_dir()
    levels = [("train|test", split), ("site", sites), ("class", True), (unit or "", unit is not None), ("*.png", True)]
    layout = "/".join(name for name, there in levels if there)
    images = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES):
        parts = path.relative_to(folder).parts
        if len(parts) != layout.count("/") + 1:
            raise DataError(f"{path} does not fit the layout {folder}/{layout}; move it or correct `sites`, `unit`")
        *above, label = parts[: -2 if unit else -1]
        site, owner = above[-1] if sites else "", parts[-2] if unit else ""
        images.append(_Image(path, label, site, owner, parts[0] == "test" if split else None))
    if not images:
        raise DataError(f"{folder} holds no {' or '.join(SUFFIXES)} file; expected {folder}/{layout}")
    return images


def _read(
    images: list[_Image], channels: int, size: tuple[int, int] | None, test_fraction: float
) -> tuple[Tensor, Tensor]:
    """The pixels of all images, and which of them are held out."""
    pixels, test = [], []
    for image in images:
        content = read_bytes(image.path)
        pixels.append(decode(content, image.path, channels, size))
        told_by = image.unit.encode() or content
        test.append(held_out(told_by, test_fraction) if image.test is None else image.test)
        if pixels[-1].shape != pixels[0].shape:
            height, width = pixels[-1].shape[1:]
            usual = "×".join(map(str, pixels[0].shape[1:]))
            raise DataError(f"{image.path} is {height}×{width}, the images before {usual}; give size=(height, width)")
    _refuse_divided(images, test)
    return torch.from_numpy(np.stack(pixels)), torch.tensor(test)
