"""Models for small images and tables, which learn in seconds on one core and well under privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from adp2sgd.errors import ConfigError
from adp2sgd.models.norm import norm_layer

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def logistic(*, inputs: int, classes: int) -> nn.Module:
    """Multinomial logistic regression: inputs × classes + classes parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def mlp(*, inputs: int, classes: int, hidden: Sequence[int] = (64,), activation: str = "tanh") -> nn.Module:
    """Linear layers of the widths in `hidden` and then `classes`, `activation` in between. Images are flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(inputs, width), _activation(activation)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def cnn(
    *,
    size: int = 8,
    channels: int = 1,
    classes: int = 10,
    widths: Sequence[int] = (),
    norm: str = "group",
    activation: str = "relu",
) -> nn.Module:
    """Per width a 3×3 convolution, norm and activation, 2×2 pooling in between; one linear layer on all pixels.

    `size` = height = width in pixels. Default widths 16, 32 up to 16 pixels, else 16, 32, 64: 10,026 parameters for
    8×8×1, 54,890 for 28×28×1, 64,778 for 32×32×3.
    """
    widths = widths or ((16, 32) if size <= 16 else (16, 32, 64))
    layers: list[nn.Module] = []
    pixels = size
    for number, width in enumerate(widths):
        if number:
            layers.append(nn.MaxPool2d(2))
            pixels //= 2
        layers += [nn.Conv2d(channels, width, 3, padding=1), norm_layer(norm, width), _activation(activation)]
        channels = width
    if not pixels:
        raise ConfigError(f"cnn: size = {size} is too small for {len(widths)} widths; give fewer widths")
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * pixels * pixels, classes))


def _activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation = {name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()
