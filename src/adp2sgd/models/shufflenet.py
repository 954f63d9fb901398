"""ShuffleNet V2 ×1 (Ma et al., 2018) for 32×32 images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adp2sgd.models.blocks import ImageClassifier, conv_norm

STAGES = ((116, 4), (232, 8), (464, 4))  # width, blocks; the first block of a stage halves the image
LAST = 1024


def shufflenet(*, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Module:
    """Sixteen blocks that split, filter and shuffle the channels; 1,263,854 parameters."""
    layers: list[nn.Module] = [conv_norm(channels, 24, norm=norm)]
    inputs = 24
    for width, blocks in STAGES:
        layers.append(ShrinkingBlock(inputs, width, norm))
        layers.extend(SplitBlock(width, norm) for _ in range(blocks - 1))
        inputs = width
    layers.append(conv_norm(inputs, LAST, 1, norm=norm))
    return ImageClassifier(layers, LAST, classes)


class SplitBlock(nn.Module):
    """One half of the channels passes unchanged, the other is filtered; then the halves are shuffled."""

    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.branch = _branch(width // 2, width // 2, 1, norm)

    def forward(self, x: Tensor) -> Tensor:
        kept, filtered = x.chunk(2, dim=1)
        return _shuffled(kept, self.branch(filtered))


class ShrinkingBlock(nn.Module):
    """Two filtered versions of all channels at half the height and width, shuffled."""

    def __init__(self, inputs: int, width: int, norm: str) -> None:
        super().__init__()
        half = width // 2
        self.left = nn.Sequential(
            conv_norm(inputs, inputs, norm=norm, stride=2, groups=inputs, relu=False),
            conv_norm(inputs, half, 1, norm=norm),
        )
        self.right = _branch(inputs, half, 2, norm)

    def forward(self, x: Tensor) -> Tensor:
        return _shuffled(self.left(x), self.right(x))


def _branch(inputs: int, width: int, stride: int, norm: str) -> nn.Module:
    return nn.Sequential(
        conv_norm(inputs, width, 1, norm=norm),
        conv_norm(width, width, norm=norm, stride=stride, groups=width, relu=False),
        conv_norm(width, width, 1, norm=norm),
    )


def _shuffled(left: Tensor, right: Tensor) -> Tensor:
    """The channels of both in turn: joining and shuffling two groups, in one copy instead of two."""
    return torch.stack((left, right), dim=2).flatten(1, 2)
