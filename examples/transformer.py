"""A transformer of your own, on tokens with a mask.

Does the token 1 occur before the token 2? Inputs are a dictionary: its names are the arguments of `forward`.
"""

import torch
from torch import Tensor, nn

import adp2sgd


class Reader(nn.Module):
    def __init__(self, tokens: int = 12, width: int = 32, length: int = 10) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        read = self.layer(self.embed(tokens) + self.place, src_key_padding_mask=~mask)
        return self.out((read * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True))


def sentences(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    stream = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 12, (count, 10), generator=stream)
    places = torch.rand(count, 8, generator=stream).argsort(dim=1)[:, :2]
    tokens.scatter_(1, places, torch.tensor([1, 2]).expand(count, 2))
    mask = torch.arange(10) < torch.randint(8, 11, (count, 1), generator=stream)
    return {"tokens": tokens, "mask": mask}, (places[:, 0] < places[:, 1]).long()


task = adp2sgd.Task(model=Reader, train=sentences(4000, 0), test=sentences(500, 1), name="order")
optimizer = adp2sgd.Optimizer(kind="adam", lr=0.003)
config = adp2sgd.Config(learners=2, epochs=10, batch_size=32, optimizer=optimizer)
run = adp2sgd.simulate(config, task=task)
print(f"accuracy {run.metrics['accuracy']:.1%}")
