"""The models: the paper's ten, WRN-16-4, and small ones. One file per family; `MODELS` maps names to constructors."""

from adp2sgd.models.norm import group_count, norm_layer, without_batchnorm
from adp2sgd.models.registry import MODELS, BuiltIn, ModelInfo, build, catalogue, describe, multiply_adds

__all__ = [
    "MODELS",
    "BuiltIn",
    "ModelInfo",
    "build",
    "catalogue",
    "describe",
    "group_count",
    "multiply_adds",
    "norm_layer",
    "without_batchnorm",
]
