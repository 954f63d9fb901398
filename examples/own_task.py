"""Your own model and data: a function that returns a Task. Run it from this folder with

    adp2sgd simulate --set task=own_task:spirals --set options.turns=1.5 --set optimizer.lr=0.5
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adp2sgd import Records, Task


def points(count: int, turns: float, seed: int) -> Records:
    """Two interleaved spirals, label 0 and 1. Here you would read your files; a row is one record."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 2 * torch.pi * turns * radius + torch.pi * labels
    inputs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return Records(inputs, labels)


def features(inputs: Tensor) -> Tensor:
    """What the model reads. Under privacy: each record on its own, with constants that are public."""
    return torch.cat([inputs.cos().mul(3), inputs.mul(3).sin(), inputs.mul(3)], dim=1)


def spirals(*, turns: float = 1.0, hidden: int = 64) -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 2)),
        train=points(2000, turns, seed=0),
        test=points(500, turns, seed=1),
        prepare=features,
    )
