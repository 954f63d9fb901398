"""ε of a mechanism: by privacy loss distributions (PLD, what is reported) or by Rényi divergences (RDP, beside it).

Both answers are upper bounds. PLD discretizes the privacy loss of one step so that ε can only grow, and composes it
exactly. The loss distributions are dp-accounting's; here are the choice of the grid, which its answers depend on, and
Rényi divergences at fractional orders, which it drops where its series does not converge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from adp2sgd.errors import ConfigError, PrivacyError
from adp2sgd.privacy.mechanism import Composed, Mechanism, SampledGaussian

ADD_REMOVE = "add-remove"
ADJACENCIES = (ADD_REMOVE, "replace-one")
GRID_TOLERANCE = 2e-3  # the grid is refined until ε moves by less than this share
LARGEST_PLD = 150.0  # in RDP's ε: above it nothing is protected, and RDP's bound says as much
MOST_PLD_STEPS = 10**7
REACH = 10.0  # standard deviations of noise that a table covers
BEYOND = 1.6e-23  # chance per step of more, counted as certain loss

Part = tuple[float, float, int]
"""(noise multiplier, accounted rate, steps)."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """(`epsilon`, `delta`), and the accountant that really answered; `note` says why where it is not the one asked."""

    epsilon: float
    delta: float
    accountant: str
    adjacency: str
    note: str = ""


def epsilon(
    mechanism: Mechanism, steps: int, delta: float | None, accountant: str = "pld", adjacency: str = ADD_REMOVE
) -> Spent:
    """ε after `steps` runs of `mechanism` on the same records.

    Guarantee: never below the true ε of the mechanism; a PLD answer lies within about 0.2 % above it.
    """
    if accountant not in _ACCOUNTANTS:
        raise ConfigError(f"accountant = {accountant!r} is unknown; use one of {', '.join(_ACCOUNTANTS)}")
    if adjacency not in ADJACENCIES:
        raise ConfigError(f"adjacency = {adjacency!r} is unknown; use one of {', '.join(ADJACENCIES)}")
    if steps != int(steps) or steps < 0:
        raise ConfigError(f"steps = {steps} is no count; use a whole number from 0 on")
    if not isinstance(mechanism, SampledGaussian | Composed):
        raise PrivacyError(f"{mechanism!r} cannot be accounted; only SampledGaussian and Composed can")
    if accountant == "rdp" and adjacency != ADD_REMOVE:
        raise PrivacyError(f"accountant = 'rdp' has no {adjacency} bound for sampled batches; use accountant = 'pld'")
    return _ACCOUNTANTS[accountant](_parts(mechanism, int(steps)), check_delta(delta), adjacency)


def check_delta(delta: float | None) -> float:
    """`delta`, or a PrivacyError when it is missing or no probability strictly between 0 and 1."""
    if delta is None:
        raise PrivacyError("delta is missing; set it well below 1 over the number of records, such as 1e-5")
    if not 0 < delta < 1:
        raise PrivacyError(f"delta = {delta} is not in (0, 1); set it well below 1 over the number of records")
    return float(delta)


def _parts(mechanism: Mechanism, steps: int) -> tuple[Part, ...]:
    """The steps to account, with equal ones counted together and all unsampled Gaussians merged into a single one."""
    composed = mechanism.parts if isinstance(mechanism, Composed) else ((mechanism, 1),)
    counts: dict[tuple[float, float], int] = {}
    precision = 0.0
    for one, count in composed:
        key = (float(one.noise_multiplier), float(one.accounted_rate))
        if key[1] == 1:
            precision += count * steps / key[0] ** 2
        elif count * steps:
            counts[key] = counts.get(key, 0) + count * steps
    sampled = tuple((*key, count) for key, count in sorted(counts.items()))
    return (*sampled, (precision**-0.5, 1.0, 1)) if precision else sampled


@lru_cache(maxsize=1024)
def _by_pld(parts: tuple[Part, ...], delta: float, adjacency: str) -> Spent:
    """The loss distribution's ε, or where it cannot be computed faithfully a looser bound that says so."""
    if not parts:
        return Spent(epsilon=0.0, delta=delta, accountant="pld", adjacency=adjacency)
    if all(rate == 1 for _, rate, _ in parts):
        return _unsampled(parts, delta, adjacency, note="exact: one Gaussian")
    if reason := _beyond_pld(parts, delta, adjacency):
        if adjacency == ADD_REMOVE:
            return _by_rdp(parts, delta, adjacency, note=f"{reason}, so RDP answers")
        return _unsampled(parts, delta, adjacency, note=f"{reason}, so sampling is not counted")
    spacing = _spacing(parts, adjacency)
    fine = _on_grid(parts, 2 * spacing, delta, adjacency)
    note = "the grid did not settle"
    for _ in range(5):
        coarse, fine = fine, _on_grid(parts, spacing, delta, adjacency)
        if abs(coarse - fine) <= GRID_TOLERANCE * fine + 1e-8:
            note = ""
            break
        spacing /= 2
    # Both grids give upper bounds, so the smaller one stands.
    return Spent(epsilon=min(coarse, fine), delta=delta, accountant="pld", adjacency=adjacency, note=note)


