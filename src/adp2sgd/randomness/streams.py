"""A learner's random streams, each with one purpose: batch, noise, augment, layers, epoch."""

from __future__ import annotations

from adp2sgd.randomness.noise import NoiseSource


class Streams:
    """`streams(purpose, number)` is the stream for one purpose at one of the learner's own steps (or epochs).

    Without a seed, all use one keystream with the operating system's entropy, and no draw repeats.
    With a seed (research only), each is a function of seed, learner, purpose and number, so that a run can be resumed
    at any step without storing a generator's state.
    """

    def __init__(self, seed: int | None, learner: int) -> None:
        self.seeded = seed is not None
        self._seed = seed
        self._learner = learner
        self._entropy = NoiseSource.fresh() if seed is None else None

    def __call__(self, purpose: str, number: int) -> NoiseSource:
        if self._entropy is not None:
            return self._entropy
        assert self._seed is not None
        return NoiseSource.from_seed(self._seed, self._learner, f"{purpose}/{number}")
