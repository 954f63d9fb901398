"""Two kinds of input in one model, an image and a row of a table."""

import torch
from torch import Tensor, nn

import adp2sgd


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.out = nn.Sequential(nn.Linear(32 + 3, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.out(torch.cat([self.image(image), table], dim=1))


def visits(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    stream = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (count, 1, 8, 8), generator=stream, dtype=torch.uint8)
    table = torch.randn(count, 3, generator=stream)
    image[table[:, 0] > 0, :, :4] //= 2  # the image tells the same as the table's first column, and more weakly
    return {"image": image, "table": table}, (table[:, 0] + table[:, 1] > 0).long()


def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch as the model reads it: each record on its own, by constants that are public."""
    return {"image": inputs["image"].float() / 127.5 - 1, "table": inputs["table"].clamp(-3, 3)}


data = {"train": visits(2000, 0), "test": visits(400, 1), "prepare": prepare}
task = adp2sgd.Task(model=Both, **data, metrics=["accuracy", "auc"], name="visits")
config = adp2sgd.Config(learners=2, epochs=10, batch_size=32, optimizer=adp2sgd.Optimizer(lr=0.2))
run = adp2sgd.simulate(config, task=task)
print({name: round(value, 3) for name, value in run.metrics.items() if value is not None})
