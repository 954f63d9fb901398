"""A learner's right to draw: a cap on its own steps, fixed before training, and a ledger charged before each draw."""

from __future__ import annotations


class Budget:
    """Placeholder."""

    exhausted = False

    def draw(self) -> None: ...
    def close(self) -> None: ...
    def figures(self) -> dict: ...
