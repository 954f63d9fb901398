"""SGD, Adam and AdamW under privacy at the same ε, after equal tuning effort: the table of docs/optimizers.md.

    python experiments/optimizers.py [--epsilon 3] [--json FILE]

Every optimizer gets the same number of learning rates, a factor of √10 apart. The best one, by held-out loss with seed
0, is then run with further seeds; the table states their mean accuracy and standard deviation. Both tasks are the
digits: as 64 pixels for an MLP, and as 8 rows of 8 pixels for a transformer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from adp2sgd import Config, Optimizer, Privacy, Run, Task, simulate
from adp2sgd.tasks.generated import digits

RATES = {
    "sgd": (0.1, 0.316, 1.0, 3.16),
    "sgd, momentum 0.9": (0.01, 0.0316, 0.1, 0.316),
    "adam": (0.00316, 0.01, 0.0316, 0.1),
    "adamw": (0.00316, 0.01, 0.0316, 0.1),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd, momentum 0.9": {"momentum": 0.9},
    "adam": {"kind": "adam"},
    "adamw": {"kind": "adamw", "weight_decay": 0.01},
}
SEEDS = (1, 2, 3)


class Transformer(nn.Module):
    """One encoder layer of width 32 over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(0.1 * torch.randn(8, 32))
        self.encode = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.encode(self.embed(inputs) + self.place).mean(dim=1))
        return outputs


def transformer() -> Task:
    plain = digits(model="logistic")
    return Task(model=Transformer, train=plain.train, test=plain.test, prepare=lambda x: (x / 8 - 1).squeeze(1))


TASKS = {"digits, MLP": lambda: digits(model="mlp"), "digits, transformer": transformer}


def run(task: str, name: str, rate: float, seed: int, epsilon: float) -> Run:
    config = Config(
        learners=2, epochs=20, batch_size=64, seed=seed, device="cpu", evaluate_every=1e9, checkpoint_every=0,
        optimizer=Optimizer(lr=rate, schedule="cosine", **SETTINGS[name]),
        privacy=Privacy(mode="private", epsilon=epsilon, delta=1e-4),
    )  # fmt: skip
    return simulate(config, task=TASKS[task]())


def measure(task: str, name: str, epsilon: float) -> dict[str, Any]:
    tuned = {rate: run(task, name, rate, 0, epsilon).loss or float("inf") for rate in RATES[name]}
    best = min(tuned, key=tuned.__getitem__)
    accuracies = [run(task, name, best, seed, epsilon).accuracy or 0.0 for seed in SEEDS]
    found = {"task": task, "optimizer": name, "lr": best, "losses": tuned, "accuracies": accuracies}
    return found | {"mean": statistics.mean(accuracies), "deviation": statistics.stdev(accuracies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--json")
    chosen = parser.parse_args()
    rows = []
    print("| task | optimizer | best `lr` | accuracy |\n|---|---|---|---|")
    for task in TASKS:
        for name in SETTINGS:
            rows.append(measure(task, name, chosen.epsilon))
            row = rows[-1]
            print(f"| {task} | {name} | {row['lr']:g} | {row['mean']:.3f} ± {row['deviation']:.3f} |", flush=True)
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
