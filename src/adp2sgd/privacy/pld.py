"""Privacy loss distributions: certified bounds, from above and from below, on ε of many sampled Gaussian steps.

One composition on a grid gives both bounds. Let S be the sum of all losses, S' that of the rounded ones (`discretize`),
D = S' − S, and δ'(ε) = E[max(0, 1 − exp(ε − S'))] over finite S'. A loss is *large* above the grid and *raised* below
it. Then

    δ(ε)     ≤ δ'(ε) + Prob(S' = ∞)                                   rounding never lowers δ
    δ(ε − x) ≥ δ'(ε) + Prob(S' = ∞, none raised) − stray − fold − raised

    stray(ε)  = E[max(0, 1 − exp(ε − S')); no loss is large and D > x]    bounded by `_shift`
    fold(ε)   = E[max(0, exp(ε − S') − 1); a loss is large, S' finite]    bounded by `_fold`
    raised(ε) = E[max(0, 1 − exp(ε − S')); a loss is raised]

The second line adds up two kinds of outputs without a raised loss. Where no loss is large and D ≤ x, S ≥ S' − x. Where
one is large, δ ≥ P − exp(ε)·Q, and rounding keeps P and Q of such outputs. So losses far from 0 need no grid: it ends
at a small multiple of ε. At small rates it would be far too wide otherwise.

Steps are *tilted*: their chances are multiplied by exp(tilt · loss − cumulant) before the Fourier transforms and
divided by it after. With G(ε) = E_tilted[g(S' − ε)] and g(y) = exp(−tilt · y) · max(0, 1 − exp(−y)),

    δ'(ε) = exp(cumulant − tilt · ε) · G(ε)

so an error of G is a relative error of δ', however small δ is. `_Composed.error` bounds the error of G from aliasing
and from rounding in the transforms. Rounding in the tables puts a factor of (1 + DOUBT)^steps on δ and a shift of
steps · DOUBT · reach on ε.

dp-accounting does not fit here: its fixed grid gives ε of .035 instead of .0044 at rate 1e-4, noise 50, 1e6 steps, its
rounding 9 % too little ε at rate 1e-4, noise 1, δ = 1e-12, and its bounds are from above only; see
benchmarks/accountant.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from adp2sgd.privacy.discretize import ADD, DOUBT, REMOVE, REPLACE, Array, Table, loss_range, table

Part = tuple[float, float, int]
"""(noise multiplier, sample rate, steps)."""
Tables = list[tuple[Table, int]]

TOLERANCE = 2e-3  # of upper − lower, as a share of ε
CHEAP_POINTS = 1 << 16  # a distribution of more points may have a tolerance that is larger in proportion
NEGLIGIBLE = 2e-5  # of ε
MOST_POINTS = 1 << 22  # of a composed distribution: less than 1 GiB in all
OUTSIDE = 1e-12  # tilted mass outside the window, either side
CUT = 35.0  # g is left out where tilt · y is above: exp(−35) = 6e-16
LOOSE = 0.1  # bounds that differ by more, as a share of ε, are worth a second lower bound
STRAY = 0.01  # of G: what stray(ε) may take
UNIT = 2.0**-53


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """`lower` ≤ ε ≤ `upper`, from a composed distribution of `points`.

    `strain` is the share of δ by which `lower` suffers from losses outside the grid.
    """

    lower: float
    upper: float
    points: int
    strain: float = 0.0

    def excess(self, tolerance: float) -> float:
        """upper − lower over what is allowed: the share `tolerance` of ε; beyond CHEAP_POINTS more in proportion, and
        NEGLIGIBLE in proportion too."""
        dear = self.points / CHEAP_POINTS
        allowed = tolerance * max(1.0, dear) * self.upper + (NEGLIGIBLE * dear if dear > 1 else 1e-12)
        return (self.upper - self.lower) / allowed if self.points else math.inf


def bounds(parts: tuple[Part, ...], delta: float, *, replace: bool, tolerance: float = TOLERANCE) -> Bounds:
    """Bounds on ε of all `parts` together, when a record is added or removed, or with `replace` changed for another.

    They differ by the share `tolerance` of ε, or by more where that would take too many points.
    """
    with np.errstate(over="ignore", under="ignore"):
        if replace:
            return _refined(parts, delta, REPLACE, tolerance, enough=0.0)
        removed = _refined(parts, delta, REMOVE, tolerance, enough=0.0)
        added = _refined(parts, delta, ADD, tolerance, enough=removed.upper)
        if removed.upper - max(removed.lower, added.lower) > max(LOOSE * removed.upper, 0.005):
            added = _refined(parts, delta, ADD, tolerance, enough=0.0)  # its lower bound may be the larger one
    return Bounds(
        lower=max(removed.lower, added.lower),
        upper=max(removed.upper, added.upper),
        points=max(removed.points, added.points),
    )


def _refined(parts: tuple[Part, ...], delta: float, change: str, tolerance: float, enough: float) -> Bounds:
    """Bounds on a grid that is refined until they are close, or `upper` is `enough`, or no finer grid fits."""
    tail = 10.0 ** math.floor(math.log10(1e-4 * delta / sum(count for _, _, count in parts)))
    ranges = [loss_range(change, noise, rate, tail) for noise, rate, _ in parts]
    spacing, top = max(high - low for low, high in ranges) / 50, math.inf
    best, finer, stretch = Bounds(lower=0.0, upper=math.inf, points=0), 2.0, 1.5
    while best.excess(tolerance) > 1 and best.upper > enough and finer > 1.1:
        tables = [(table(change, noise, rate, spacing, top, 2 * top, tail), count) for noise, rate, count in parts]
        if sum(count * one.infinite for one, count in tables) > delta / 2:
            top *= 2
            continue
        found = _on_grid(tables, delta, spacing, tail)
        if found is None:
            spacing, finer = 1.4 * spacing, finer / 1.4 if best.points else finer
            continue
        distance = best.upper - best.lower
        best = Bounds(lower=max(best.lower, found.lower), upper=min(best.upper, found.upper), points=found.points)
        if found.strain > 0.01:
            stretch *= 1.4
        elif best.points > CHEAP_POINTS and best.upper - best.lower > 0.95 * distance:
            break
        shrunk = max(1.0, min(top, max(high for _, high in ranges)) / (stretch * best.upper)) if best.upper else 1.0
        finer = _finer(best, tolerance, room=0.95 * MOST_POINTS / best.points * shrunk)
        spacing, top = spacing / finer, stretch * best.upper
    return best


def _finer(best: Bounds, tolerance: float, room: float) -> float:
    """How much finer the next grid should be, at most `room`.

    The distance of the bounds shrinks like the spacing or its square root. Beyond CHEAP_POINTS, the tolerance grows
    meanwhile.
    """
    excess = best.excess(tolerance)
    factor = min(16.0, max(1.5, min(1.1 * excess, math.sqrt(excess * max(1.0, CHEAP_POINTS / best.points)))))
    return min(factor, room)


def _on_grid(tables: Tables, delta: float, spacing: float, tail: float) -> Bounds | None:
    """Bounds from one composition, with tables that leave out `tail` of P; None where it does not fit."""
    steps, shaken = sum(count for _, count in tables), sum(count * DOUBT * one.reach for one, count in tables)
    infinite = sum(count * one.infinite for one, count in tables)  # Prob(S' = ∞) is between 1 − exp(−infinite) and it
    composed = _compose(tables, spacing, _best_tilt(tables, delta))
    if composed is None:
        return None
    if not math.isfinite(composed.error + composed.cumulant + float(composed.sums.sum())):
        raise FloatingPointError(f"the composed distribution is not finite at spacing {spacing}")
    upper = _upper(composed, math.log(delta - infinite - steps * tail) - (steps + 1) * DOUBT, least=-shaken)
    found = composed.beyond(upper)
    if upper <= 0 or not found:
        return Bounds(lower=0.0, upper=upper + shaken, points=len(composed.sums))
    raised = min(1.0, sum(count * one.raised for one, count in tables))
    lost = _peak(composed.tilt) * sum(count * one.raised * one.tilting(composed.tilt) for one, count in tables)
    fold = _fold(tables, upper)
    log_delta = math.log(delta + math.expm1(-infinite) * (1 - raised) + fold) + (steps + 1) * DOUBT
    log_stray = math.log(STRAY * found) + composed.cumulant - composed.tilt * upper
    tilts = (composed.tilt, composed.tilt / 2, composed.tilt / 4)
    shift, tilt = min((_shift(tables, spacing, tilt, upper, log_stray), tilt) for tilt in tilts)
    lower = _lower(composed, log_delta, lost, STRAY * found, tilt, upper) - shift - shaken
    strain = (fold + infinite * raised) / delta + lost / found
    return Bounds(lower=max(0.0, lower), upper=upper + shaken, points=len(composed.sums), strain=strain)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Composed:
    """Chances `sums` of the tilted S' at `losses`; `error` bounds the error of `beyond`."""

    tilt: float
    cumulant: float
    losses: Array
    sums: Array
    rounding: float

    @cached_property
    def error(self) -> float:
        """Mass outside the window is missed, and wrapped into it; and `rounding` is the error of `sums` in Euclidean
        norm, so it changes G by its product with the norm of g at most, whose square is below ∫g²/spacing + max g²."""
        spacing = float(self.losses[1] - self.losses[0])
        square = min(1 / (4 * self.tilt**3), 1 / (2 * self.tilt)) / spacing + _peak(self.tilt) ** 2
        return 5 * OUTSIDE * _peak(self.tilt) + self.rounding * math.sqrt(square)

    def beyond(self, epsilon: float) -> float:
        """G(ε)."""
        begin = int(np.searchsorted(self.losses, epsilon, side="right"))
        end = int(np.searchsorted(self.losses, epsilon + CUT / self.tilt))
        away = self.losses[begin:end] - epsilon
        return _mean(self.sums[begin:end], np.exp(-self.tilt * away) * -np.expm1(-away))

    def log_delta(self, epsilon: float, error: float) -> float:
        """ln δ'(ε), where G is off by `error`."""
        mass = self.beyond(epsilon) + error
        return math.log(mass) + self.cumulant - self.tilt * epsilon if mass > 0 else -math.inf


