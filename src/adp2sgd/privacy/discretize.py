"""The privacy loss of one sampled Gaussian step, rounded to a grid so that ε can only grow.

An output is a number v. P is its distribution on one data set and Q on the other; the privacy loss is
L(v) = ln P(v)/Q(v). Outputs are signed so that L rises with v:

    remove   P = (1 − q)·N(0, z²) + q·N(1, z²)   Q = N(0, z²)                        L(v) = R(v)
    add      P = N(0, z²)                        Q = (1 − q)·N(0, z²) + q·N(−1, z²)  L(v) = −R(−v)
    replace  P = (1 − q)·N(0, z²) + q·N(1, z²)   Q = (1 − q)·N(0, z²) + q·N(−1, z²)  L(v) = R(v) − R(−v)

with R(v) = ln(1 − q + q·exp((2v − 1) / 2z²)), sample rate q and noise multiplier z.

Rounding ("connect the dots", Doroshenko et al. 2022): a loss L between the grid points a and b becomes b with
probability (1 − exp(a − L)) / (1 − exp(a − b)), else a. Then E[exp(−rounded)] = exp(−L). As max(0, 1 − x) is convex,
Jensen's inequality shows that rounding one step never lowers δ(ε), whatever the other steps do. Above the last grid
point b is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

REMOVE, ADD, REPLACE = "remove", "add", "replace"
BLOCK = 1 << 17  # panels at a time, for the sake of memory
DOUBT = 1e-12
"""Bounds the effect of floating point on a table: a factor of 1 ± DOUBT on each chance and ± DOUBT · `reach` on each
loss. Chances are sums of positive terms with a relative error of about 1e-14 each; the quadrature adds less than 1e-12;
ends of cells are correct to 20 units of rounding. The tests compare with 50 digits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Chances of one step's rounded loss at `losses` = spacing · (`first`, `first` + 1, …), as logarithms `logs`.

    `splits` are the logarithms of up · down / (up + down) of each cell, where `up` of its mass is rounded up and `down`
    is rounded down. Of what lies above the grid, `folded` is rounded down to the last point and `infinite` up to an
    infinite loss; the latter is not in `logs`. What lies below the grid, `raised`, is moved to the first point.
    """

    first: int
    losses: Array
    logs: Array
    splits: Array
    folded: float
    infinite: float
    raised: float

    @property
    def reach(self) -> float:
        """The largest absolute loss."""
        return float(max(-self.losses[0], self.losses[-1]))

    def cumulant(self, tilt: float) -> float:
        """ln E[exp(tilt · loss)]."""
        exponent = self.logs + tilt * self.losses
        peak = float(exponent.max())
        return peak + math.log(float(np.exp(exponent - peak).sum()))

    def tilting(self, tilt: float) -> float:
        """By what factor tilting changes the chance of the lowest loss."""
        return math.exp(tilt * float(self.losses[0]) - self.cumulant(tilt))

    def tilted(self, tilt: float) -> Array:
        """Chances times exp(tilt · loss), divided by their sum."""
        return np.asarray(np.exp(self.logs + tilt * self.losses - self.cumulant(tilt)))


def extent(change: str, noise: float, rate: float, tail: float) -> tuple[float, float]:
    """Outputs below and above which P has at most `tail` each."""
    from scipy.special import ndtri

    far = -noise * float(ndtri(tail / 2))
    return -far, far if change == ADD else max(far, 1 - noise * float(ndtri(min(0.5, tail / (2 * rate)))))


def loss_range(change: str, noise: float, rate: float, tail: float) -> tuple[float, float]:
    """Losses below and above which P has at most `tail` each."""
    low, high = extent(change, noise, rate, tail)
    return _loss_at(change, noise, rate, low), _loss_at(change, noise, rate, high)


def table(change: str, noise: float, rate: float, spacing: float, top: float, bottom: float, tail: float) -> Table:
    """One step's loss on a grid from about −`bottom` to about `top`. At most `tail` of P is left out above."""
    low, high = extent(change, noise, rate, tail)
    least, most = loss_range(change, noise, rate, tail)
    if least < -bottom:
        low, least = float(_output_at(change, noise, rate, np.array([-bottom]))[0]), -bottom
    first = math.floor(least / spacing)
    last = max(first + 1, math.ceil(min(top, most) / spacing))
    losses = np.asarray(spacing * np.arange(first, last + 1), dtype=np.float64)
    edges = np.append(np.clip(_output_at(change, noise, rate, losses), low, high), high)
    edges[0] = low
    if losses[-1] >= most:
        edges[-2] = high  # nothing lies above the grid
    edges = np.maximum.accumulate(edges)
    gained = np.where(edges[:-1] > low, 0.0, np.expm1(least - losses))
    missed = np.where(edges[1:-1] < high, 0.0, np.expm1(most - losses[1:]))
    up, down = _rounded(change, noise, rate, edges, gained, np.append(missed, 0.0), spacing)
    chances = down.copy()
    chances[1:] += up[:-1]
    raised = _chance_below(change, noise, rate, low)
    chances[0] += raised
    with np.errstate(divide="ignore"):
        splits = np.log(up[:-1]) + np.log(down[:-1]) - np.log(np.maximum(up[:-1] + down[:-1], 1e-300))
        logs = np.log(chances)
    return Table(
        first=first,
        losses=losses,
        logs=logs,
        splits=splits,
        folded=float(down[-1]),
        infinite=float(up[-1]),
        raised=raised,
    )


