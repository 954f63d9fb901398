"""Steps whose work does not depend on the batch: how many rows they have, and how much of δ that costs.

Every step has M rows. A smaller batch is filled up, a larger one is cut to its first M records. Let `overflow` be at
least the probability that a batch has more than M records. Steps with and without the cut release the same unless a
batch is cut, which happens with probability at most T · overflow in T steps. So for each data set the two distributions
of all releases are that close in total variation. Where the steps without the cut are (ε, δ₀)-private, those with it
are (ε, δ₀ + (1 + e^ε) · T · overflow)-private. How long a step takes then adds nothing to what it releases.

M, and all that it is computed from, is public: the sample rate, the number of records, the cap on steps, ε and δ.
"""

from __future__ import annotations

import math
from bisect import bisect_left

SHARE = 0.01
"""The part of δ that the cut batches of one run may cost."""
LATER = 10.0
"""A cut costs a factor e^ε, and later runs on the same data raise ε. So the share holds up to at least this ε."""
MOST_EXPONENT = 600.0


def cost(epsilon: float, overflow: float) -> float:
    """The part of δ that cut batches cost at this ε, where `overflow` bounds the probability of any cut."""
    return overflow and (1 + math.exp(min(epsilon, MOST_EXPONENT))) * overflow


def overflow_for(epsilon: float, delta: float, steps: int) -> float:
    """The probability, per step, that a batch may be cut: `steps` of them cost at most SHARE of `delta`."""
    whole = SHARE * delta / (1 + math.exp(min(max(epsilon, LATER), MOST_EXPONENT)))
    return float(f"{0.99 * whole / steps:.2e}")  # few digits, for the ledger; never rounded above the share


def rows_for(records: int, sample_rate: float, overflow: float) -> int:
    """M: the fewest rows that a Poisson batch of `records` records exceeds with probability at most `overflow`."""
    from scipy.special import betainc

    def rarely_exceeded(rows: int) -> bool:
        return bool(betainc(rows + 1, records - rows, sample_rate) <= overflow)  # the binomial distribution's tail

    return bisect_left(range(records), True, key=rarely_exceeded)
