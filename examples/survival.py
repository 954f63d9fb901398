"""Survival with censored records: a hazard for each year. Every record has a loss of its own (Cox's couples them)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import adp2sgd

YEAR = torch.arange(5)


def patients(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Targets are (years lived through, 1 if the patient died then, 0 if the observation ended)."""
    stream = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=stream)
    dies = torch.rand(count, 5, generator=stream) < torch.sigmoid(inputs[:, :1] - 2)
    died = torch.where(dies.any(dim=1), dies.int().argmax(dim=1), 5)
    ended = torch.randint(1, 6, (count,), generator=stream)
    return inputs, torch.stack([torch.minimum(died, ended), (died < ended).long()], dim=1)


def loss(hazards: Tensor, targets: Tensor) -> Tensor:
    """Minus the log-likelihood of living through the years before, and of dying in the last one or not."""
    years, died = targets[:, :1], targets[:, 1:]
    return -(logsigmoid(-hazards) * (years > YEAR) + logsigmoid(hazards) * (years == YEAR) * died).sum(dim=1)


def concordance(hazards: Tensor, targets: Tensor) -> float:
    """How often the patient who died first had the higher risk, of the pairs that can be compared."""
    risk, (years, died) = -logsigmoid(-hazards).sum(dim=1), targets.T
    first = (years[:, None] < years[None]) & (died[:, None] == 1)
    return float((risk[:, None] > risk[None])[first].float().mean())


data = {"train": patients(4000, 0), "test": patients(800, 1), "loss": loss, "metrics": concordance}
task = adp2sgd.Task(model=lambda: nn.Linear(4, 5), **data)
private = adp2sgd.Privacy(mode="private", epsilon=2.0, delta=1e-4)
config = adp2sgd.Config(learners=2, epochs=15, batch_size=100, optimizer=adp2sgd.Optimizer(lr=0.5), privacy=private)
print(adp2sgd.simulate(config, task=task).metrics)
