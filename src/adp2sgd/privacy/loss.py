"""Privacy loss distributions: what one output says against a data set, as chances on a grid, added up over all steps.

Every answer is an upper bound, whatever the grid. The method is dp-accounting's, and the tests hold its answers and
Opacus' against ours where they can be trusted. It is written out here for what dp-accounting 0.6 gets wrong within the
range that we promise: a fixed grid (ε of .035 instead of .0044 at rate 1e-4, noise 50, 1e6 steps), and rounding in its
tables and transforms that a million steps raise (9 % too little ε at rate 1e-4, noise 1, δ = 1e-12); see
benchmarks/accountant.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Part = tuple[float, float, int]
"""(noise multiplier, sample rate, steps)."""

TOLERANCE = 2e-3  # the grid is refined until ε moves by less than this share
REACH = 10.0  # standard deviations of noise that a table covers
BEYOND = 1.6e-23  # chance per step of more, counted as certain loss
MOST_POINTS = 1 << 26  # of a composed distribution: a few GiB


class TooLongError(Exception):
    """The composed distribution would not fit into memory."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """An upper bound on ε; `settled` when the last refinement of the grid moved it by less than 0.2 %."""

    epsilon: float
    settled: bool


def epsilon_on_grids(parts: tuple[Part, ...], delta: float, *, replace: bool) -> Settled:
    """ε of all `parts` together, when a record is added or removed, or with `replace` changed for another one.

    Raises `TooLongError` where not even the first grid fits into memory; a finer one that does not is left out.
    """
    changes = ("replace",) if replace else ("remove", "add")

    def on_grid(spacing: float) -> float:
        with np.errstate(all="ignore"):
            return max(_composed(parts, spacing, delta, change) for change in changes)

    spacing = _spacing(parts) * (2 if replace else 1)
    best = on_grid(2 * spacing)
    for _ in range(5):
        try:
            finer = on_grid(spacing)
        except TooLongError:
            break
        moved, best = abs(best - finer), min(best, finer)  # both are upper bounds, so the smaller one stands
        if moved <= TOLERANCE * finer + 1e-8:
            return Settled(epsilon=best, settled=True)
        spacing /= 2
    return Settled(epsilon=best, settled=False)


def log_ratio(noise: float, rate: float, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """ln of (1 − rate)·N(0) + rate·N(1) over N(0) at `x`, where both have standard deviation `noise`."""
    tilt = (2 * x - 1) / (2 * noise**2)
    if rate == 1:
        return tilt
    return np.asarray(np.logaddexp(math.log1p(-rate), math.log(rate) + tilt))


def _spacing(parts: tuple[Part, ...]) -> float:
    """A grid that is fine against one step's spread of privacy loss, and that two seconds can pay for.

    Rounding to a grid adds about spacing²/6 to a step's variance, so ε grows by a share of 1/(12·points²) with that
    many points per standard deviation: .02 % at 20 points. Finer than 128 is not needed; the other limits are the
    length of one step's table and that of the composed one.
    """
    steps = sum(count for _, _, count in parts)
    variance, width = 0.0, 0.0
    for noise, rate, count in parts:
        x = np.linspace(-10 * noise, 10 * noise + 1, 4001)
        loss = log_ratio(noise, rate, x)
        chance = (1 - rate) * np.exp(-0.5 * (x / noise) ** 2) + rate * np.exp(-0.5 * ((x - 1) / noise) ** 2)
        chance /= chance.sum()
        variance += count * float(chance @ loss**2 - (chance @ loss) ** 2)
        width = max(width, float(loss[-1] - loss[0]))
    spread = math.sqrt(max(variance / steps, 1e-28))
    points = min(128.0, 4e4 * spread / width, 2e4 / math.sqrt(steps))
    return float(2.0 ** math.floor(math.log2(spread / max(points, 16.0))))  # powers of two, so that tables are reused


def _composed(parts: tuple[Part, ...], spacing: float, delta: float, change: str) -> float:
    """ε of all steps together for one kind of change to the data.

    Tables are tilted by exp(tilt · loss) before their Fourier transforms are raised to the number of steps, and tilted
    back after: rounding errors are then relative to the tail that ε is read from, not to the whole distribution.
    """
    tables = [(_table(noise, rate, spacing, change), count) for noise, rate, count in parts]
    log_delta = math.log(delta - BEYOND * sum(count for _, count in tables))
    tilt = _best_tilt(tables, delta)
    while (found := _tilted_epsilon(tables, spacing, log_delta, tilt)) is None:
        tilt /= 4
    return found


def _tilted_epsilon(tables: list[tuple[_Table, int]], spacing: float, log_delta: float, tilt: float) -> float | None:
    """ε read from the tilted sum of all losses; None where it lies below the window that the tilt looks at."""
    from scipy.signal import fftconvolve

    first, sums = _repeated(*tables[0], tilt, spacing)
    for table, count in tables[1:]:
        more, factor = _repeated(table, count, tilt, spacing)
        first, sums = first + more, fftconvolve(sums, factor)
    losses = np.asarray(spacing * (first + np.arange(len(sums))), dtype=np.float64)
    found = _epsilon_at(losses, sums, tilt, log_delta - sum(count * table.cumulant(tilt) for table, count in tables))
    return None if found == losses[0] and tilt > 1e-6 else found


def _repeated(table: _Table, count: int, tilt: float, spacing: float) -> tuple[int, NDArray[np.float64]]:
    """The tilted distribution of the sum of `count` losses: its first grid point, and chances from there on.

    The transform wraps what lies outside its window; Chernoff's bound makes that at most 1e-12 of the mass.
    """
    from scipy.fft import irfft, next_fast_len, rfft

    cumulant = table.cumulant(tilt)
    weights = np.exp(table.logs + tilt * table.losses - cumulant)
    mean = float(weights @ table.losses)
    spread = math.sqrt(count * float(weights @ (table.losses - mean) ** 2)) + spacing

    def bound(slope: float) -> float:
        return (count * (table.cumulant(tilt + slope) - cumulant) + math.log(2e12)) / slope

    high = min(bound(slope / spread) for slope in (1, 2, 4, 8))
    low = max(bound(-slope / spread) for slope in (1, 2, 4, 8))
    points = max((high - low) / spacing + 3, len(weights))
    if not points <= MOST_POINTS:
        raise TooLongError
    size = next_fast_len(math.ceil(points), real=True)
    first = math.floor(low / spacing)
    sums = irfft(rfft(weights, size) ** count, size)
    return first, np.roll(sums, count * table.first - first)


def _best_tilt(tables: list[tuple[_Table, int]], delta: float) -> float:
    """The tilt that centres the composed distribution near the ε sought: where Chernoff's bound on ε is smallest."""
    from scipy.optimize import minimize_scalar

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return float(sum(count * table.cumulant(tilt) for table, count in tables) - math.log(delta)) / tilt

    return math.exp(float(minimize_scalar(bound, bounds=(-8.0, 14.0), method="bounded", options={"xatol": 0.05}).x))


