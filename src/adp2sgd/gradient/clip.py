"""From norms to clip factors: the arithmetic that all clippers share."""

from __future__ import annotations

import torch
from torch import Tensor

from adp2sgd.gradient.rounding import ROUNDINGS, Measured

SLACK = {torch.float32: 2.0**-21, torch.float64: 2.0**-40}
"""Room below the clip norm, as a part of it: eight roundings of the norm, the factor and the product."""
SUSPECT = 2.5e-4
"""Above this ratio of doubt to norm (terms a thousand times the gradient) every single rounding is allowed for."""
AT_ONCE = {"cpu": 128, "cuda": 1000}
"""Records summed in one product of the model's type; more are added up in float64. A GPU's sums are trees."""


FADES = 1e15
"""From this norm to twice of it a record's share falls from the clip norm to zero. Without it a share would jump to
zero where the norm overflows, and rounding, which depends on the size of the batch, would decide on which side."""


def effective_norms(measured: Measured) -> Tensor:
    """What the clip factors divide by [n]: the norms, and the doubt about each record's share of the sum.

    Guarantee: at least the norm of that share, where rounding is as `Measured` says.
    """
    norms = measured.squares.clamp(min=0).sqrt()
    if measured.doubt is None:
        return norms
    # Below SUSPECT roundings are no conspiracy; where a gradient is nearly all cancelled, weights may be made for it.
    suspicion = (measured.doubt / (SUSPECT * norms)).nan_to_num(0.0).clamp(max=1.0)
    return torch.addcmul(norms + measured.doubt, measured.doubt, suspicion, value=max(0, measured.terms) / ROUNDINGS)


def clip_factors(norms: Tensor, clip_norm: float | Tensor, dtype: torch.dtype) -> Tensor:
    """What each record's gradient is multiplied with: at most 1; 0 where the norm is above 2 · `FADES` or not
    finite.

    Guarantee: factor × norm is below `clip_norm`, with room for the rounding of the product.
    """
    # Over an infinite norm the quotient is 0, or no number where `clip_norm` is infinite as well.
    norms = norms.double()
    factors = (clip_norm * (1 - SLACK[dtype]) / norms).clamp_(max=1.0)
    return factors.mul_(torch.rsub(norms, 2.0, alpha=1 / FADES).clamp_(0.0, 1.0)).nan_to_num_(0.0).to(dtype)


def finite_or_infinite(squares: Tensor, dtype: torch.dtype) -> Tensor:
    """Norms from their squares; infinite where the norm is not a finite number of this type."""
    return squares.clamp(min=0).sqrt_().to(dtype).nan_to_num_(nan=float("inf"), posinf=float("inf"))
