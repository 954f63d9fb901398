"""A run as data: frozen dataclasses, checked in our own words, read from and written to TOML.

One file serves every engine. `Config.to_toml()` writes every field that is set; `seed` and some of `privacy` are not by
default.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from adp2sgd.errors import ConfigError
from adp2sgd.settings import Section, one_of, plain, put, require, section, shown, value_of

ALGORITHMS = ("adpsgd", "sync")
PARTNERS = ("neighbour", "sender-receiver")
PARTITIONS = ("iid", "dirichlet", "site")
MODES = ("private", "paper", "none")
ADJACENCIES = ("add-remove", "replace-one")
PRIVATE_ONLY = ("clip_quantile", "clip_rate", "count_noise", "copies", "engine", "fixed_work")
MOST_RATE = 1e30  # beyond it float32 has no numbers for a step
LEAST_EPSILON, LEAST_MULTIPLIER = 1e-12, 0.01  # less is a slip: nothing could be learned, or nothing is hidden
GRADIENT_ENGINES = ("auto", "loop")
PRECISIONS = ("float32", "bfloat16")
SPEEDS = ("constant", "one-slow", "random-slow", "log-normal", "list")


class FromFile(str):
    """A task's name that a file gives. `task.resolve` imports no code for it: the caller must name that code, by a
    string of his own. Copies of a configuration keep the type, because they keep the value."""

    __slots__ = ()


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
class Warmup(Section):
    """Linear from `from_` (in TOML: from) to `optimizer.lr` over the first `epochs`."""

    WHERE: ClassVar[str] = "optimizer.warmup."

    epochs: float = 0.0
    from_: float = 0.0

    def _check(self) -> None:
        require(self.epochs >= 0, "optimizer.warmup.epochs", self.epochs, "use 0 or more")
        require(0 <= self.from_ <= MOST_RATE, "optimizer.warmup.from", self.from_, "use 0 or more")


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """SGD. The learning rate is a function of global progress in epochs."""

    WHERE: ClassVar[str] = "optimizer."

    lr: float = 0.1
    schedule: tuple[tuple[float, float], ...] = ()  # (from epoch … on, rate)
    warmup: Warmup = field(default_factory=Warmup)
    decay: float = 1.0  # factor per epoch after the warm-up
    momentum: float = 0.0
    weight_decay: float = 0.0

    def _check(self) -> None:
        require(0 < self.lr <= MOST_RATE, "optimizer.lr", self.lr, "use a positive number, like 0.1")
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "use a number in [0, 1)")
        require(0 <= self.weight_decay <= MOST_RATE, "optimizer.weight_decay", self.weight_decay, "use 0 or more")
        require(0 < self.decay <= 1, "optimizer.decay", self.decay, "use a number in (0, 1]")
        epochs = [epoch for epoch, _ in self.schedule]
        require(
            epochs == sorted(epochs) and all(e >= 0 and 0 < lr <= MOST_RATE for e, lr in self.schedule),
            "optimizer.schedule",
            [list(pair) for pair in self.schedule],
            "list [epoch, rate] pairs in order of epoch, with positive rates",
        )

    def rate(self, epoch: float) -> float:
        """The learning rate at a global epoch: steps if `schedule` says so, else warm-up and then geometric decay."""
        past = [lr for start, lr in self.schedule if epoch >= start]
        if past:
            return past[-1]
        if epoch < self.warmup.epochs:
            return self.warmup.from_ + (self.lr - self.warmup.from_) * epoch / self.warmup.epochs
        return self.lr * math.pow(self.decay, epoch - self.warmup.epochs)


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """How the training records are split among the learners."""

    WHERE: ClassVar[str] = "data."

    partition: str = "iid"
    alpha: float = 0.5  # dirichlet: small = each learner sees few labels
    sizes: tuple[float, ...] = ()  # iid: relative sizes of the shards, one per learner; equal if empty

    def _check(self) -> None:
        one_of("data.partition", self.partition, PARTITIONS)
        require(0 < self.alpha <= 1e6, "data.alpha", self.alpha, "use a positive number; 1e6 is as good as iid")
        require(all(0 < s < math.inf for s in self.sizes), "data.sizes", list(self.sizes), "use positive numbers")
        if self.sizes and self.partition != "iid":
            raise ConfigError(
                f'data.sizes goes with data.partition = "iid", not "{self.partition}"; remove one of them'
            )


@dataclass(frozen=True, kw_only=True)
class Privacy(Section):
    """`private`: clipped, noised, accounted. `paper`: the paper's noise, no guarantee. `none`: no noise."""

    WHERE: ClassVar[str] = "privacy."

    mode: str = "none"
    epsilon: float | None = None
    # What ε follows from: noise on the sum in units of clip_norm; with clip_quantile that of sum and count together, so
    # that the sum gets a little more.
    noise_multiplier: float | None = None
    sigma: float | None = None  # noise on the unclipped sum, absolute (paper)
    delta: float | None = None
    clip_norm: float = 1.0  # bound on a record's gradient; with clip_quantile, where it starts
    clip_quantile: float | None = None  # the bound follows this quantile of the gradients' norms; unset: it stays
    clip_rate: float = 0.2  # how fast: if all norms lie above it, a step multiplies it by exp(clip_rate·clip_quantile)
    count_noise: float | None = None  # noise on the count of norms under the bound, absolute; unset: batch_size / 20
    engine: str = "auto"  # or "loop": record by record, slow, for neighbours who may send weights made to harm
    fixed_work: bool = False  # every step does the same work whatever its batch, so that its time tells nothing
    copies: int = 1  # augmented copies of each record in a batch; their mean gradient is clipped
    adjacency: str = "add-remove"
    ledger: str | None = None  # a folder: sites' ledgers across runs; unset: each run keeps its own
    dataset: str | None = None  # the data's name in that ledger; unset: the task's family, as in "heart"
    # Runs that share that ledger's ε: each takes at most one such part of it. Unset: a run may take all that is left.
    # 1 at a ledger's first run: all runs will have that one's noise and rate, which ε serves best.
    runs: int | None = None
    headroom: float = 1.25  # a learner's cap on steps = its planned steps × headroom, unless epsilon and noise fix it

    def _check(self) -> None:
        one_of("privacy.mode", self.mode, MODES)
        one_of("privacy.adjacency", self.adjacency, ADJACENCIES)
        one_of("privacy.engine", self.engine, GRADIENT_ENGINES)
        require(self.clip_norm > 0, "privacy.clip_norm", self.clip_norm, "use a positive number")
        require(1 <= self.headroom < math.inf, "privacy.headroom", self.headroom, "use 1 or more")
        require(self.copies >= 1, "privacy.copies", self.copies, "use 1 or more")
        require(0 < self.clip_rate < math.inf, "privacy.clip_rate", self.clip_rate, "use a positive number, like 0.2")
        fix = f"use a positive number, {LEAST_EPSILON:g} at least"
        require(self.epsilon is None or self.epsilon >= LEAST_EPSILON, "privacy.epsilon", self.epsilon, fix)
        require(self.sigma is None or self.sigma >= 0, "privacy.sigma", self.sigma, "use 0 or more")
        {"private": self._check_private, "paper": self._check_paper, "none": self._check_none}[self.mode]()

    def _check_private(self) -> None:
        if self.sigma is not None:
            raise ConfigError('privacy.sigma belongs to mode = "paper"; in mode = "private" set noise_multiplier')
        if self.epsilon is None and self.noise_multiplier is None:
            raise ConfigError('privacy.mode = "private" needs privacy.epsilon or privacy.noise_multiplier; set one')
        if self.noise_multiplier is not None:
            fix = f"no noise gives no guarantee: use a positive number, {LEAST_MULTIPLIER:g} at least"
            require(self.noise_multiplier >= LEAST_MULTIPLIER, "privacy.noise_multiplier", self.noise_multiplier, fix)
        if self.delta is None:
            raise ConfigError("privacy.delta is missing; set it well below 1/(records of the largest learner)")
        require(0 < self.delta < 1, "privacy.delta", self.delta, "use a number in (0, 1), below 1/records")
        require(self.runs is None or self.runs >= 1, "privacy.runs", self.runs, "use 1 or more")
        fix = "it divides the ε of a ledger that lasts over runs: set privacy.ledger, or remove it"
        require(self.runs is None or self.ledger is not None, "privacy.runs", self.runs, fix)
        self._check_adaptive()

    def _check_adaptive(self) -> None:
        quantile, noise = self.clip_quantile, self.count_noise
        fix = "use a number between 0 and 1, like 0.5"
        require(quantile is None or 0 < quantile < 1, "privacy.clip_quantile", quantile, fix)
        require(noise is None or 0 < noise < math.inf, "privacy.count_noise", noise, "use a positive number")
        for name in ("count_noise", "clip_rate"):
            if quantile is None and getattr(self, name) != getattr(Privacy, name):
                raise ConfigError(
                    f"privacy.{name} = {getattr(self, name)} means nothing without privacy.clip_quantile; set that or "
                    "remove it"
                )

    def noise_on_count(self, batch_size: int) -> float | None:
        """Standard deviation of the noise on the count of norms under the bound; None where nothing is counted."""
        if self.clip_quantile is None:
            return None
        return batch_size / 20 if self.count_noise is None else self.count_noise

    def _check_paper(self) -> None:
        if self.sigma is None:
            raise ConfigError('privacy.mode = "paper" needs privacy.sigma (0 for the paper\'s baseline)')
        self._refuse("paper", (*PRIVATE_ONLY, "epsilon", "delta", "noise_multiplier"))

    def _check_none(self) -> None:
        self._refuse("none", (*PRIVATE_ONLY, "epsilon", "delta", "noise_multiplier", "sigma"))

    def _refuse(self, mode: str, names: Iterable[str]) -> None:
        for name in names:
            if getattr(self, name) != getattr(Privacy, name):  # the default
                raise ConfigError(
                    f'privacy.{name} = {getattr(self, name)} means nothing in mode = "{mode}", which gives no '
                    'guarantee; remove it or set privacy.mode = "private"'
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


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """One run, for every engine."""

    task: str = "digits/mlp"
    algorithm: str = "adpsgd"
    learners: int = 8
    epochs: float = 20.0  # global: all learners' records together
    batch_size: int = 32  # expected, per learner
    seed: int | None = None  # fixes everything, the noise included: for research only
    device: str = "auto"
    precision: str = "float32"  # bfloat16: layers run in it, and fast kernels are used; sums and noise stay as they are
    compile: bool = False  # on a GPU, outside private mode: layers fused by torch.compile, after a minute's wait
    evaluate_every: float = 1.0  # epochs
    checkpoint_every: float = 5.0  # epochs; 0: only when interrupted
    options: Mapping[str, Any] = field(default_factory=dict)  # passed to the task's function
    topology: Topology = field(default_factory=Topology)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: Data = field(default_factory=Data)
    privacy: Privacy = field(default_factory=Privacy)
    speeds: Speeds = field(default_factory=Speeds)
    network: Network = field(default_factory=Network)

    def _check(self) -> None:
        one_of("algorithm", self.algorithm, ALGORITHMS)
        one_of("precision", self.precision, PRECISIONS)
        require(1 <= self.learners <= 65_535, "learners", self.learners, "use at least 1, and 65,535 at most")
        require(0 < self.epochs < math.inf, "epochs", self.epochs, "use a positive number")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "use at least 1")
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "use 0 or more, below 2^63")
        require(self.evaluate_every > 0, "evaluate_every", self.evaluate_every, "use a positive number of epochs")
        require(self.checkpoint_every >= 0, "checkpoint_every", self.checkpoint_every, "use 0 or more epochs")
        require(
            self.speeds.kind != "one-slow" or 0 <= self.speeds.learner < self.learners,
            "speeds.learner",
            self.speeds.learner,
            f"learners are numbered 0 to {self.learners - 1}",
        )
        for key, values in (("speeds.values", self.speeds.values), ("data.sizes", self.data.sizes)):
            needed = bool(values) or (key == "speeds.values" and self.speeds.kind == "list")
            fix = f"give {self.learners} numbers, one per learner"
            require(not needed or len(values) == self.learners, key, list(values), fix)

    def to_dict(self) -> dict[str, Any]:
        """Every field, defaults included; fields that are unset (None) are left out, as TOML has no null."""
        tables: dict[str, Any] = plain(self)
        return tables

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    def with_settings(self, settings: Iterable[str]) -> Config:
        """A copy changed by `a.b=value` settings; values are TOML, a bare word is a string, and .5 is 0.5."""
        raw = self.to_dict()
        for setting in settings:
            key, found, text = setting.partition("=")
            if not found:
                raise ConfigError(f'--set {setting} has no "="; write --set a.b=value')
            put(raw, key.strip(), value_of(text.strip()))
        return from_dict(raw)


