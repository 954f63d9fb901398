"""Train one model across many sites that keep their data: asynchronous, decentralized, differentially private.

Names are loaded when they are first used: PyTorch takes seconds, and some commands do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adp2sgd.config import Config, Data, Network, Optimizer, Privacy, Speeds, Topology, Warmup, load, loads
    from adp2sgd.data.records import Records
    from adp2sgd.engine.processes.train import train
    from adp2sgd.engine.simulation.simulate import simulate
    from adp2sgd.errors import Adp2sgdError
    from adp2sgd.privacy.calibrate import noise_for, steps_for
    from adp2sgd.run_folder import Run, load_model, read_result
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
    "Run": "run_folder",
    "Task": "task",
    "load_model": "run_folder",
    "noise_for": "privacy.calibrate",
    "read_result": "run_folder",
    "simulate": "engine.simulation.simulate",
    "steps_for": "privacy.calibrate",
    "train": "engine.processes.train",
}  # all others: config


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
