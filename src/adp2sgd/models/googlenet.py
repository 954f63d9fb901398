"""GoogLeNet (Szegedy et al., 2015) for 32×32 images, with norms and without the side classifiers."""

from __future__ import annotations

from torch import nn

from adp2sgd.models.blocks import ImageClassifier, Parallel, conv_norm

# Widths of the branches: 1×1 | 1×1 before 3×3, 3×3 | 1×1 before 5×5, 5×5 | 1×1 after pooling.
Widths = tuple[int, int, int, int, int, int]
STAGES: tuple[tuple[Widths, ...], ...] = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


def googlenet(*, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Module:
    """Nine inception modules behind a 3×3 stem of 192 channels; 6,166,250 parameters."""
    layers: list[nn.Module] = [conv_norm(channels, 192, norm=norm, bias=True)]
    inputs = 192
    for number, stage in enumerate(STAGES):
        if number:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        for widths in stage:
            layers.append(_inception(inputs, widths, norm))
            inputs = widths[0] + widths[2] + widths[4] + widths[5]
    return ImageClassifier(layers, inputs, classes)


def _inception(inputs: int, widths: Widths, norm: str) -> nn.Module:
    """Four branches side by side; the 5×5 one is two 3×3 convolutions in a row."""
    one, before_three, three, before_five, five, pooled = widths

    def conv(inputs: int, outputs: int, kernel: int) -> nn.Module:
        return conv_norm(inputs, outputs, kernel, norm=norm, bias=True)

    return Parallel(
        [
            conv(inputs, one, 1),
            nn.Sequential(conv(inputs, before_three, 1), conv(before_three, three, 3)),
            nn.Sequential(conv(inputs, before_five, 1), conv(before_five, five, 3), conv(five, five, 3)),
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv(inputs, pooled, 1)),
        ]
    )
