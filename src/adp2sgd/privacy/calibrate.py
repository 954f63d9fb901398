"""From a budget to its settings: the least noise for a number of steps, the most steps for a noise. Both by PLD.

Under asynchrony nobody knows beforehand how many steps a learner will take, so a cap on its own steps is fixed before
training; these are the two ways to find it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from adp2sgd.errors import ConfigError, PrivacyError
from adp2sgd.privacy.accountant import ADD_REMOVE, check_delta, most_pld_steps
from adp2sgd.privacy.accountant import epsilon as epsilon_of
from adp2sgd.privacy.mechanism import Composed, SampledGaussian

LEAST_NOISE, MOST_NOISE = 0.1, 1e6
MOST_STEPS = 10**12
NOTHING = Composed(())


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

    def spent(noise: float) -> float:
        return _spent(before, SampledGaussian(noise, sample_rate), steps, delta, adjacency)

    return least_noise(spent, epsilon, steps)


def least_noise(spent: Callable[[float], float], epsilon: float, steps: int) -> float:
    """The least noise multiplier, rounded up to five digits, at which `spent`, which falls with noise, is at most
    `epsilon`; 0.1 at least."""
    if spent(MOST_NOISE) > epsilon:
        raise PrivacyError(
            f"epsilon = {epsilon} is not reached by any noise_multiplier up to {MOST_NOISE:g} in {steps} steps; "
            "raise epsilon, or use fewer steps or data whose budget is not spent"
        )
    if spent(LEAST_NOISE) <= epsilon:
        return LEAST_NOISE
    noise = _crossing(spent, epsilon, *_bracket(spent, epsilon, guess=1.0, low=LEAST_NOISE, high=MOST_NOISE))
    unit = 10.0 ** (math.floor(math.log10(noise)) - 4)
    count = math.ceil(noise / unit)
    while spent(float(f"{count * unit:.5g}")) > epsilon:
        count += 1
    return float(f"{count * unit:.5g}")


def steps_for(
    *,
    epsilon: float,
    delta: float | None,
    sample_rate: float,
    noise_multiplier: float,
    adjacency: str = ADD_REMOVE,
    before: Composed = NOTHING,
) -> int:
    """The most steps after `before` that stay within `epsilon`; 0 where not even one does, and `MOST_STEPS` where so
    many do: nobody takes more.

    Guarantee: the accountant's ε is at most `epsilon` after that many steps and, below `MOST_STEPS`, above it after one
    more.
    """
    _check_target(epsilon, delta)
    mechanism = SampledGaussian(noise_multiplier, sample_rate)

    def spent(steps: float) -> float:
        return _spent(before, mechanism, round(steps), delta, adjacency)

    if spent(1) > epsilon:
        return 0
    if spent(MOST_STEPS) <= epsilon:
        return MOST_STEPS
    low, high = sorted(map(round, _bracket(spent, epsilon, guess=1 / sample_rate, low=1, high=MOST_STEPS)))
    last = most_pld_steps(check_delta(delta)) - sum(count for _, count in before.parts)
    if low < last < high:  # ε jumps there, and a search for a jump is long
        low, high = (last + 1, high) if spent(last) <= epsilon else (low, last)
        if spent(low) > epsilon:
            return last
    near = _crossing(spent, epsilon, low, high)
    around = range(max(1, int(near * (1 - 2e-6))), int(near * (1 + 2e-6)) + 2)
    steps = around[0] + bisect_right(around, epsilon, key=spent) - 1
    while spent(steps) > epsilon:
        steps -= 1
    while spent(steps + 1) <= epsilon:
        steps += 1
    return steps


def _spent(before: Composed, mechanism: SampledGaussian, steps: int, delta: float | None, adjacency: str) -> float:
    everything = Composed((*before.parts, (mechanism, steps)))
    return epsilon_of(everything, 1, delta, "pld", adjacency).epsilon


def _check_target(epsilon: float, delta: float | None) -> None:
    check_delta(delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(f"epsilon = {epsilon} is reached by no noise; use a finite value above 0, such as 3.0")


def _bracket(
    spent: Callable[[float], float], target: float, *, guess: float, low: float, high: float
) -> tuple[float, float]:
    """Two values between `low` and `high` on either side of which the monotone `spent` meets `target`, by steps away
    from `guess`. At `low` and `high` it lies on different sides."""
    gap = _gap(spent, target)
    bottom, top = math.log(low), math.log(high)
    rising = gap(bottom) < 0
    near = min(max(math.log(guess), bottom), top)
    far = near
    while (gap(far) > 0) == (gap(near) > 0):
        # ε grows at least like the square root of steps, and falls at least like the inverse of noise.
        near, reach = far, 2 * abs(gap(far)) + 0.1
        far = min(max(near + (reach if (gap(near) < 0) == rising else -reach), bottom), top)
    return math.exp(near), math.exp(far)


def _crossing(spent: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where the monotone `spent` meets `target` between `low` and `high`: Brent's method on logarithms, as ε is nearly
    straight there."""
    from scipy.optimize import brentq

    return math.exp(float(brentq(_gap(spent, target), math.log(low), math.log(high), xtol=1e-6)))


def _gap(spent: Callable[[float], float], target: float) -> Callable[[float], float]:
    return lambda log_value: math.log(max(spent(math.exp(log_value)), 1e-12) / target)
