"""A learner's process from its order to its exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from adp2sgd.config import Config, fingerprint
from adp2sgd.device import keep_large_blocks
from adp2sgd.engine.allreduce import SyncWorker
from adp2sgd.engine.exchanger import Place
from adp2sgd.engine.setup import prepare
from adp2sgd.engine.worker import Worker, last_words, who
from adp2sgd.errors import Adp2sgdError, RunError, withholding
from adp2sgd.exchange.shared import Post
from adp2sgd.record import Folder

SWITCH_S = 0.0005  # how long Python's training thread may keep the exchange thread from answering
FAILED = 3  # exit code: the error was reported, and a restart would not help
WORKERS: dict[str, type[Worker]] = {"adpsgd": Worker, "sync": SyncWorker}


def live(order: dict[str, Any]) -> int:
    """The life of learner `order["learner"]`. Returns the exit code of its process."""
    place = Place(**{name: order[name] for name in ("learner", "start", "mail", "descriptors")})
    post = Post(place.mail, str(place.learner))
    try:
        with withholding(order["private"]):
            _work(order, place, post)
    except Adp2sgdError as error:
        last_words(post, {**who(place), "state": "failed", "error": str(error), "kind": type(error).__name__})
        return FAILED
    return 0


def _work(order: dict[str, Any], place: Place, post: Post) -> None:
    folder = Folder.open(order["folder"])
    config = on_device(_checked(folder, order["config"]), place.learner)
    sys.setswitchinterval(SWITCH_S)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // config.learners))
    setup = prepare(config, order["seed"])
    worker = WORKERS[config.algorithm](setup, folder, place, post, order)
    keep_large_blocks()
    worker.live()


def _checked(folder: Folder, wanted: str) -> Config:
    """The folder's configuration, which must be the supervisor's. So the code that it names was named by the caller."""
    config = folder.settings
    if fingerprint(config) != wanted:
        raise RunError(f"{folder.path / 'config.toml'} has changed since the run began; restore it and use --resume")
    return config.replace(task=str(config.task))


def on_device(config: Config, learner: int) -> Config:
    """Learners share the GPUs in turn, unless the configuration names one."""
    if config.device in {"auto", "cuda"} and torch.cuda.is_available():
        return config.replace(device=f"cuda:{learner % torch.cuda.device_count()}")
    return config
