"""Train one model across many sites that keep their data: asynchronous, decentralized, differentially private."""

from adp2sgd.config import Config, Data, Network, Optimizer, Privacy, Speeds, Topology, Warmup, load, loads
from adp2sgd.data.records import Records
from adp2sgd.engine import simulate, train
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
    "loads",
    "noise_for",
    "read_result",
    "simulate",
    "steps_for",
    "train",
]
