"""Train one model across many sites that keep their data: asynchronous, decentralized, differentially private.

Names are loaded when they are first used: PyTorch takes seconds, and some commands do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adp2sgd.callbacks import EarlyStopping, MLflow, SaveBest, TensorBoard
    from adp2sgd.config import (
        Config,
        Data,
        Network,
        Optimizer,
        Privacy,
        Speeds,
        Topology,
        Warmup,
        load_config,
        loads_config,
    )
    from adp2sgd.data.indexed import as_records
    from adp2sgd.data.records import Records
    from adp2sgd.engine.processes.train import train
    from adp2sgd.engine.simulation.simulate import simulate
    from adp2sgd.engine.status import LearnerStatus, RunStatus
    from adp2sgd.errors import (
        Adp2sgdError,
        ConfigError,
        DataError,
        DivergedError,
        InterruptedRunError,
        LedgerError,
        PrivacyError,
        RunError,
        StopRun,
    )
    from adp2sgd.model_folder import Model, load_model
    from adp2sgd.models.norm import without_batchnorm
    from adp2sgd.privacy.calibrate import epsilon, noise_for, steps_for
    from adp2sgd.privacy.mechanism import Guarantee
    from adp2sgd.run_folder import Run, read_result
    from adp2sgd.task import Task

__all__ = [
    "Adp2sgdError",
    "Config",
    "ConfigError",
    "Data",
    "DataError",
    "DivergedError",
    "EarlyStopping",
    "Guarantee",
    "InterruptedRunError",
    "LearnerStatus",
    "LedgerError",
    "MLflow",
    "Model",
    "Network",
    "Optimizer",
    "Privacy",
    "PrivacyError",
    "Records",
    "Run",
    "RunError",
    "RunStatus",
    "SaveBest",
    "Speeds",
    "StopRun",
    "Task",
    "TensorBoard",
    "Topology",
    "Warmup",
    "as_records",
    "epsilon",
    "load_config",
    "load_model",
    "loads_config",
    "noise_for",
    "read_result",
    "simulate",
    "steps_for",
    "train",
    "without_batchnorm",
]

_HOMES = {
    "Adp2sgdError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "DivergedError": "errors",
    "EarlyStopping": "callbacks",
    "Guarantee": "privacy.mechanism",
    "InterruptedRunError": "errors",
    "LearnerStatus": "engine.status",
    "LedgerError": "errors",
    "MLflow": "callbacks",
    "PrivacyError": "errors",
    "Model": "model_folder",
    "Records": "data.records",
    "Run": "run_folder",
    "RunError": "errors",
    "RunStatus": "engine.status",
    "SaveBest": "callbacks",
    "StopRun": "errors",
    "Task": "task",
    "TensorBoard": "callbacks",
    "as_records": "data.indexed",
    "epsilon": "privacy.calibrate",
    "load_model": "model_folder",
    "noise_for": "privacy.calibrate",
    "read_result": "run_folder",
    "simulate": "engine.simulation.simulate",
    "steps_for": "privacy.calibrate",
    "train": "engine.processes.train",
    "without_batchnorm": "models.norm",
}  # all others: config


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
