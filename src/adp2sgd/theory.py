"""Placeholder until the theory file arrives."""

import math


def rho_bar(rho: float, learners: int) -> float:
    root = math.sqrt(rho)
    return (learners - 1) / learners * (1 / (1 - rho) + 2 * root / (1 - root) ** 2)
