"""Our PLD accountant beside dp-accounting's: ε, and seconds for one answer, in one run.

    python benchmarks/accountant.py [--json]

dp-accounting is asked at its default grid (1e-4); ours picks its grid itself. Both round up, so of two right answers
the lower one is the tighter; RDP's bound, which needs no grid, stands beside them.
"""

from __future__ import annotations

import argparse
import json
import logging
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
]


def library(rate: float, noise: float, steps: int, delta: float, grid: float) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    account = PLDAccountant(value_discretization_interval=grid)
    return float(account.compose(event, steps).get_epsilon(delta))


def timed(function: Any, *arguments: Any) -> tuple[float, float]:
    start = time.perf_counter()
    return float(function(*arguments)), time.perf_counter() - start


def ours(rate: float, noise: float, steps: int, delta: float) -> float:
    return accountant.epsilon(SampledGaussian(noise, rate), steps, delta).epsilon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows = []
    for rate, noise, steps, delta in POINTS:
        row: dict[str, Any] = {"rate": rate, "noise_multiplier": noise, "steps": steps, "delta": delta}
        row["ours"], row["ours_s"] = timed(ours, rate, noise, steps, delta)
        row["dp_accounting"], row["dp_accounting_s"] = timed(library, rate, noise, steps, delta, 1e-4)
        row["rdp"] = accountant.epsilon(SampledGaussian(noise, rate), steps, delta, "rdp").epsilon
        rows.append(row)
        if not chosen.json:
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    if chosen.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
