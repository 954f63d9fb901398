"""From norms to clip factors, and the arithmetic that all engines share."""

from __future__ import annotations

import torch
from torch import Tensor

SLACK = 4e-6
"""Relative room below the clip norm for rounding of norm and sum in float32."""
COARSE_SLACK = 1e-3
"""The same where products are taken in TF32, whose operands carry 11 bits."""


def slack(device: torch.device) -> float:
    """Room below the clip norm, as a part of it, that covers the rounding of the products on `device`."""
    if device.type != "cuda":
        return SLACK
    return COARSE_SLACK if torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32 else SLACK


def clip_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """What each record's gradient is multiplied with: at most 1; 0 where the norm is not finite.

    Guarantee: factor × norm is below `clip_norm`, with room for the rounding of the product.
    """
    bound = clip_norm * (1 - slack(norms.device))
    return torch.where(torch.isfinite(norms), (bound / norms).clamp(max=1.0), torch.zeros_like(norms))


def finite_or_infinite(squares: Tensor) -> Tensor:
    """Norms from their squares; infinite where the square is not a finite number."""
    norms = squares.clamp(min=0).sqrt()
    return torch.where(torch.isfinite(norms), norms, torch.full_like(norms, float("inf")))
