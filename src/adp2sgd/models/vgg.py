"""VGG-19 (Simonyan and Zisserman, 2015) for 32×32 images, with norms and one linear layer."""

from __future__ import annotations

from torch import nn

from adp2sgd.models.blocks import ImageClassifier, conv_norm

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # width, convolutions; each stage ends by halving the image


def vgg19(*, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Module:
    """Sixteen biased 3×3 convolutions, each with norm and ReLU; 20,040,522 parameters."""
    layers: list[nn.Module] = []
    inputs = channels
    for width, convolutions in STAGES:
        for _ in range(convolutions):
            layers.append(conv_norm(inputs, width, norm=norm, bias=True))
            inputs = width
        # Rounding up changes nothing at 32×32 and lets smaller images (28×28) through all five stages.
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return ImageClassifier(layers, inputs, classes)
