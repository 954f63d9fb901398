"""Train one model across many sites that keep their data: asynchronous, decentralized, differentially private.

Names are loaded when they are first used: PyTorch takes seconds, and some commands do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adp2sgd.config import Config, Data, Network, Optimizer, Privacy, Speeds, Topology, Warmup, load, loads
    from adp2sgd.data.records import Records
    from adp2sgd.engine.local import train
    from adp2sgd.engine.setup import load_model
    from adp2sgd.engine.simulate import simulate
    from adp2sgd.errors import Adp2sgdError
    from adp2sgd.privacy.calibrate import noise_for, steps_for
    from adp2sgd.record import Run, read_result
    from adp2sgd.task import Task

__all__ = [
    "Adp2sgdError",
    "Config",
    "Data",
    "Network",
    "Optimizer",
    "Privacy",
    "Records",
    "Run",
    "Speeds",
    "Task",
    "Topology",
    "Warmup",
    "load",
    "load_model",
    "loads",
    "noise_for",
    "read_result",
    "simulate",
    "steps_for",
    "train",
]

_HOMES = {
    "Adp2sgdError": "errors",
    "Records": "data.records",
    "Run": "record",
    "Task": "task",
    "load_model": "engine.setup",
    "noise_for": "privacy.calibrate",
    "read_result": "record",
    "simulate": "engine.simulate",
    "steps_for": "privacy.calibrate",
    "train": "engine.local",
}  # all others: config


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
