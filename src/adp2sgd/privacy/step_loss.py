"""The privacy loss of one sampled Gaussian step, rounded to a grid so that ε can only grow.

An output is a number v. P is its distribution with the record, Q the one without (or the other way round), and the
privacy loss is L(v) = ln P(v)/Q(v). The outputs are written so that L rises with v:

    remove   P = (1 − q)·N(0, z²) + q·N(1, z²)   Q = N(0, z²)                        L(v) = R(v)
    add      P = N(0, z²)                        Q = (1 − q)·N(0, z²) + q·N(−1, z²)  L(v) = −R(−v)
    replace  P = (1 − q)·N(0, z²) + q·N(1, z²)   Q = (1 − q)·N(0, z²) + q·N(−1, z²)  L(v) = R(v) − R(−v)

with R(v) = ln(1 − q + q·exp((2v − 1) / 2z²)).

Rounding ("connect the dots", Doroshenko et al. 2022): a loss L between the grid points a and a + h becomes a + h with
probability (1 − exp(a − L)) / (1 − exp(−h)), else a. So E[exp(−rounded)] = exp(−L). As x ↦ max(0, 1 − x) is convex,
Jensen's inequality shows that rounding one step, whatever the others do, never lowers δ(ε).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

REMOVE, ADD, REPLACE = "remove", "add", "replace"
DOUBT = 1e-12
"""Bounds what floating point does to a table: a factor 1 ± DOUBT on each chance, ± DOUBT · `Table.reach` on each loss.