def _beyond_pld(parts: tuple[Part, ...], delta: float, adjacency: str) -> str:
    """Why the loss distribution cannot answer, or nothing."""
    steps = sum(count for _, _, count in parts)
    if steps > MOST_PLD_STEPS:
        return f"{steps} steps are too many for PLD"
    if delta < 1000 * BEYOND * steps:
        return f"δ = {delta:g} is too small for PLD"
    weakest = min(noise for noise, _, _ in parts)
    if adjacency == ADD_REMOVE:
        return "ε passes 100" if _by_rdp(parts, delta, adjacency).epsilon > LARGEST_PLD else ""
    return f"noise_multiplier = {weakest:g} is too small for PLD" if weakest < 0.2 else ""


def _unsampled(parts: tuple[Part, ...], delta: float, adjacency: str, note: str) -> Spent:
    """Exact ε if every record took part in every step: any number of Gaussians is a single Gaussian."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    distance = 1 if adjacency == ADD_REMOVE else 2
    sigma = sum(count / noise**2 for noise, _, count in parts) ** -0.5 / distance
    with np.errstate(all="ignore"):
        value = float(get_epsilon_gaussian(sigma, delta))
    return Spent(epsilon=value, delta=delta, accountant="pld", adjacency=adjacency, note=note)


def _loss(noise: float, rate: float, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """ln of (1 − rate)·N(0) + rate·N(1) over N(0) at `x`, where both have standard deviation `noise`."""
    tilt = (2 * x - 1) / (2 * noise**2)
    if rate == 1:
        return tilt
    return np.asarray(np.logaddexp(math.log1p(-rate), math.log(rate) + tilt))


def _spacing(parts: tuple[Part, ...], adjacency: str) -> float:
    """A grid that is fine against one step's spread of privacy loss, and that two seconds can pay for.

    Rounding to a grid adds about spacing²/6 to a step's variance, so ε grows by a share of 1/(12·points²) with that
    many points per standard deviation: .02 % at 20 points. Finer than 128 is not needed; the other limits are the
    length of one step's table and that of the composed one.
    """
    steps = sum(count for _, _, count in parts)
    variance, width = 0.0, 0.0
    for noise, rate, count in parts:
        x = np.linspace(-10 * noise, 10 * noise + 1, 4001)
        loss = _loss(noise, rate, x)
        chance = (1 - rate) * np.exp(-0.5 * (x / noise) ** 2) + rate * np.exp(-0.5 * ((x - 1) / noise) ** 2)
        chance /= chance.sum()
        variance += count * float(chance @ loss**2 - (chance @ loss) ** 2)
        width = max(width, float(loss[-1] - loss[0]))
    spread = math.sqrt(variance / steps) * (1 if adjacency == ADD_REMOVE else 2)
    points = min(128.0, 4e4 * spread / width, 2e4 / math.sqrt(steps))
    return float(2.0 ** math.floor(math.log2(spread / max(points, 16.0))))  # powers of two, so that tables are reused


def _on_grid(parts: tuple[Part, ...], spacing: float, delta: float, adjacency: str) -> float:
    """ε by loss distributions on one grid. An upper bound, whatever the grid."""
    changes = ("remove", "add") if adjacency == ADD_REMOVE else ("replace",)
    with np.errstate(all="ignore"):
        return max(_composed(parts, spacing, delta, change) for change in changes)


def _composed(parts: tuple[Part, ...], spacing: float, delta: float, change: str) -> float:
    """ε of all steps together for one kind of change to the data.

    Tables are tilted by exp(tilt · loss) before their Fourier transforms are raised to the number of steps, and tilted
    back after: rounding errors are then relative to the tail that ε is read from, not to the whole distribution.
    """
    from scipy.signal import fftconvolve

    tables = [(_table(noise, rate, spacing, change), count) for noise, rate, count in parts]
    tilt = _best_tilt(tables, delta)
    first, sums = _repeated(*tables[0], tilt, spacing)
    for table, count in tables[1:]:
        more, factor = _repeated(table, count, tilt, spacing)
        first, sums = first + more, fftconvolve(sums, factor)
    certain = BEYOND * sum(count for _, count in tables)
    log_mass = sum(count * table.cumulant(tilt) for table, count in tables)
    return _epsilon_at(spacing * (first + np.arange(len(sums))), sums, tilt, math.log(delta - certain) - log_mass)


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
    size = next_fast_len(max(math.ceil((high - low) / spacing) + 2, len(weights)), real=True)
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
    """The smallest ε ≥ 0 with Σ chance·(1 − exp(ε − loss))₊ at most exp(log_target), chance = tilted·exp(−tilt·loss)."""
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
    et al. 2022). dp-accounting's own table takes second differences of δ, whose rounding errors a million steps raise
    to a percent of ε at small rates; here masses come from the nearer tail and the differences are of order `rate`.
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
        return np.where(left > 0, ndtr(-left) - ndtr(-right), ndtr(right) - ndtr(left))

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
        return _loss(noise, rate, x) - _loss(noise, rate, -x)
    return _loss(noise, rate, x) if change == "remove" else -_loss(noise, rate, x)


def _where(change: str, noise: float, rate: float, loss: NDArray[np.float64]) -> NDArray[np.float64]:
    """The output at which the privacy loss is `loss`: the inverse of `_loss_of`; infinite where none is."""
    if change == "replace":
        ratio = (1 - rate) / rate * math.exp(0.5 / noise**2)
        return np.asarray(noise**2 * (loss / 2 + np.arcsinh(ratio * np.sinh(loss / 2))))
    gain = np.expm1(loss if change == "remove" else -loss) / rate
    return np.asarray(0.5 + noise**2 * np.log1p(np.maximum(gain, -1.0)))


def _by_rdp(parts: tuple[Part, ...], delta: float, adjacency: str, note: str = "") -> Spent:
    """ε by Rényi divergences at the best of several hundred orders."""
    if not parts:
        return Spent(epsilon=0.0, delta=delta, accountant="rdp", adjacency=adjacency, note=note)
    orders = _orders(min(noise for noise, _, _ in parts))
    divergence = sum(count * _renyi(noise, rate, orders) for noise, rate, count in parts)
    above = np.asarray(orders) - 1
    # Conversion of Canonne, Kamath and Steinke (2020), proposition 12: tighter than the paper's.
    values = divergence - (math.log(delta) + np.log1p(above)) / above + np.log(above / (1 + above))
    return Spent(epsilon=max(0.0, float(np.min(values))), delta=delta, accountant="rdp", adjacency=adjacency, note=note)


def _orders(noise: float) -> tuple[float, ...]:
    """Orders that hold the best one for any number of steps; with little noise it lies close to 1."""
    return tuple(1 + np.geomspace(1e-4, 2048, 600) * min(1.0, noise))


@lru_cache(maxsize=64)
def _renyi(noise: float, rate: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Rényi divergence of one sampled step at each order, by quadrature of E[(ratio of densities)^order].

    The trapezoid rule is exact to rounding for such integrands at an eighth of a standard deviation, at every order:
    nothing needs to converge.
    """
    if rate == 1:
        return np.asarray(orders) / (2 * noise**2)
    values = []
    for order in orders:
        x = np.arange(-12 * noise, order + 12 * noise, noise / 8)
        exponent = order * _loss(noise, rate, x) - 0.5 * (x / noise) ** 2
        peak = float(exponent.max())
        moment = peak + math.log(float(np.exp(exponent - peak).sum()) / (8 * math.sqrt(2 * math.pi)))
        values.append(max(moment, 0.0) / (order - 1))
    return np.asarray(values)


_ACCOUNTANTS: dict[str, Callable[[tuple[Part, ...], float, str], Spent]] = {"pld": _by_pld, "rdp": _by_rdp}
