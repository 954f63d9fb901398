"""A learner's process from its order to its exit code."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch

from adp2sgd.data.indexed import attached, in_thread, start_reading
from adp2sgd.device import keep_large_blocks
from adp2sgd.engine.compute import Compute, pick_device
from adp2sgd.engine.processes.allreduce import SyncWorker
from adp2sgd.engine.processes.control import Place, last_words, line_of
from adp2sgd.engine.processes.handover import unpack
from adp2sgd.engine.processes.worker import ProcessWorker
from adp2sgd.engine.site import Site
from adp2sgd.errors import Adp2sgdError, withholding
from adp2sgd.exchange.shared import Post
from adp2sgd.run_folder import Folder

SWITCH_S = 0.0005  # how long Python's training thread may keep the exchange thread from answering
FAILED = 3  # exit code: the error was reported, and a restart would not help
WORKERS: dict[str, type[ProcessWorker]] = {"adpsgd": ProcessWorker, "sync": SyncWorker}


def live(order: dict[str, Any], memories: list[int], task: int, records: int) -> int:
    """The life of learner `order["learner"]`. Returns the exit code of its process.

    Descriptors: `memories` of all learners, for exchanges; `task` and this site's `records`, made by `handover.pack`.
    """
    place = Place(learner=order["learner"], start=order["start"], mail=order["mail"], descriptors=memories)
    posts = Post(place.mail, str(place.learner)), Post(place.mail, line_of(place.learner))
    try:
        with withholding(order["private"]):
            plan, shared = unpack(task)
            name, own, largest_shard = unpack(records)
            train = attached(own, shared.train)
            start_reading(train)
            site = Site(plan, place.learner, name, replace(shared, train=train, test=in_thread(shared.test)))
            sys.setswitchinterval(SWITCH_S)
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // plan.config.learners))
            compute = Compute(plan, site.task, _device(plan.config.device, place.learner), largest_shard=largest_shard)
            worker = WORKERS[plan.config.algorithm](site, compute, Folder.open(order["folder"]), place, posts, order)
            keep_large_blocks()
            worker.live()
    except Adp2sgdError as error:
        facts = {"learner": place.learner, "start": place.start, "error": str(error), "kind": type(error).__name__}
        last_words(posts[1], facts)
        return FAILED
    return 0


def _device(name: str, learner: int) -> torch.device:
    """Learners share the GPUs in turn, unless the configuration names one."""
    if name in {"auto", "cuda"} and torch.cuda.is_available():
        name = f"cuda:{learner % torch.cuda.device_count()}"
    return pick_device(name)
