"""A run as data: frozen dataclasses, checked in our own words, read from and written to TOML.

One file serves every engine. `Config.to_toml()` writes every field that is set; `seed` and some of `privacy` are not by
default.
"""

from __future__ import annotations

import math
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adp2sgd.config.consortium import Consortium
from adp2sgd.config.optimizer import Optimizer
from adp2sgd.config.privacy import MEANINGLESS, Privacy
from adp2sgd.config.sections import Data, Network, Speeds, Topology
from adp2sgd.errors import ConfigError, did_you_mean
from adp2sgd.settings import Section, one_of, plain, put, require, section, shown, unset, value_of

ALGORITHMS = ("adpsgd", "sync")
PRECISIONS = ("float32", "bfloat16")


class FromFile(str):
    """A task's name that a file gives. `task.resolve` imports no code for it: the caller must name that code, by a
    string of his own. Copies of a configuration keep the type, because they keep the value."""

    __slots__ = ()


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
    checkpoint_every: float = 5.0  # epochs; 0: not by epochs
    checkpoint_every_s: float = 60.0  # real seconds; 0: not by time. Both 0: only when interrupted
    init_from: str | None = None  # a run's folder or a safetensors file, whose model all learners begin with
    init_public: bool = False  # the model of init_from was trained on public data only; for private mode
    options: Mapping[str, Any] = field(default_factory=dict)  # passed to the task's function
    topology: Topology = field(default_factory=Topology)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: Data = field(default_factory=Data)
    privacy: Privacy = field(default_factory=Privacy)
    speeds: Speeds = field(default_factory=Speeds)
    network: Network = field(default_factory=Network)
    consortium: Consortium = field(default_factory=Consortium)

    def _check(self) -> None:
        one_of("algorithm", self.algorithm, ALGORITHMS)
        one_of("precision", self.precision, PRECISIONS)
        require(1 <= self.learners <= 65_535, "learners", self.learners, "use at least 1, and 65,535 at most")
        require(0 < self.epochs < math.inf, "epochs", self.epochs, "use a positive number")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "use at least 1")
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "use 0 or more, below 2^63")
        require(self.evaluate_every > 0, "evaluate_every", self.evaluate_every, "use a positive number of epochs")
        require(self.checkpoint_every >= 0, "checkpoint_every", self.checkpoint_every, "use 0 or more epochs")
        require(self.checkpoint_every_s >= 0, "checkpoint_every_s", self.checkpoint_every_s, "use 0 or more seconds")
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
        return self.changed(settings)[0]

    def changed(self, settings: Iterable[str]) -> tuple[Config, list[str]]:
        """As `with_settings`, with notes. `a.b=` unsets a field. A new `privacy.mode` drops the fields of the other
        modes, and the notes name them."""
        raw, given = self.to_dict(), set()
        for setting in settings:
            key, found, text = setting.partition("=")
            if not found:
                raise ConfigError(f'--set {setting} has no "="; write --set a.b=value')
            given.add(key.strip())
            if text.strip():
                put(raw, key.strip(), value_of(text.strip()))
            else:
                _check_key(key.strip())
                unset(raw, key.strip())
        notes = _drop_other_modes(raw["privacy"], given) if "privacy.mode" in given and "privacy" in raw else []
        return from_dict(raw), notes


def _drop_other_modes(privacy: dict[str, Any], given: set[str]) -> list[str]:
    """Remove what means nothing in the mode, unless it was given beside it; returns a note."""
    mode = privacy.get("mode", Privacy.mode)
    others = [name for name in MEANINGLESS.get(mode, ()) if privacy.get(name, getattr(Privacy, name)) is not None]
    dropped = [name for name in others if f"privacy.{name}" not in given]
    changed = [name for name in dropped if privacy.pop(name, None) not in (None, getattr(Privacy, name))]
    if not changed:
        return []
    return [f'privacy.mode = "{mode}" drops {", ".join(f"privacy.{name}" for name in changed)}']


def _check_key(key: str) -> None:
    known = keys()
    if key not in known and not key.startswith("options."):
        raise ConfigError(f"--set {key}= unsets a key that is unknown{did_you_mean(key, known)}; correct its name")


def keys() -> list[str]:
    """Every field of a configuration as `--set` names it."""
    return sorted(_fields(Config, ""))


def _fields(kind: type[Section], path: str) -> Iterable[str]:
    for name, hint in typing.get_type_hints(kind).items():
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from _fields(hint, f"{path}{name}.")
        elif name != "WHERE":
            yield path + name.rstrip("_")


def load_config(path: str | Path) -> Config:
    """The configuration in a TOML file. Where it names a task of one's own, `Config.replace(task=…)` must name it too
    before anything is imported."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file; give the path of a TOML file") from None
    return loads_config(text, str(path))


def loads_config(text: str, name: str = "configuration") -> Config:
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
    return differing(one.to_toml(), other.to_toml())


def differing(one: str, other: str) -> tuple[str, str, str] | None:
    """As `difference`, of two TOML texts; one may be of another release. Raises ValueError for what is no TOML."""
    first, second = (_leaves(tomllib.loads(each)) for each in (one, other))
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
