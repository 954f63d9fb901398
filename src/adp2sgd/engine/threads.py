"""How many CPU threads a step uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 10_000_000  # parameters × batch: below it, waking a second thread costs more than it brings


@contextmanager
def suited_threads(parameters: int, batch_size: int) -> Iterator[None]:
    """One thread for small steps (many times faster where other processes want the cores), else torch's number."""
    before = torch.get_num_threads()
    if parameters * batch_size < SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