The chances are sums of positive terms, each good to about 100 units of rounding (1e-14), by a quadrature with a relative
error below 1e-13; the ends of cells are good to 20 units of rounding. tests/test_accountant.py compares with mpmath.
"""


@dataclass(frozen=True, eq=False)
class Table:
    """Chances of one step's rounded loss at `losses` = spacing · (`first`, `first` + 1, …).

    `logs` are their logarithms. `splits` are the logarithms of up · down / (up + down) for the cell above each grid
    point, whose mass is rounded up with chance `up` in all and down with chance `down`.
    """

    first: int
    losses: Array
    logs: Array
    splits: Array
    infinite: float
    folded: float

    @property
    def reach(self) -> float:
        """The largest absolute loss."""
        return float(max(-self.losses[0], self.losses[-1]))

    def cumulant(self, tilt: float) -> float:
        """ln E[exp(tilt · loss)]."""
        exponent = self.logs + tilt * self.losses
        peak = float(exponent.max())
        return peak + math.log(float(np.exp(exponent - peak).sum()))


def log_ratio(noise: float, rate: float, x: Array) -> Array:
    """R(x): ln of (1 − rate)·N(0) + rate·N(1) over N(0) at `x`, where both have standard deviation `noise`."""
    tilt = (2 * x - 1) / (2 * noise**2)
    return np.asarray(np.where(tilt < 500, np.log1p(rate * np.expm1(np.minimum(tilt, 500))), tilt + math.log(rate)))


def extent(change: str, noise: float, rate: float, tail: float) -> tuple[float, float]:
    """Outputs below and above which P has at most `tail` each."""
    from scipy.special import ndtri

    far = -noise * float(ndtri(tail / 2))
    return -far, far if change == ADD else max(far, 1 - noise * float(ndtri(min(0.5, tail / (2 * rate)))))


def loss_at(change: str, noise: float, rate: float, v: Array) -> Array:
    """L at outputs `v`."""
    if change == REMOVE:
        return log_ratio(noise, rate, v)
    other = log_ratio(noise, rate, -v)
    return -other if change == ADD else log_ratio(noise, rate, v) - other


@lru_cache(maxsize=16)
def table(change: str, noise: float, rate: float, spacing: float, top: float, tail: float) -> Table:
    """One step's loss on a grid up to `top` or a little above.

    Losses above the grid are rounded to its last point or to infinity, by the same rule. At most `tail` of P is left
    out at the upper end. At most `tail` lies below the grid: so much is added at its lowest point.
    """
    low, high = extent(change, noise, rate, tail)
    ends = loss_at(change, noise, rate, np.array([low, high]))
    first = math.floor(ends[0] / spacing)
    losses = spacing * np.arange(first, max(first + 1, math.ceil(min(top, ends[1]) / spacing)) + 1)
    edges = np.append(np.clip(_output_at(change, noise, rate, losses), low, high), high)
    edges[0] = low
    edges = np.maximum.accumulate(edges)
    gained = np.where(edges[:-1] > low, 0.0, ends[0] - losses)  # loss at the lower edge of a cell, above its grid point
    widths = np.append(np.full(len(losses) - 1, spacing), math.inf)
    up, down = _rounded(change, noise, rate, edges, gained, widths)
    chances = down.copy()
    chances[1:] += up[:-1]
    chances[0] += tail
    splits = (up * (down / np.maximum(up + down, 1e-300)))[:-1]
    with np.errstate(divide="ignore"):
        logs, splits = np.log(chances), np.log(splits)
    return Table(first=first, losses=losses, logs=logs, splits=splits, infinite=float(up[-1]), folded=float(down[-1]))


def _rounded(
    change: str, noise: float, rate: float, edges: Array, gained: Array, widths: Array
) -> tuple[Array, Array]:
    """Of each cell between two `edges`: the mass that is rounded up, and the mass that is rounded down.

    Gauss-Legendre quadrature with 8 nodes on panels of a quarter of a standard deviation at most. In a cell, losses are
    computed as differences from its lower edge, so that nothing cancels however narrow it is.
    """
    cuts = np.sort(np.concatenate([edges, np.arange(edges[0], edges[-1], min(noise / 4, 2 * noise**2))]))
    start, width = cuts[:-1], np.diff(cuts)
    cell = np.minimum(np.searchsorted(edges, start, side="right") - 1, len(edges) - 2)
    offset, above, spacing = start - edges[cell], gained[cell], widths[cell]
    present, absent = _share(noise, rate, edges)[cell], _share(noise, rate, -edges)[cell]
    ups, downs = np.zeros_like(start), np.zeros_like(start)
    for node, weight in zip(*np.polynomial.legendre.leggauss(8), strict=True):
        inside = (node + 1) / 2 * width
        away = (offset + inside) / noise**2
        rise = above.copy()
        if change != ADD:
            rise += np.log1p(present * np.expm1(away))
        if change != REMOVE:
            rise -= np.log1p(absent * np.expm1(-away))
        chance = weight / 2 * width * _density(change, noise, rate, start + inside)
        ups += chance * np.clip(np.expm1(-rise) / np.expm1(-spacing), 0, 1)
        downs += chance * np.clip(np.exp(-rise) * np.expm1(rise - spacing) / np.expm1(-spacing), 0, 1)
    return np.bincount(cell, ups, len(edges) - 1), np.bincount(cell, downs, len(edges) - 1)


def _density(change: str, noise: float, rate: float, v: Array) -> Array:
    """Of P at outputs `v`."""
    scale = 1 / (noise * math.sqrt(2 * math.pi))
    absent = scale * np.exp(-0.5 * (v / noise) ** 2)
    return absent if change == ADD else (1 - rate) * absent + rate * scale * np.exp(-0.5 * ((v - 1) / noise) ** 2)


def _share(noise: float, rate: float, x: Array) -> Array:
    """The share of q·N(1) in (1 − q)·N(0) + q·N(1) at `x`: how fast R grows there, times the variance of the noise."""
    from scipy.special import expit, logit

    return np.asarray(expit((2 * x - 1) / (2 * noise**2) + logit(rate)))


def _output_at(change: str, noise: float, rate: float, loss: Array) -> Array:
    """The output v with L(v) = `loss`; infinite where there is none."""
    if change == REPLACE:
        ratio = (1 - rate) / rate * math.exp(0.5 / noise**2)
        return np.asarray(noise**2 * (loss / 2 + np.arcsinh(ratio * np.sinh(loss / 2))))
    gain = np.expm1(loss if change == REMOVE else -loss) / rate
    with np.errstate(divide="ignore"):
        x = 0.5 + noise**2 * np.log1p(np.maximum(gain, -1.0))
    return np.asarray(x if change == REMOVE else -x)
