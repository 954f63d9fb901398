"""Our PLD accountant beside dp-accounting's: ε, and CPU seconds for one answer, in one run.

    python benchmarks/accountant.py [--json]

dp-accounting is asked at its default grid (1e-4); ours picks its grid itself. Both round up, so of two right answers
the lower one is the tighter; our lower bound and RDP's bound, which needs no grid, stand beside them. dp-accounting
takes tens of GiB, or answers by its grid alone, at the smallest rates and is not asked there. The last figure is the
largest memory that our answers took.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import time
import warnings
from typing import Any

from adp2sgd.privacy import accountant
from adp2sgd.privacy.mechanism import SampledGaussian

POINTS = [  # (rate, noise multiplier, steps, delta)
    (0.08192, 1.0, 3662, 1e-5),
    (0.08192, 2.0, 3662, 1e-5),
    (0.01, 1.0, 10_000, 1e-5),
    (1e-4, 1.0, 1_000_000, 1e-8),
    (1e-4, 50.0, 1_000_000, 1e-5),
    (1e-6, 0.6, 3_000_000, 1e-8),
    (1e-9, 0.3, 100_000_000, 1e-12),
    (1e-7, 0.5, 100_000_000, 1e-12),
    (1e-9, 100.0, 100_000_000, 1e-12),
]
LEAST_LIBRARY_RATE = 1e-4


def library(rate: float, noise: float, steps: int, delta: float, grid: float) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    account = PLDAccountant(value_discretization_interval=grid)
    return float(account.compose(event, steps).get_epsilon(delta))


def timed(function: Any, *arguments: Any) -> tuple[Any, float]:
    start = time.process_time()
    return function(*arguments), time.process_time() - start


def ours(rate: float, noise: float, steps: int, delta: float) -> accountant.Spent:
    return accountant.epsilon(SampledGaussian(noise, rate), steps, delta)


def compared(rate: float, noise: float, steps: int, delta: float) -> dict[str, Any]:
    row: dict[str, Any] = {"rate": rate, "noise_multiplier": noise, "steps": steps, "delta": delta}
    spent, row["ours_s"] = timed(ours, rate, noise, steps, delta)
    row["ours"], row["ours_lower"] = spent.epsilon, spent.epsilon_lower
    row["ours_most_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    row["rdp"] = accountant.epsilon(SampledGaussian(noise, rate), steps, delta, "rdp").epsilon
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    ours(0.1, 1.0, 1, 1e-5)  # imports
    rows = [compared(*point) for point in POINTS]  # before the library, whose memory would count
    for row, point in zip(rows, POINTS, strict=True):
        if point[0] >= LEAST_LIBRARY_RATE:
            row["dp_accounting"], row["dp_accounting_s"] = timed(library, *point, 1e-4)
        if not chosen.json:
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    if chosen.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
