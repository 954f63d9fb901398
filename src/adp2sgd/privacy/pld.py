"""Privacy loss distributions: certified bounds, from above and from below, on ε of many sampled Gaussian steps.

One composition on a grid gives both bounds. Let S be the sum of all losses, S' the sum of the losses as rounded by
`step_loss`, D = S' − S, and δ'(ε) = E[max(0, 1 − exp(ε − S'))]. Then

    δ(ε) ≤ δ'(ε)                                      rounding never lowers δ
    δ(ε − x) ≥ δ'(ε) − E[max(0, 1 − exp(ε − S')); D > x]   as S ≥ S' − x where D ≤ x

Steps are *tilted*: their chances are multiplied by exp(tilt · loss − cumulant) before the Fourier transforms and divided
by it after. With G(ε) = E_tilted[g(S' − ε)], g(y) = exp(−tilt · y) · max(0, 1 − exp(−y)),

    δ'(ε) = exp(cumulant − tilt · ε) · G(ε)

so every error e in G is a relative error of δ', however small δ is. The last term of the second line is at most
exp(cumulant − tilt · ε) · max g · Prob_tilted(D > x), which `_shift` bounds. Errors in G:

- aliasing: the transform wraps what lies outside its window, at most OUTSIDE of the tilted mass by Chernoff's bound;
- rounding of the transforms: `_rounding_error`;
- rounding in the tables: a factor (1 + DOUBT)^steps on δ, and a shift of steps · DOUBT · reach on ε.

dp-accounting does not fit here: its fixed grid gives ε of .035 instead of .0044 at rate 1e-4, noise 50, 1e6 steps, its
rounding 9 % too little ε at rate 1e-4, noise 1, δ = 1e-12, and its bounds are from above only; see
benchmarks/accountant.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from adp2sgd.privacy.step_loss import ADD, DOUBT, REMOVE, REPLACE, Array, Table, extent, loss_at, table

Part = tuple[float, float, int]
"""(noise multiplier, sample rate, steps)."""
Tables = list[tuple[Table, int]]

TOLERANCE = 2e-3  # of upper − lower, as a share of ε
CHEAP_POINTS = 1 << 17  # a distribution of more points may have a tolerance larger in proportion
MOST_POINTS = 1 << 22  # of a composed distribution: 500 MiB in all
OUTSIDE = 1e-12  # tilted mass outside the window
CUT = 45.0  # g is left out where tilt · y is above: exp(−45) = 3e-20 of it
UNIT = 2.0**-53


class TooLongError(Exception):
    """The composed distribution would take more than `MOST_POINTS`."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """`lower` ≤ ε ≤ `upper`, from a composed distribution of `points`."""

    lower: float
    upper: float
    points: int

    @property
    def settled(self) -> bool:
        """Whether the bounds are as close as TOLERANCE demands at this many points."""
        return self.upper - self.lower <= TOLERANCE * max(1.0, self.points / CHEAP_POINTS) * self.upper + 1e-12


def bounds(parts: tuple[Part, ...], delta: float, *, replaced: bool) -> Bounds:
    """Bounds on ε of all `parts` together, when a record is added or removed, or with `replace` changed for another.

    Raises `TooLongError` where not even a coarse grid fits.
    """
    found: list[Bounds] = []
    for change in (REPLACE,) if replaced else (REMOVE, ADD):
        floor = max((one.lower for one in found), default=0.0)
        found.append(_refined(parts, delta, change, floor))
    return Bounds(
        lower=max(one.lower for one in found),
        upper=max(one.upper for one in found),
        points=max(one.points for one in found),
    )


def _refined(parts: tuple[Part, ...], delta: float, change: str, floor: float) -> Bounds:
    """Bounds on a grid that is refined until they are close, or until ε is below `floor`, or as far as it fits."""
    tail = 10.0 ** math.floor(math.log10(1e-4 * delta / sum(count for _, _, count in parts)))
    width = _width(parts, change, tail)
    grid = _Grid(change=change, spacing=2.0 ** math.floor(math.log2(width / 50)), top=math.inf, tail=tail)
    best = _on_grid(parts, delta, grid)
    while not (best.settled or best.upper <= floor):
        excess = (best.upper - best.lower) / (TOLERANCE * best.upper)
        finer = 2.0 ** min(4, max(1, round(math.log2(excess))))
        grid = replace(grid, spacing=grid.spacing / finer, top=2.0 ** math.ceil(math.log2(2 * best.upper)))
        try:
            found = _on_grid(parts, delta, grid)
        except TooLongError:
            break
        best = Bounds(lower=max(best.lower, found.lower), upper=min(best.upper, found.upper), points=found.points)
    return best


def _width(parts: tuple[Part, ...], change: str, tail: float) -> float:
    """The widest range of one step's losses."""
    ranges = (loss_at(change, noise, rate, np.array(extent(change, noise, rate, tail))) for noise, rate, _ in parts)
    return max(float(high - low) for low, high in ranges)


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Where the losses of a step are rounded to; see `step_loss.table`."""

    change: str
    spacing: float
    top: float
    tail: float


def _on_grid(parts: tuple[Part, ...], delta: float, grid: _Grid) -> Bounds:
    """Bounds from one composition on the grid of `spacing`, with tables that leave out `tail` at either end."""
    if min(2 * grid.top, _width(parts, grid.change, grid.tail)) > grid.spacing * MOST_POINTS:
        raise TooLongError
    tables = [
        (table(grid.change, noise, rate, grid.spacing, grid.top, grid.tail), count) for noise, rate, count in parts
    ]
    steps = sum(count for _, count in tables)
    missing = sum(count * (one.infinite + grid.tail) for one, count in tables)
    if missing >= delta: print("MISSING",missing,delta)
    composed = _compose(tables, grid.spacing, _best_tilt(tables, delta))
    doubt = sum(count * DOUBT * one.reach for one, count in tables)
    upper = _upper(composed, math.log(delta - missing) - steps * DOUBT)
    log_delta = math.log(delta - missing + 3*steps*grid.tail + missing**2/2) + steps * DOUBT
    strays = 0.01 * composed.beyond(upper)  # what D > x may take from G
    shift = _shift(tables, grid.spacing, composed.tilt, strays / composed.peak) if strays > 0 else math.inf
    lower = _lower(composed, log_delta, strays, tables, upper) - shift - doubt
    return Bounds(lower=max(0.0, lower), upper=upper + doubt if upper else 0.0, points=len(composed.sums))


@dataclass(frozen=True, eq=False)
class _Composed:
    """Chances `sums` of the tilted sum of losses at `losses`; `error` bounds what is wrong with `beyond`."""

    tilt: float
    cumulant: float
    losses: Array
    sums: Array
    error: float

    @property
    def peak(self) -> float:
        """max g."""
        return float(math.exp(self.tilt * -math.log1p(1 / self.tilt)) / (1 + self.tilt))

    def beyond(self, epsilon: float) -> float:
        """G(ε)."""
        begin = int(np.searchsorted(self.losses, epsilon, side="right"))
        end = int(np.searchsorted(self.losses, epsilon + CUT / self.tilt))
        away = self.losses[begin:end] - epsilon
        return float(self.sums[begin:end] @ (np.exp(-self.tilt * away) * -np.expm1(-away)))

    def log_delta(self, epsilon: float, error: float) -> float:
        """ln of δ'(ε) where G is off by `error`."""
        mass = self.beyond(epsilon) + error
        return math.log(mass) + self.cumulant - self.tilt * epsilon if mass > 0 else -math.inf


