"""How long a learner's step takes, as a function of seed, learner and step."""

from __future__ import annotations

import math
import random

from adp2sgd import config


def step_seconds(speeds: config.Speeds, learners: int, seed: int, learner: int, step: int) -> float:
    """Compute time of one step of an asynchronous learner.

    `random-slow` (Case I): in each iteration one random learner is slow, so a learner's own step is slow with
    probability 1/learners.
    """
    if speeds.kind == "one-slow":
        return speeds.step_s * (speeds.factor if learner == speeds.learner else 1.0)
    if speeds.kind == "list":
        return speeds.step_s * speeds.values[learner]
    if speeds.kind == "constant":
        return speeds.step_s
    stream = random.Random(f"{seed}/delay/{learner}/{step}")
    if speeds.kind == "random-slow":
        return speeds.step_s * (speeds.factor if stream.random() < 1 / learners else 1.0)
    return speeds.step_s * math.exp(speeds.spread * stream.gauss(0.0, 1.0))


def round_seconds(speeds: config.Speeds, learners: int, seed: int, number: int) -> list[float]:
    """Each learner's compute time in one round of SYNC. `random-slow`: exactly one learner of the round is slow."""
    if speeds.kind == "random-slow":
        slow = random.Random(f"{seed}/round/{number}").randrange(learners)
        return [speeds.step_s * (speeds.factor if k == slow else 1.0) for k in range(learners)]
    return [step_seconds(speeds, learners, seed, k, number) for k in range(learners)]


def message_seconds(network: config.Network, payload_bytes: int) -> float:
    """From sending a message until it has arrived."""
    return network.latency_s + payload_bytes * 8 / network.bandwidth_bps


def all_reduce_seconds(network: config.Network, learners: int, payload_bytes: int) -> float:
    """A ring all-reduce: 2(K−1) messages in a row, each carrying 1/K of the vector."""
    return 2 * (learners - 1) * message_seconds(network, math.ceil(payload_bytes / learners))
