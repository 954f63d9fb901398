"""From a budget to its settings: the least noise for a number of steps, the most steps for a noise. Both by PLD.

Asynchronous learners do not know beforehand how many steps they will take, so a cap on their own steps is fixed before
training. These are the two ways to find it. Both answers have at most five digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from adp2sgd.errors import ConfigError, PrivacyError
from adp2sgd.privacy.accountant import ADD_REMOVE, Spent, check_delta
from adp2sgd.privacy.accountant import epsilon as epsilon_of
from adp2sgd.privacy.mechanism import Composed, SampledGaussian

LEAST_NOISE, MOST_NOISE = 0.1, 1e6
MOST_STEPS = 10**12
NOTHING = Composed(())
ROUGH = {"tolerance": 0.1}  # bounds that differ by 10 % come an order of magnitude faster


def epsilon(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, adjacency: str = ADD_REMOVE
) -> float:
    """ε after `steps` Poisson-sampled Gaussian steps on the same records, by PLD. Never below the true one."""
    return epsilon_of(SampledGaussian(noise_multiplier, sample_rate), steps, delta, "pld", adjacency).epsilon


def noise_for(
    *,
    epsilon: float,
    delta: float | None,
    sample_rate: float,
    steps: int,
    adjacency: str = ADD_REMOVE,
    before: Composed = NOTHING,
) -> float:
    """The least noise multiplier, rounded up to five digits, that keeps `steps` steps after `before` within `epsilon`.

    Guarantee: the accountant's ε at the returned value is at most `epsilon`. Never below 0.1.
    """
    _check_target(epsilon, delta)
    if steps < 1:
        raise ConfigError(f"steps = {steps} needs no noise; use a whole number from 1 on")

    def spent(noise: float, **how: float) -> Spent:
        everything = Composed((*before.parts, (SampledGaussian(noise, sample_rate), steps)))
        return epsilon_of(everything, 1, delta, "pld", adjacency, **how)

    return _least_noise(spent, epsilon, steps)


def least_noise(taken: Callable[[float], float], most: float, steps: int) -> float:
    """The least noise multiplier, rounded up to five digits, at which `taken`, which falls with noise, is at most
    `most`; 0.1 at least. `steps` is for the message of a refusal."""

    def spent(noise: float, **how: float) -> Spent:
        value = taken(noise)
        return Spent(epsilon=value, delta=0.0, accountant="rdp", adjacency="", epsilon_lower=value)

    return _least_noise(spent, most, steps)


def _least_noise(spent: Callable[..., Spent], epsilon: float, steps: int) -> float:
    noise = _crossing(spent, epsilon, guess=1.0, low=LEAST_NOISE, high=MOST_NOISE, rising=False)
    if noise == LEAST_NOISE and _fits(spent, epsilon, LEAST_NOISE):
        return LEAST_NOISE
    if noise == MOST_NOISE and not _fits(spent, epsilon, MOST_NOISE):
        raise PrivacyError(
            f"epsilon = {epsilon} is not reached by any noise_multiplier up to {MOST_NOISE:g} in {steps} steps; "
            "raise epsilon, or use fewer steps or data whose budget is not spent"
        )
    digits = 4 - math.floor(math.log10(noise))
    scale = 10.0**digits
    count = -_last(lambda count: spent(round(-count / scale, digits)).epsilon <= epsilon, -noise * scale)
    return round(count / scale, digits)


def steps_for(
    *,
    epsilon: float,
    delta: float | None,
    sample_rate: float,
    noise_multiplier: float,
    adjacency: str = ADD_REMOVE,
    before: Composed = NOTHING,
) -> int:
    """The most steps after `before` that stay within `epsilon`, rounded down to five digits above 100,000; 0 where not
    even one does. At most `MOST_STEPS`.

    Guarantee: the accountant's ε is at most `epsilon` after that many steps and, below `MOST_STEPS`, above it after one
    more (above 100,000: one more in the fifth digit).
    """
    _check_target(epsilon, delta)
    mechanism = SampledGaussian(noise_multiplier, sample_rate)

    def spent(steps: float, **how: float) -> Spent:
        everything = Composed((*before.parts, (mechanism, round(steps))))
        return epsilon_of(everything, 1, delta, "pld", adjacency, **how)

    steps = _crossing(spent, epsilon, guess=1 / sample_rate, low=1, high=MOST_STEPS, rising=True)
    if steps == 1 and not _fits(spent, epsilon, 1):
        return 0
    if steps == MOST_STEPS and _fits(spent, epsilon, MOST_STEPS):
        return MOST_STEPS
    unit = int(10.0 ** max(0, math.floor(math.log10(steps)) - 4))
    return unit * _last(lambda count: spent(count * unit).epsilon <= epsilon, steps / unit)


def _check_target(epsilon: float, delta: float | None) -> None:
    check_delta(delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(f"epsilon = {epsilon} is reached by no noise; use a finite value above 0, such as 3.0")


def _fits(spent: Callable[..., Spent], target: float, value: float) -> bool:
    """Whether ε is at most `target`. Rough bounds are tried first."""
    rough = spent(value, **ROUGH)
    if rough.epsilon <= target or rough.epsilon_lower > target:
        return rough.epsilon <= target
    return spent(value).epsilon <= target


def _last(holds: Callable[[int], bool], near: float) -> int:
    """The last whole number that `holds`, where all below do and none above, by steps away from `near`."""
    low = math.floor(near)
    step, high = 1, low + 1
    while not holds(low):
        low, high, step = low - step, low, 2 * step
    while high - low == 1 and holds(high):
        low, high = high, high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _crossing(
    spent: Callable[..., Spent], target: float, *, guess: float, low: float, high: float, rising: bool
) -> float:
    """Where the monotone ε reaches `target` between `low` and `high`, or the nearest end.

    Brent's method on rough bounds, then the secant method on fine ones. Both work on logarithms, where ε is nearly
    straight.
    """
    from scipy.optimize import brentq

    def gap(log_value: float, **how: float) -> float:
        value = min(max(float(f"{math.exp(log_value):.5g}"), low), high)  # five digits: the answer may be among them
        return math.log(max(spent(value, **how).epsilon, 1e-12) / target)

    def rough(log_value: float) -> float:
        return gap(log_value, **ROUGH)

    ends = sorted(_bracket(rough, math.log(guess), math.log(low), math.log(high), rising))
    if ends[0] == ends[1]:
        return low if ends[0] == math.log(low) else high
    start = float(brentq(rough, *ends, xtol=0.01))
    slope = (rough(start + 0.02) - rough(start)) / 0.02
    return min(max(math.exp(_secant(gap, start, slope)), low), high)


def _secant(gap: Callable[[float], float], start: float, slope: float) -> float:
    """A root of `gap` to five digits, where it is nearly straight; `slope` is its slope near `start`."""
    x, value = start, gap(start)
    for _ in range(6):
        if abs(value) < 1e-5 * abs(slope) or not slope:
            break
        move = min(max(-value / slope, -1.0), 1.0)
        value, before = gap(x + move), value
        x, slope = x + move, (value - before) / move
    return x


def _bracket(
    gap: Callable[[float], float], guess: float, bottom: float, top: float, rising: bool
) -> tuple[float, float]:
    """Two values between `bottom` and `top` where the monotone `gap` has different signs, by steps away from `guess`;
    an end twice, where there are none."""
    near = far = min(max(guess, bottom), top)
    while (gap(far) > 0) == (gap(near) > 0):
        # ε grows at least like the square root of steps, and falls at least like the inverse of noise.
        near, reach = far, 2 * abs(gap(far)) + 0.1
        far = min(max(near + (reach if (gap(near) <= 0) == rising else -reach), bottom), top)
        if far == near:
            break
    return near, far