def _upper(composed: _Composed, log_delta: float) -> float:
    """An ε ≥ 0 with δ(ε) ≤ exp(log_delta), nearly the least one for which this is certain."""

    def excess(epsilon: float) -> float:
        return composed.log_delta(epsilon, composed.error) - log_delta

    low = high = max(0.0, (composed.cumulant - log_delta) / composed.tilt)
    step = 1 / composed.tilt
    while excess(high) > 0:
        low, high, step = high, high + step, 2 * step
    while excess(low) <= 0:
        if not low:
            return 0.0
        low, high, step = max(0.0, low - step), low, 2 * step
    return _root(excess, low, high, 1 / composed.tilt)


def _lower(composed: _Composed, log_delta: float, strays: float, tables, upper) -> float:
    """An ε with δ'(ε) ≥ exp(log_delta) even without `strays`; 0 where none is certain."""
    fold = _fold(tables)
    def excess(epsilon: float) -> float:
        lost = composed.error + strays + math.exp(min(700.,fold(epsilon)+ composed.tilt*epsilon - composed.cumulant))
        return composed.log_delta(epsilon, -lost) - log_delta

    low = high = upper
    step = 0.01 / composed.tilt
    while excess(low) <= 0:
        if not low:
            return 0.0
        low, high, step = max(0.0, low - step), low, 2 * step
    return -_root(lambda e: -excess(-e), -high, -low, 1 / composed.tilt)


