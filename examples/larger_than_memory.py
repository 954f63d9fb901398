"""A data set three times as large as the memory that this process may take: records are read by index.

Here a record is generated from its number; in yours, `__getitem__` would read a file. Two processes read ahead.
"""

import resource
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import adp2sgd

PIXELS = 1 << 18  # of a record: 1 MiB
used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # by PyTorch itself
LIMIT = used + (600 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


class Scans(Dataset[tuple[Tensor, int]]):
    def __init__(self, first: int, last: int) -> None:
        self.numbers = range(first, last)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = self.numbers[index] % 2
        return torch.full((PIXELS,), 0.1 * label - 0.05), label


records = 3 * LIMIT // (4 * PIXELS)
task = adp2sgd.Task(model=lambda: nn.Linear(PIXELS, 2), train=Scans(0, records), test=Scans(records, records + 40))
config = adp2sgd.Config(learners=1, epochs=0.05, batch_size=16, optimizer=adp2sgd.Optimizer(lr=0.01))
run = adp2sgd.simulate(config.replace(data=adp2sgd.Data(workers=2)), task=task)
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
print(f"{records * 4 * PIXELS >> 20} MiB of records, limit {LIMIT >> 20} MiB, peak {peak} MiB: {run.metrics}")
