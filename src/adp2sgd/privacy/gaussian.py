"""ε of the Gaussian mechanism without sampling, in closed form (Balle and Wang 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass

ROUNDING = 1e-9  # the relative error of the root, at least


@dataclass(frozen=True)
class Bracket:
    """`lower` ≤ ε ≤ `upper`; they differ by the rounding of the computation alone."""

    lower: float
    upper: float


def gaussian_epsilon(sigma: float, delta: float) -> Bracket:
    """ε at `delta` of one Gaussian with noise `sigma` on a sum that one record moves by 1.

    The ε sought is the root of `gaussian_delta`, which falls with ε. As δ(ε) ≤ Φ(1/2σ − εσ), the ε at which the right
    side is δ bounds it from above.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    mean = 1 / sigma  # the privacy loss is N(mean²/2, mean²)
    highest = mean * (mean / 2 - float(ndtri(delta)))
    if highest <= 0 or gaussian_delta(0.0, sigma) <= delta:
        return Bracket(0.0, 0.0)
    if gaussian_delta(highest, sigma) >= delta * (1 - ROUNDING):
        return Bracket(highest * (1 - ROUNDING), highest * (1 + ROUNDING))

    def excess(epsilon: float) -> float:
        found = gaussian_delta(epsilon, sigma)
        return math.log(found / delta) if found > 0 else -700.0

    root = float(brentq(excess, 0.0, highest, xtol=1e-300, rtol=1e-12))
    slack = max(ROUNDING, 1e-14 * sigma)  # with much noise the two terms of δ nearly cancel
    return Bracket(root * (1 - slack), root * (1 + slack))


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """δ(ε) = Φ(a) − exp(ε)·Φ(b), where a = 1/2σ − εσ and b = −1/2σ − εσ.

    Let φ be the normal density. As exp(ε)·φ(b) = φ(a), the second term is φ(a)·Φ(b)/φ(b), which neither overflows nor
    loses digits. The same form serves the first term where a is negative.
    """
    from scipy.special import erfcx, ndtr

    a, b = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
    root = math.sqrt(0.5)
    if a < 0:
        return 0.5 * math.exp(-(a**2) / 2) * float(erfcx(-a * root) - erfcx(-b * root))
    return float(ndtr(a)) - 0.5 * math.exp(-(a**2) / 2) * float(erfcx(-b * root))
