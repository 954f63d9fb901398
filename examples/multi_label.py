"""Several labels per record, any number of which hold: one output per label, and binary cross-entropy."""

import torch
from torch import Tensor, nn

import adp2sgd

FINDINGS = ("effusion", "fracture", "nodule", "none of these")


def reports(count: int, seed: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=stream)
    weights = torch.randn(8, 3, generator=torch.Generator().manual_seed(7))
    found = (inputs @ weights + 0.3 * torch.randn(count, 3, generator=stream) > 1).float()
    return inputs, torch.cat([found, (found.sum(dim=1, keepdim=True) == 0).float()], dim=1)


def worst_label(outputs: Tensor, targets: Tensor) -> float:
    """A metric of one's own: the accuracy of the label that the model knows least."""
    return float(((outputs > 0) == (targets > 0)).float().mean(dim=0).min())


task = adp2sgd.Task(
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, len(FINDINGS))),
    train=reports(3000, 0),
    test=reports(600, 1),
    loss="bce_with_logits",
    metrics=["auc", "f1", worst_label],
    name="findings",
)
config = adp2sgd.Config(learners=4, epochs=8, batch_size=16, optimizer=adp2sgd.Optimizer(lr=0.5))
run = adp2sgd.simulate(config, task=task)
print({name: round(value, 3) for name, value in run.metrics.items() if value is not None})