def _mean(chances: Array, values: Array) -> float:
    """Σ chance · value, by pairwise summation; the threads of a matrix library would cost more than they save."""
    return float((chances * values).sum())


def _peak(tilt: float) -> float:
    """max g."""
    return math.exp(-tilt * math.log1p(1 / tilt)) / (1 + tilt)


def _upper(composed: _Composed, log_delta: float, least: float) -> float:
    """Nearly the least ε ≥ `least` for which δ'(ε) ≤ exp(log_delta) is certain."""

    def excess(epsilon: float) -> float:
        return composed.log_delta(epsilon, composed.error) - log_delta

    step = 1 / composed.tilt
    low = high = max(least, (composed.cumulant - log_delta) / composed.tilt)  # Chernoff's bound
    while excess(high) > 0:
        low, high, step = high, high + step, 2 * step
    while excess(low) <= 0:
        if low == least:
            return least
        low, high, step = max(least, low - step), low, 2 * step
    return _root(excess, low, high, 1 / composed.tilt)


def _lower(composed: _Composed, log_delta: float, lost: float, stray: float, tilt: float, upper: float) -> float:
    """An ε below `upper` for which δ'(ε) − stray(ε) ≥ exp(log_delta) is certain, also if G is less by `lost`; 0 where
    none is.

    stray(ε), as a part of G, is at most `stray` at `upper`, and it falls like exp(−`tilt` · ε) as a part of δ'.
    """

    def excess(epsilon: float) -> float:
        strayed = stray * math.exp((tilt - composed.tilt) * (upper - epsilon))
        return composed.log_delta(epsilon, -composed.error - lost - strayed) - log_delta

    step, low, high = 0.01 / composed.tilt, upper, upper
    while excess(low) < 0:
        if not low:
            return 0.0
        low, high, step = max(0.0, low - step), low, 2 * step
    return -_root(lambda mirrored: -excess(-mirrored), -high, -low, 1 / composed.tilt)