def _epsilon_at(losses: NDArray[np.float64], tilted: NDArray[np.float64], tilt: float, log_target: float) -> float:
    """The least ε ≥ 0 with Σ chance·(1 − exp(ε − loss))₊ ≤ exp(log_target), where chance = tilted·exp(−tilt·loss)."""
    centre = float(losses[np.argmax(tilted)])
    # Far above the centre nothing is left after tilting back; far below, numbers would overflow.
    bottom = max(losses[0] - losses[1], centre - 600 / max(tilt, 1.0))
    kept = (losses >= bottom) & (losses <= centre + 50 / tilt)
    away = losses[kept] - centre
    chance = np.maximum(tilted[kept], 0.0) * np.exp(-tilt * away)
    target = math.exp(log_target + tilt * centre)
    above = np.cumsum(chance[::-1])[::-1]
    shrunk = np.cumsum((chance * np.exp(-away))[::-1])[::-1]
    exceeding = np.flatnonzero(above - np.exp(away) * shrunk > target)
    if not len(exceeding):
        return max(0.0, float(losses[kept][0])) if kept.any() else 0.0
    i = int(exceeding[-1]) + 1
    if i == len(above):
        return math.inf
    return max(0.0, centre + math.log((above[i] - target) / shrunk[i]))


@dataclass(frozen=True, eq=False)
class _Table:
    """Chances of one step's privacy loss at `spacing` · (`first`, `first` + 1, …); BEYOND more may be infinite."""

    first: int
    losses: NDArray[np.float64]
    logs: NDArray[np.float64]

    def cumulant(self, tilt: float) -> float:
        """ln E[exp(tilt · loss)]."""
        exponent = self.logs + tilt * self.losses
        peak = float(exponent.max())
        return peak + math.log(float(np.exp(exponent - peak).sum()))


