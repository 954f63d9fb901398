"""What the simulator itself costs, beside a learner's gradient of ResNet-18's size.

    python benchmarks/simulator.py [--learners 4] [--steps 8] [--batch 32] [--json]

One run, one process: the time inside `Learner.gradient` (forward, backward) against everything else that a simulated
step does: reading ŵ, loading it, the exchange, the update, norms, events. Ratio = everything else / gradient.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from adp2sgd import models
from adp2sgd.config import Config, Optimizer
from adp2sgd.data.records import Records
from adp2sgd.engine import simulate
from adp2sgd.gradient.privatize import PlainStep
from adp2sgd.task import Task
from adp2sgd.tasks import TASKS


def random_images(records: int = 512) -> Task:
    stream = torch.Generator().manual_seed(0)
    images = torch.randn(records, 3, 32, 32, generator=stream)
    data = Records(images, torch.randint(10, (records,), generator=stream))
    test = data.take(torch.arange(8))
    return Task(model=lambda: models.build("resnet18", norm="batch"), train=data, test=test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="global steps")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    TASKS["random-images"] = random_images
    config = Config(
        task="random-images",
        learners=chosen.learners,
        epochs=chosen.steps * chosen.batch / 512,
        batch_size=chosen.batch,
        seed=0,
        device=chosen.device,
        evaluate_every=1e9,
        checkpoint_every=0,
        optimizer=Optimizer(lr=0.01, momentum=0.9),
    )
    gradient_s = 0.0

    def timed(part: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            nonlocal gradient_s
            _wait(chosen.device)
            before = time.perf_counter()
            result = part(*arguments)
            _wait(chosen.device)
            gradient_s += time.perf_counter() - before
            return result

        return measured

    for name in ("clip", "noise"):
        setattr(PlainStep, name, timed(getattr(PlainStep, name)))
    stamps: list[tuple[float, float]] = []  # (now, spent on gradients) after each step; the first warms up
    simulate(config, on_status=lambda _: stamps.append((time.perf_counter(), gradient_s)))
    steps = len(stamps) - 1
    total, inside = (last - first for first, last in zip(stamps[0], stamps[-1], strict=True))
    figures = {
        "steps": steps,
        "gradient_ms": 1000 * inside / steps,
        "bookkeeping_ms": 1000 * (total - inside) / steps,
        "ratio": (total - inside) / inside,
        "device": chosen.device,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(figures) if chosen.json else "\n".join(f"{k:>16} {v}" for k, v in figures.items()))


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