def _rounded(
    change: str, noise: float, rate: float, edges: Array, gained: Array, missed: Array, spacing: float
) -> tuple[Array, Array]:
    """Of each cell between two `edges`: the mass that is rounded up, and the mass that is rounded down.

    Gauss-Legendre quadrature on panels of 1/128 of a standard deviation at most. With r = exp(L − a) − 1,
    s = 1 − exp(L − b) and w = 1 / (exp(b − a) − 1), the chance of b is r(1 + w)/(1 + r) and that of a is
    s(1 + w)/(1 + r). r and s are computed from the distances to the edges of the cell, so that nothing cancels.
    `gained` and `missed` are exp(L − a) − 1 at lower edges and exp(L − b) − 1 at upper ones: 0 but at both ends.
    """
    cuts = np.sort(np.concatenate([edges, np.arange(edges[0], edges[-1], min(noise / 128, noise**2 / 16))]))
    present, absent = _share(noise, rate, edges), _share(noise, rate, -edges)
    rest = _share(noise, rate, -edges, other=True)
    last = len(edges) - 2
    up, down = np.zeros(last + 1), np.zeros(last + 1)
    for begin in range(0, len(cuts) - 1, BLOCK):
        width = np.diff(cuts[begin : begin + BLOCK + 1])
        start = cuts[begin : begin + len(width)]
        cell = np.minimum(np.searchsorted(edges, start, side="right") - 1, last)
        weight_up = np.where(cell < last, 1 / -math.expm1(-spacing), 1.0)
        ups, downs = np.zeros_like(start), np.zeros_like(start)

        def rise(v: Array, edge: NDArray[np.int64], at_edge: Array) -> Array:
            """exp(L(v) − the grid point's loss) − 1, where that is `at_edge` at the edge."""
            away = np.clip((v - edges[edge]) / noise**2, -700, 700)
            risen = present[edge] * np.expm1(away) if change != ADD else 0.0
            if change != REMOVE:
                risen = (risen - absent[edge] * np.expm1(-away)) / (rest[edge] + absent[edge] * np.exp(-away))
            return np.asarray(risen + at_edge * (1 + risen))

        for node, weight in zip(*np.polynomial.legendre.leggauss(3), strict=True):
            v = start + (node + 1) / 2 * width
            above = rise(v, cell, gained[cell])
            chance = weight / 2 * width * _density(change, noise, rate, v) * weight_up / (1 + above)
            ups += chance * np.maximum(above, 0.0)
            downs += chance * np.where(cell < last, np.maximum(-rise(v, cell + 1, missed[cell]), 0.0), 1.0)
        cells = slice(cell[0], cell[-1] + 1)
        up[cells] += np.bincount(cell - cell[0], ups)
        down[cells] += np.bincount(cell - cell[0], downs)
    return up, down


def _density(change: str, noise: float, rate: float, v: Array) -> Array:
    """Of P at outputs `v`."""
    scale = 1 / (noise * math.sqrt(2 * math.pi))
    absent = scale * np.exp(-0.5 * (v / noise) ** 2)
    return absent if change == ADD else (1 - rate) * absent + rate * scale * np.exp(-0.5 * ((v - 1) / noise) ** 2)


def _chance_below(change: str, noise: float, rate: float, v: float) -> float:
    """Probability under P of an output below `v`."""
    from scipy.special import ndtr

    absent = float(ndtr(v / noise))
    return absent if change == ADD else (1 - rate) * absent + rate * float(ndtr((v - 1) / noise))


def _share(noise: float, rate: float, x: Array, *, other: bool = False) -> Array:
    """The share of q·N(1) in (1 − q)·N(0) + q·N(1) at `x`, or that of the `other` term."""
    from scipy.special import expit, logit

    odds = (2 * x - 1) / (2 * noise**2) + logit(rate)
    return np.asarray(expit(-odds if other else odds))


def log_ratio(noise: float, rate: float, x: float) -> float:
    """R(x)."""
    tilt = (2 * x - 1) / (2 * noise**2)
    return math.log1p(rate * math.expm1(tilt)) if tilt < 500 else tilt + math.log(rate)


def _loss_at(change: str, noise: float, rate: float, v: float) -> float:
    """L(v)."""
    if change == REMOVE:
        return log_ratio(noise, rate, v)
    other = log_ratio(noise, rate, -v)
    return -other if change == ADD else log_ratio(noise, rate, v) - other


def _output_at(change: str, noise: float, rate: float, loss: Array) -> Array:
    """The output v with L(v) = `loss`; infinite where there is none."""
    if change == REPLACE:
        ratio = (1 - rate) / rate * math.exp(0.5 / noise**2)
        return np.asarray(noise**2 * (loss / 2 + np.arcsinh(ratio * np.sinh(loss / 2))))
    gain = np.expm1(loss if change == REMOVE else -loss) / rate
    with np.errstate(divide="ignore"):
        x = 0.5 + noise**2 * np.log1p(np.maximum(gain, -1.0))
    return np.asarray(x if change == REMOVE else -x)