@lru_cache(maxsize=8)
def _table(noise: float, rate: float, spacing: float, change: str) -> _Table:
    """One step's privacy loss on a grid; ε computed from it can only grow.

    Between two grid points the loss is split so that total mass and E[exp(−loss)] stay ("connect the dots", Doroshenko
    et al. 2022). Masses come from the nearer tail and their differences are of order `rate`, so that rounding errors
    stay small when a million steps add them up.
    """
    ends = np.array([-REACH * noise - (change == "replace"), REACH * noise + 1])
    low, high = sorted(_loss_of(change, noise, rate, ends))
    first = math.floor(low / spacing)
    losses = spacing * np.arange(first, math.ceil(high / spacing) + 1)
    inside, excess = _cells(change, noise, rate, losses)
    upper = np.clip(excess / -math.expm1(-spacing), 0, inside)
    chances = np.append(inside - upper, 0.0)
    chances[1:] += upper
    chances[0] += max(0.0, 1 - float(chances.sum()))  # losses below the grid move up to it
    return _Table(first=first, losses=losses, logs=np.log(chances))


def _cells(
    change: str, noise: float, rate: float, losses: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each cell between two losses: its probability, and by how much that exceeds exp(lower end) times the
    probability under the other data set."""
    from scipy.special import ndtr

    x = _where(change, noise, rate, losses)
    a, b = np.minimum(x[:-1], x[1:]), np.maximum(x[:-1], x[1:])

    def mass(centre: float) -> NDArray[np.float64]:
        left, right = (a - centre) / noise, (b - centre) / noise
        return np.asarray(np.where(left > 0, ndtr(-left) - ndtr(-right), ndtr(right) - ndtr(left)))

    absent, present = mass(0.0), mass(1.0)
    growth, rise = np.exp(losses[:-1]), np.expm1(losses[:-1])
    sampled = (1 - rate) * absent + rate * present
    if change == "remove":
        return sampled, rate * present - (rise + rate) * absent
    if change == "add":
        return absent, (rate * growth - rise) * absent - rate * growth * present
    return sampled, rate * present - (1 - rate) * rise * absent - rate * growth * mass(-1.0)


def _loss_of(change: str, noise: float, rate: float, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Privacy loss at output `x` when one record is removed, added or replaced."""
    if change == "replace":
        return log_ratio(noise, rate, x) - log_ratio(noise, rate, -x)
    return log_ratio(noise, rate, x) if change == "remove" else -log_ratio(noise, rate, x)


def _where(change: str, noise: float, rate: float, loss: NDArray[np.float64]) -> NDArray[np.float64]:
    """The output at which the privacy loss is `loss`: the inverse of `_loss_of`; infinite where none is."""
    if change == "replace":
        ratio = (1 - rate) / rate * math.exp(0.5 / noise**2)
        return np.asarray(noise**2 * (loss / 2 + np.arcsinh(ratio * np.sinh(loss / 2))))
    gain = np.expm1(loss if change == "remove" else -loss) / rate
    return np.asarray(0.5 + noise**2 * np.log1p(np.maximum(gain, -1.0)))
