"""An image model's encoder: the size and the channels that it reads, and the names of its classes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adp2sgd.data.folder import read_bytes
from adp2sgd.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}  # channels → Pillow's name of the mode


@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """`size` is (height, width) in pixels. Images of another size are resized, as in training."""

    size: tuple[int, int]
    channels: int
    classes: tuple[str, ...]

    def encode(self, files: Sequence[str | Path]) -> Tensor:
        """uint8 [n, channels, height, width]."""
        pixels = [decode(read_bytes(Path(file)), Path(file), self.channels, self.size) for file in files]
        return torch.from_numpy(np.stack(pixels))

    def list(self, path: str | Path) -> list[Path]:
        """The image files at or below `path`, in the order of their paths."""
        path = Path(path)
        found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"{path} holds no {' or '.join(SUFFIXES)} file; give an image, or a folder of images")
        return found

    def targets(self, files: Sequence[Path]) -> Tensor:
        """By the name of each file's folder."""
        for file in files:
            if file.parent.name not in self.classes:
                raise DataError(
                    f"{file}: its folder is none of the classes {', '.join(self.classes)}; move it to that of its class"
                )
        return torch.tensor([self.classes.index(file.parent.name) for file in files])

    def decode(self, outputs: Tensor) -> list[str]:
        """The class that each row of outputs favours."""
        return [self.classes[place] for place in outputs.argmax(dim=-1).tolist()]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "images", **asdict(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ImageEncoder:
        height, width = raw["size"]
        return cls(
            size=(int(height), int(width)), channels=int(raw["channels"]), classes=tuple(map(str, raw["classes"]))
        )


def decode(content: bytes, path: Path, channels: int, size: tuple[int, int] | None) -> npt.NDArray[np.uint8]:
    """Pixels [channels, height, width]."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as opened:
            image = opened.convert(MODES[channels])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is damaged or no image ({type(error).__name__}); replace or remove it") from None
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