def load(path: str | Path) -> Config:
    """The configuration in a TOML file. Where it names a task of one's own, `Config.replace(task=…)` must name it too
    before anything is imported."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file; give the path of a TOML file") from None
    return loads(text, str(path))


def loads(text: str, name: str = "configuration") -> Config:
    """The configuration in a TOML text."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    if isinstance(raw.get("task"), str):
        raw["task"] = FromFile(raw["task"])
    return from_dict(raw)


def naming(config: Config, task: str | None) -> Config:
    """The configuration whose task the caller names as well: code that a file alone names is never imported."""
    if task is None:
        return config
    if task != config.task:
        raise ConfigError(f'the configuration has task = "{config.task}", not "{task}"; name the one that you trust')
    return config.replace(task=task)


def from_dict(raw: Mapping[str, Any]) -> Config:
    """The configuration in nested tables, as `tomllib` gives them."""
    return section(Config, raw)


def difference(one: Config, other: Config) -> tuple[str, str, str] | None:
    """The first key at which two configurations differ, and both values in words; None if they are equal."""
    first, second = (_leaves(tomllib.loads(each.to_toml())) for each in (one, other))
    for key in sorted(first.keys() | second.keys()):
        if first.get(key) != second.get(key):
            values = [shown(each[key]) if key in each else "(unset)" for each in (first, second)]
            return key, values[0], values[1]
    return None


def _leaves(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _leaves(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return found
