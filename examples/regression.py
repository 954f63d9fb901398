"""A number instead of a class: mean squared error, and metrics that say how far off predictions are."""

import torch
from torch import Tensor, nn

import adp2sgd


def houses(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Area, rooms and distance, scaled by constants that everybody knows; the price in millions."""
    stream = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 3, generator=stream) * 2 - 1
    prices = 0.5 + 0.4 * inputs[:, 0] + 0.1 * inputs[:, 1] - 0.2 * inputs[:, 2] ** 2
    return inputs, prices + 0.02 * torch.randn(count, generator=stream)


task = adp2sgd.Task(
    model=lambda: nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)),
    train=houses(3000, 0),
    test=houses(500, 1),
    loss="mse",
    metrics=["mae", "r2"],
    monitor="r2",
    name="houses",
)
private = adp2sgd.Privacy(mode="private", epsilon=3.0, delta=1e-4)
config = adp2sgd.Config(learners=2, epochs=30, batch_size=100, optimizer=adp2sgd.Optimizer(lr=0.2), privacy=private)
run = adp2sgd.simulate(config, "runs/houses", task=task)
print({name: round(value, 3) for name, value in run.metrics.items() if value is not None})
print(run.guarantee)

model = adp2sgd.load_model("runs/houses")
print(model.predict(torch.tensor([[0.5, 0.0, -1.0]])))
