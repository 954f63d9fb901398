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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adp2sgd.errors import ConfigError, PrivacyError
from adp2sgd.privacy.mechanism import Composed, Mechanism, SampledGaussian

ADD_REMOVE = "add-remove"
ADJACENCIES = (ADD_REMOVE, "replace-one")
GRID_TOLERANCE = 2e-3  # the grid is refined until ε moves by less than this share
LARGEST_PLD = 150.0  # in RDP's ε: above it nothing is protected, and RDP's bound says as much
MOST_PLD_STEPS = 10**7
ROUNDING_PER_STEP = 1e-16  # error in δ that raising a Fourier transform to the number of steps leaves, per step

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
    if delta < 10 * ROUNDING_PER_STEP * steps:
        return f"δ = {delta:g} lies within the rounding error of {steps} steps"
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
    total: Any = None
    steps = sum(count for _, _, count in parts)
    with np.errstate(all="ignore"):
        for noise, rate, count in parts:
            pld = _one_step(noise, rate, spacing, adjacency).self_compose(count, delta * 1e-6)
            total = pld if total is None else total.compose(pld)
        return float(total.get_epsilon_for_delta(delta - ROUNDING_PER_STEP * steps))


@lru_cache(maxsize=8)
def _one_step(noise: float, rate: float, spacing: float, adjacency: str) -> Any:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    if adjacency != ADD_REMOVE:
        return PrivacyLossDistribution(_table(noise, rate, spacing, "replace"))
    if rate == 1:
        return PrivacyLossDistribution(_table(noise, rate, spacing, "remove"))
    return PrivacyLossDistribution(*(_table(noise, rate, spacing, change) for change in ("remove", "add")))


def _table(noise: float, rate: float, spacing: float, change: str) -> Any:
    """One step's privacy loss on a grid, as dp-accounting's probability table. ε computed from it can only grow.

    Between two grid points the loss is split so that total mass and E[exp(−loss)] stay ("connect the dots", Doroshenko
    et al. 2022). dp-accounting's own table takes second differences of δ, whose rounding errors a million steps raise
    to several percent of ε at small rates; here masses come from the nearer tail and the differences are of order `rate`.
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf
    from scipy.special import ndtr

    ends = np.array([-10 * noise - (change == "replace"), 10 * noise + 1])
    low, high = sorted(_loss_of(change, noise, rate, ends))
    first = math.floor(low / spacing)
    grid = spacing * np.arange(first, math.ceil(high / spacing) + 1)
    x = _where(change, noise, rate, grid)
    a, b = np.minimum(x[:-1], x[1:]), np.maximum(x[:-1], x[1:])

    def mass(centre: float) -> NDArray[np.float64]:
        left, right = (a - centre) / noise, (b - centre) / noise
        return np.where(left > 0, ndtr(-left) - ndtr(-right), ndtr(right) - ndtr(left))

    without, record = mass(0.0), mass(1.0)
    here, rise = grid[:-1], np.expm1(grid[:-1])
    # `inside`: probability of each cell. `excess`: its part above exp(lower end) times the other data set's probability.
    if change == "remove":
        inside = (1 - rate) * without + rate * record
        excess = rate * record - (rise + rate) * without
    elif change == "add":
        inside = without
        excess = (rate * np.exp(here) - rise) * without - rate * np.exp(here) * record
    else:
        inside = (1 - rate) * without + rate * record
        excess = rate * record - (1 - rate) * rise * without - rate * np.exp(here) * mass(-1.0)
    upper = np.clip(excess / -math.expm1(-spacing), 0, inside)
    chances = np.append(inside - upper, 0.0)
    chances[1:] += upper
    # The far ends: the low one moves up to the grid, the high one counts as certain loss.
    beyond = float(2 * ndtr(-10.0))
    chances[0] += max(0.0, 1 - beyond - float(chances.sum()))
    return DensePLDPmf(spacing, first, chances, beyond, True)


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
    return Spent(
        epsilon=max(0.0, float(np.min(values))), delta=delta, accountant="rdp", adjacency=adjacency, note=note
    )


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
