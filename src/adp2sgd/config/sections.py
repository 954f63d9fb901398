"""The smaller tables of a configuration: topology, data, speeds, network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from adp2sgd.errors import ConfigError
from adp2sgd.settings import Section, one_of, require

PARTNERS = ("neighbour", "sender-receiver")
PARTITIONS = ("auto", "iid", "dirichlet", "site")
SPEEDS = ("constant", "one-slow", "random-slow", "log-normal", "list")


@dataclass(frozen=True, kw_only=True)
class Topology(Section):
    """Who may talk to whom, and how a learner picks its partner."""

    WHERE: ClassVar[str] = "topology."

    graph: str = "ring"
    partner: str = "neighbour"
    degree: int = 4  # random-regular only
    edges: tuple[tuple[int, int], ...] = ()  # graph = "edges"
    exchanges: int = 1  # that an initiator starts per step, one after the other

    def _check(self) -> None:
        one_of("topology.partner", self.partner, PARTNERS)
        require(self.exchanges >= 1, "topology.exchanges", self.exchanges, "use at least 1")
        require(self.degree >= 1, "topology.degree", self.degree, "use at least 1")
        if self.edges and self.graph not in ("edges", Topology.graph):
            raise ConfigError(
                f'topology.edges goes with topology.graph = "edges", not "{self.graph}"; remove one of them'
            )
        if self.edges:
            object.__setattr__(self, "graph", "edges")


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """How the training records are split among the learners."""

    WHERE: ClassVar[str] = "data."

    partition: str = "auto"  # "site" where the data have sites, else "iid"
    alpha: float = 0.5  # dirichlet: small = each learner sees few labels
    sizes: tuple[float, ...] = ()  # iid: relative sizes of the shards, one per learner; equal if empty
    workers: int = 0  # processes that read a dataset ahead of the steps: in `simulate` in all, in `train` per learner

    def _check(self) -> None:
        one_of("data.partition", self.partition, PARTITIONS)
        require(0 < self.alpha <= 1e6, "data.alpha", self.alpha, "use a positive number; 1e6 is as good as iid")
        require(0 <= self.workers <= 256, "data.workers", self.workers, "use 0 (a thread) up to 256 processes")
        require(all(0 < s < math.inf for s in self.sizes), "data.sizes", list(self.sizes), "use positive numbers")
        if self.sizes and self.partition == "auto":
            object.__setattr__(self, "partition", "iid")
        if self.sizes and self.partition != "iid":
            raise ConfigError(
                f'data.sizes goes with data.partition = "iid", not "{self.partition}"; remove one of them'
            )


@dataclass(frozen=True, kw_only=True)
class Speeds(Section):
    """How long a learner's step takes: virtual seconds in the simulator, injected slowness in real engines.

    Real engines stretch a step by its factor, or with `pad` to `step_s` seconds times its factor; they only sleep.
    """

    WHERE: ClassVar[str] = "speeds."

    kind: str = "constant"
    step_s: float = 1.0  # a normal step
    factor: float = 10.0  # one-slow: the slow learner's; random-slow: the random learner's
    learner: int = 0  # one-slow: who
    spread: float = 0.2  # log-normal: standard deviation of the logarithm
    values: tuple[float, ...] = ()  # list: each learner's factor
    pad: bool = False  # real engines: every step takes step_s seconds, as in the simulator

    def _check(self) -> None:
        one_of("speeds.kind", self.kind, SPEEDS)
        require(0 < self.step_s < math.inf, "speeds.step_s", self.step_s, "use a positive number of seconds")
        require(0 < self.factor < math.inf, "speeds.factor", self.factor, "use a positive number")
        require(0 <= self.spread <= 10, "speeds.spread", self.spread, "use 0 or more, 10 at most")
        require(all(0 < v < math.inf for v in self.values), "speeds.values", list(self.values), "use positive numbers")
        if self.values and self.kind != "list":
            raise ConfigError(
                f'speeds.values goes with speeds.kind = "list", not "{self.kind}"; set that or remove them'
            )


@dataclass(frozen=True, kw_only=True)
class Network(Section):
    """The links of a simulation, all alike."""

    WHERE: ClassVar[str] = "network."

    latency_s: float = 0.0
    bandwidth_bps: float = math.inf

    def _check(self) -> None:
        require(0 <= self.latency_s < math.inf, "network.latency_s", self.latency_s, "use 0 or more seconds")
        require(self.bandwidth_bps > 0, "network.bandwidth_bps", self.bandwidth_bps, "use a positive number or inf")