def _fold(tables):
    var = 0.0
    for one, count in tables:
        chances = np.exp(one.logs)
        var += count * float(chances @ (one.losses - float(chances @ one.losses)) ** 2)
    spread = math.sqrt(var)
    terms=[]
    if not any(t.folded for t,_ in tables): return lambda e: -1e9
    for k in (0.5,1,2,4,8,16):
        nu = 1+k/spread
        tot = sum(c*t.cumulant(-nu) for t,c in tables)
        a = sum(c*t.folded*math.exp(-nu*float(t.losses[-1]) - t.cumulant(-nu)) for t,c in tables)
        terms.append((nu, tot+math.log(a) if a else -1e9))
    return lambda e: min(nu*e+t for nu,t in terms)


def _root(excess: Callable[[float], float], low: float, high: float, scale: float) -> float:
    """A point just above the root of `excess`, where it is not positive; it is positive at `low`, not at `high`."""
    from scipy.optimize import brentq

    root = float(brentq(lambda e: max(-700.0, min(700.0, excess(e))), low, high, xtol=1e-6 * scale))
    step = 1e-6 * scale
    while excess(root) > 0:
        root, step = min(high, root + step), 2 * step
    return root


def _compose(tables: Tables, spacing: float, tilt: float) -> _Composed:
    """The tilted distribution of the sum of all losses, in a window that holds all of it but OUTSIDE.

    A step's transform is 1 + t with t = Σ chance · (exp(iθ) − 1). At small rates t is small, and taken as it is, without
    the 1, its rounding errors are small too: they are raised to the number of steps.
    """
    from scipy.fft import irfft, next_fast_len, rfft

    cumulant = sum(count * one.cumulant(tilt) for one, count in tables)
    low, high = _window(tables, spacing, tilt, cumulant)
    points = max((high - low) / spacing + 3, *(len(one.losses) for one, _ in tables))
    if not points <= MOST_POINTS:
        raise TooLongError
    size = next_fast_len(max(256, math.ceil(points)), real=True)
    logs = np.zeros(size // 2 + 1, dtype=np.complex128)
    moved: list[tuple[int, float]] = []
    for one, count in tables:
        weights = _centred(one, tilt, size)
        moved.append((count, float(np.abs(weights).sum())))
        logs += count * _log1p(rfft(weights))
    decay = logs.real.copy()
    np.exp(logs, out=logs)
    norm = sum(count * one * math.sqrt(float(np.mean(np.exp(2 * (1 - 1 / count) * decay)))) for count, one in moved)
    norm += math.sqrt(float(np.mean(np.exp(2 * decay))))
    first = math.floor(low / spacing)
    sums = np.maximum(np.roll(irfft(logs, size), -first), 0.0)
    composed = _Composed(tilt, cumulant, spacing * np.arange(first, first + size), sums, 0.0)
    error = 3 * OUTSIDE * composed.peak + _rounding_error(size, norm, spacing, tilt)
    return _Composed(tilt, cumulant, composed.losses, sums, error)


def _rounding_error(size: int, moved: float, spacing: float, tilt: float) -> float:
    """What rounding in the transforms may change in G; `moved` is the sum over all steps of the norm of t's weights.

    A transform of n numbers has an error of at most 8 · UNIT · log₂ n relative to the norm of its input (Higham 2002,
    theorem 24.2). A step's transform has modulus 1 at most, so errors add up over the steps; exponential, logarithm and
    product add less than twice that again. So the chances err by at most this much in Euclidean norm, and G by its
    product with the norm of g (Cauchy and Schwarz), whose square is at most ∫g²/spacing + max g².
    """
    norm = 24 * UNIT * math.log2(size) * moved
    squares = min(1 / (4 * tilt**3), 1 / (2 * tilt)) / spacing + min(1.0, 1 / tilt) ** 2
    return norm * math.sqrt(squares)


def _centred(one: Table, tilt: float, size: int) -> Array:
    """Tilted chances of a step, from loss 0 on and wrapped around, less 1 at loss 0: they add up to 0."""
    weights = np.zeros(size)
    values = np.exp(one.logs + tilt * one.losses - one.cumulant(tilt))
    weights[np.arange(one.first, one.first + len(values)) % size] = values
    weights[0] = 0.0
    weights[0] = -float(weights.sum())
    return weights


def _log1p(t: np.ndarray[tuple[int, ...], np.dtype[np.complex128]]) -> np.ndarray[tuple[int, ...], np.dtype[np.complex128]]:
    """ln(1 + t), with an error relative to |t| where that is small."""
    out = np.empty_like(t)
    square = t.real**2 + t.imag**2
    with np.errstate(divide="ignore"):
        out.real = np.where(square < 0.25, 0.5 * np.log1p(2 * t.real + square), np.log(np.abs(1 + t)))
    out.imag = np.arctan2(t.imag, 1 + t.real)
    return out


def _window(tables: Tables, spacing: float, tilt: float, cumulant: float) -> tuple[float, float]:
    """Bounds on the tilted sum that either side exceeds with a chance of OUTSIDE / 2 at most (Chernoff)."""
    variance = 0.0
    for one, count in tables:
        chances = np.exp(one.logs + tilt * one.losses - one.cumulant(tilt))
        variance += count * float(chances @ (one.losses - float(chances @ one.losses)) ** 2)
    spread = math.sqrt(variance) + spacing

    def bound(slope: float) -> float:
        moved = sum(count * one.cumulant(tilt + slope) for one, count in tables)
        return float(moved - cumulant - math.log(OUTSIDE / 2)) / slope

    slopes = (1, 2, 4, 8)
    return max(bound(-slope / spread) for slope in slopes), min(bound(slope / spread) for slope in slopes)


def _best_tilt(tables: Tables, delta: float) -> float:
    """The tilt that centres the composed distribution near the ε sought: where Chernoff's bound on ε is smallest."""
    from scipy.optimize import minimize_scalar

    reach, steps = max(one.reach for one, _ in tables), sum(count for _, count in tables)

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return float(sum(count * one.cumulant(tilt) for one, count in tables) - math.log(delta)) / tilt

    ends = (math.log(1e-2 / (math.sqrt(steps) * reach)), math.log(1e4 / reach))
    return math.exp(float(minimize_scalar(bound, bounds=ends, method="bounded", options={"xatol": 0.05}).x))


def _shift(tables: Tables, spacing: float, tilt: float, chance: float) -> float:
    """An x with Prob_tilted(D > x) ≤ `chance`, by Bennett's inequality.

    For a loss at a + s, 0 ≤ s ≤ h, let f ≥ s/h be its chance to be rounded up to a + h. With c = h / (1 − exp(−h)):
    f − s/h ≤ s(h − s)/(2(1 − exp(−h))) and f ≤ cs/h, as f is concave with a slope of c/h at most. Before tilting, D has
    mean at most c·s(h − s)/2 and second moment at most (1 + ch/2)·s(h − s). Tilting weighs rounding up by exp(tilt·h)
    more: it adds f(h − s)·(exp(tilt·h) − 1) to the mean, and a factor of exp(tilt·h) at most to the second moment. Last,
    s(h − s) ≤ h²·exp(h)·f(1 − f), whose mean over a cell is at most h²·exp(h)·up·down/(up + down)² (Jensen).
    """
    square = 0.0
    for one, count in tables:
        square += count * float(np.exp(one.splits + tilt * one.losses[:-1] - one.cumulant(tilt)).sum())
    square *= spacing**2 * math.exp(spacing)
    steep = spacing / -math.expm1(-spacing)
    with np.errstate(over="ignore"):
        mean = square * steep * (0.5 + np.expm1(tilt * spacing) / spacing)
        second = square * (1 + steep * spacing / 2) * np.exp(tilt * spacing)
        slopes = np.geomspace(1e-8, 50, 400)  # times spacing
        shifts = mean + (second * (np.expm1(slopes) - slopes) / spacing**2 - math.log(chance)) * spacing / slopes
    return float(np.min(shifts))