def _root(excess: Callable[[float], float], low: float, high: float, scale: float) -> float:
    """A point close to a root of `excess` and not above 0 there; it is positive at `low`, and not at `high`."""
    from scipy.optimize import brentq

    if low == high:
        return high
    step = 1e-6 * scale
    root = float(brentq(lambda value: max(-700.0, min(700.0, excess(value))), low, high, xtol=step))
    while excess(root) > 0:
        root, step = min(high, root + step), 2 * step
    return root


def _compose(tables: Tables, spacing: float, tilt: float) -> _Composed | None:
    """The tilted distribution of the sum of all losses, in a window that holds all of it but OUTSIDE at either side;
    None where that takes more than MOST_POINTS.

    A step's transform is 1 + t with t = Σ chance · (exp(iθ) − 1). At small rates t is small; computed without the 1, it
    has errors in proportion. A transform of n numbers has an error of at most 8 · UNIT · log₂ n times the sum of their
    absolute values; logarithm, product and exponential add less than twice that. With c steps, whose transforms have
    moduli of 1 at most, an error e of t changes the product by at most c · e · |product|^(1 − 1/c). The mean square of
    that is the squared error of `sums` (Parseval).
    """
    from scipy.fft import irfft, next_fast_len, rfft

    low, high = _window(tables, spacing, tilt)
    points = max((high - low) / spacing + 3, *(len(one.losses) for one, _ in tables))
    if not points <= MOST_POINTS:
        return None
    size = next_fast_len(max(256, math.ceil(points)), real=True)
    logs = np.zeros(size // 2 + 1, dtype=np.complex128)
    moved = []
    for one, count in tables:
        weights = _centred(one, tilt, size)
        moved.append((count, float(np.abs(weights).sum())))
        logs += _log1p(rfft(weights), count)
    decay = logs.real.copy()
    first = math.floor(low / spacing)
    sums = np.maximum(np.roll(irfft(np.exp(logs, out=logs), size), -first), 0.0)
    norm = math.sqrt(_mean(sums, sums))
    for count, weight in moved:
        norm += count * weight * math.sqrt(float(np.mean(np.exp(2 * (1 - 1 / count) * decay))))
    return _Composed(
        tilt=tilt,
        cumulant=sum(count * one.cumulant(tilt) for one, count in tables),
        losses=spacing * np.arange(first, first + size),
        sums=sums,
        rounding=24 * UNIT * math.log2(size) * norm,
    )


def _centred(one: Table, tilt: float, size: int) -> Array:
    """Tilted chances of a step, from loss 0 on and wrapped around, less 1 at loss 0: they add up to 0."""
    weights = np.zeros(size)
    weights[np.arange(one.first, one.first + len(one.losses)) % size] = one.tilted(tilt)
    weights[0] = 0.0
    weights[0] = -float(weights.sum())
    return weights


def _log1p(t: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    """count · ln(1 + t), with an error relative to |t| where that is small."""
    square = t.real**2 + t.imag**2
    with np.errstate(divide="ignore"):
        real = np.where(square < 0.25, 0.5 * np.log1p(2 * t.real + square), np.log(np.abs(1 + t)))
    t.imag = count * np.arctan2(t.imag, 1 + t.real)
    t.real = count * np.maximum(real, -1e3)
    return t


def _window(tables: Tables, spacing: float, tilt: float) -> tuple[float, float]:
    """Bounds that the tilted sum exceeds with a chance of OUTSIDE at most, either side (Chernoff)."""
    spread, reach = _spread(tables, tilt) + spacing, max(one.reach for one, _ in tables)
    cumulant = sum(count * one.cumulant(tilt) for one, count in tables)

    def bound(slope: float) -> float:
        moved = sum(count * one.cumulant(tilt + slope) for one, count in tables)
        return float(moved - cumulant - math.log(OUTSIDE)) / slope

    slopes = [size / scale for scale in (spread, reach) for size in (1, 2, 4, 8)]
    return max(bound(-slope) for slope in slopes), min(bound(slope) for slope in slopes)


def _spread(tables: Tables, tilt: float) -> float:
    """Standard deviation of the tilted sum."""
    variance = 0.0
    for one, count in tables:
        chances = one.tilted(tilt)
        variance += count * _mean(chances, (one.losses - _mean(chances, one.losses)) ** 2)
    return math.sqrt(variance)


def _best_tilt(tables: Tables, delta: float) -> float:
    """The tilt that centres the composed distribution near the ε sought: where Chernoff's bound on ε is smallest.

    It is limited so that the top of the grid, where a chance may be as large as δ, does not outweigh the rest.
    """
    from scipy.optimize import minimize_scalar

    reach, steps = max(float(one.losses[-1]) for one, _ in tables), sum(count for _, count in tables)

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return float(sum(count * one.cumulant(tilt) for one, count in tables) - math.log(delta)) / tilt

    ends = (math.log(1e-3 / (math.sqrt(steps) * reach)), math.log((1 - 1.3 * math.log(delta)) / reach))
    return math.exp(float(minimize_scalar(bound, bounds=ends, method="bounded", options={"xatol": 0.05}).x))


def _shift(tables: Tables, spacing: float, tilt: float, epsilon: float, log_stray: float) -> float:
    """An x with stray(ε) ≤ exp(log_stray).

    For any tilt, stray(ε) ≤ exp(cumulant − tilt · ε) · max g · Prob_tilted(no loss is large and D > x). Bennett's
    inequality bounds the last factor.

    For a loss at a + s, 0 ≤ s ≤ h, let f be its chance to be rounded up to a + h, and c = h / (1 − exp(−h)). As f is
    concave, s/h ≤ f ≤ cs/h and f − s/h ≤ cs(h − s)/(2h). Before tilting, D has a mean of at most cs(h − s)/2 and a
    second moment of at most (1 + ch/2)·s(h − s). Tilting weighs rounding up by exp(tilt·h) more: it adds
    f(h − s)·(exp(tilt·h) − 1) to the mean, and a factor of exp(tilt·h) at most to the second moment. Last,
    s(h − s) ≤ h²·exp(h)·f(1 − f), and the mean of f(1 − f) over a cell is at most up·down/(up + down)² (Jensen).
    """
    square, log_chance = 0.0, log_stray + tilt * epsilon - math.log(_peak(tilt))
    for one, count in tables:
        cumulant = one.cumulant(tilt)
        log_chance -= count * cumulant
        square += count * float(np.exp(one.splits + tilt * one.losses[:-1] - cumulant).sum())
    square *= spacing**2 * math.exp(spacing)
    steep = spacing / -math.expm1(-spacing)
    mean = square * steep * (0.5 + np.expm1(tilt * spacing) / spacing)
    second = square * (1 + steep * spacing / 2) * np.exp(tilt * spacing)
    slopes = np.geomspace(1e-8, 50, 400)  # times spacing
    shifts = mean + (second * (np.expm1(slopes) - slopes) / spacing**2 - log_chance) * spacing / slopes
    return float(np.min(shifts))


def _fold(tables: Tables, epsilon: float) -> float:
    """A bound on fold(ε).

    Let Q' have the chances of S' times exp(−S'). Then fold(ε) ≤ exp(ε) · Q'(a loss is large, S' < ε). If one loss is
    large, S' < ε takes a sum of the others below −y, y = top − ε: so one of them is below −y/4, or the sum is below −y
    also if they are raised to −y/4 (Chernoff).
    """
    total = 0.0
    for i, (large, count) in enumerate(tables):
        below = float(large.losses[-1]) - epsilon
        others = [(one, many - (i == k)) for k, (one, many) in enumerate(tables)]
        if large.folded:
            total += (
                count * large.folded * math.exp(min(700.0, -below)) * (_sum_below(others, below) if below > 0 else 1.0)
            )
    return total


def _sum_below(tables: Tables, below: float) -> float:
    """A bound on Q'(the sum of losses is less than −`below`); see `_fold`."""
    rare, slopes = 0.0, np.array([4.0, 8.0, 16.0, 32.0, 64.0]) / below
    logs = -slopes * below
    for one, count in tables:
        chances = np.exp(one.logs - one.losses)
        raised = np.maximum(one.losses, -below / 4)
        rare += count * float(chances[one.losses < raised].sum())
        logs += [count * math.log(_mean(chances, np.exp(-slope * raised))) for slope in slopes] if count else 0.0
    return min(1.0, rare + math.exp(min(0.0, float(logs.min())))) if any(count for _, count in tables) else 0.0
