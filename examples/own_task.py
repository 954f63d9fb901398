"""Your own model and data: a function that is declared to return a Task. From this folder:

adp2sgd simulate --set task=own_task:disc --set options.radius=1.0 --set optimizer.lr=0.5

Where a file names the task, add --trust own_task:disc.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adp2sgd import Records, Task


def points(count: int, radius: float, seed: int) -> Records:
    """Points in the plane, labelled by whether they lie in a disc. Here you would read your files, a row per record."""
    inputs = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return Records(inputs, (inputs.norm(dim=1) < radius).long())


def scaled(inputs: Tensor) -> Tensor:
    """A batch as the model reads it. Under privacy: each record on its own, by constants that are public."""
    return inputs.clamp(-3, 3)


def disc(*, radius: float = 1.2, hidden: int = 32) -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2)),
        train=points(2000, radius, seed=0),
        test=points(500, radius, seed=1),
        prepare=scaled,
    )
