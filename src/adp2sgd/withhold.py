"""Errors of a private step, told without values of records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from adp2sgd.errors import WITHHELD, RunError, kind
from adp2sgd.task import Task


@contextmanager
def withholding_records(task: Task, learner: str, *, private: bool) -> Iterator[None]:
    """In private mode an error becomes one that names the learner, the part of the task and the line of code alone.

    That includes errors of this package: the task's own code may raise them, and some of ours state a batch's size.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not private:
            raise
        raise type(error)("out of memory in a private step; lower batch_size") from None
    except Exception as error:
        if not private:
            raise
        part = task.part(error, "gradient")
        raise RunError(f"learner {learner}'s step failed in the task's {part} ({kind(error)}); {WITHHELD}") from None
