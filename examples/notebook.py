"""As in a notebook: cells, a task of one's own, a look at the data, early stopping and plots."""

# %% The data: points in the plane, labelled by whether they lie in a disc.
import torch
from torch import nn

import adp2sgd

stream = torch.Generator().manual_seed(0)
points = torch.randn(3000, 2, generator=stream)
labels = (points.norm(dim=1) < 1.2).long()
data = adp2sgd.Records(points, labels)

# %% The task. Printing it shows sizes and types, never a value.
task = adp2sgd.Task(
    model=lambda: nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)),
    train=data.take(torch.arange(2500)),
    test=data.take(torch.arange(2500, 3000)),
    metrics=["accuracy", "auc"],
    monitor="auc",
    name="disc",
)
print(task)

# %% Train until the AUC has not improved in three evaluations.
optimizer = adp2sgd.Optimizer(kind="adam", lr=0.01)
config = adp2sgd.Config(learners=4, epochs=60, batch_size=16, optimizer=optimizer)
run = adp2sgd.simulate(config, "runs/disc", task=task, on_status=adp2sgd.EarlyStopping(patience=3, least=1e-3))
print(f"stopped after {run.epochs:.1f} epochs, AUC {run.metrics['auc']:.3f}")

# %% Plots: the curve of the metrics, the learners, and when each of them worked.
run.plot()

# %% The finished model.
model = adp2sgd.load_model("runs/disc")
print(model.predict([[0.0, 0.0], [2.0, 2.0]]))
