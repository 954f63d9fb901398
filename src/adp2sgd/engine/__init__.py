"""Engines drive the same Learner through virtual or real time."""

from adp2sgd.engine.processes.train import train
from adp2sgd.engine.simulation.simulate import simulate

__all__ = ["simulate", "train"]
