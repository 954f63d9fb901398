"""Engines drive the same Learner through virtual or real time."""

from adp2sgd.engine.local import train
from adp2sgd.engine.simulate import simulate

__all__ = ["simulate", "train"]
