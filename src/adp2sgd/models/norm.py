"""Normalization layers. BatchNorm mixes the records of a batch and so rules out privacy; GroupNorm does not."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from adp2sgd.errors import ConfigError

MOST_GROUPS = 32
SMALLEST_GROUP = 4


def group_count(channels: int) -> int:
    """The largest divisor of `channels` that is at most 32 and leaves at least 4 channels in a group; else 1.

    Four channels, because at 1×1 pixels a group of one channel would be normalized to a constant.
    Examples: 512 → 32, 116 → 29, 40 → 10, 24 → 6, 58 → 2, 3 → 1.
    """
    fitting = (g for g in range(MOST_GROUPS, 0, -1) if channels % g == 0 and channels // g >= SMALLEST_GROUP)
    return next(fitting, 1)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(group_count(channels), channels),
    "none": lambda channels: nn.Identity(),
}


def norm_layer(kind: str, channels: int) -> nn.Module:
    """A layer that normalizes `channels` feature maps; "batch" and "group" have the same number of parameters."""
    if kind not in NORMS:
        raise ConfigError(f"norm = {kind!r} is unknown; use one of {', '.join(NORMS)}")
    return NORMS[kind](channels)


def without_batchnorm(module: nn.Module) -> nn.Module:
    """A copy of `module` with GroupNorm in place of every BatchNorm, weights and biases kept, statistics dropped.

    Guarantee: no BatchNorm remains, so none of them makes one record's gradient depend on another record.
    A layer that occurs twice is replaced by one layer that occurs twice.
    """
    if any(isinstance(layer, LazyModuleMixin) for layer in module.modules()):
        raise ConfigError("the model has lazy layers, which have no width yet; run it once on an input before")
    replacements: dict[int, nn.Module] = {}
    return _replaced(copy.deepcopy(module), replacements)


def _replaced(module: nn.Module, replacements: dict[int, nn.Module]) -> nn.Module:
    if id(module) in replacements:
        return replacements[id(module)]
    replacements[id(module)] = new = _group_norm_like(module) if isinstance(module, _BatchNorm) else module
    for name, child in module._modules.items():  # not named_children(), which skips a child's second name
        if child is not None:
            new._modules[name] = _replaced(child, replacements)
    return new


def _group_norm_like(batch_norm: _BatchNorm) -> nn.GroupNorm:
    channels = batch_norm.num_features
    new = nn.GroupNorm(group_count(channels), channels, eps=batch_norm.eps, affine=batch_norm.affine)
    if batch_norm.affine:
        new.weight, new.bias = batch_norm.weight, batch_norm.bias
    return new.train(batch_norm.training)
