"""What the input pipeline costs: draw, index, normalize, crop and flip, beside training a ResNet-18 on the images.

    python benchmarks/input.py [--device cuda] [--batches 196] [--repeat 3] [--json]

Seconds per epoch of 50,000 CIFAR-sized images in batches of 256 at 16 learners, as paper_cifar10.toml has them, but
drawn by Poisson sampling. `resident`: the records lie on the device; `ahead`: in host memory, each batch fetched while
the one before is worked on (here there is no work, so this is the full cost). Best of the repeats, extrapolated from
`--batches` batches; ratios to forward and backward passes of the ResNet-18 in float32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from adp2sgd import models
from adp2sgd.data.augment import crop_and_flip
from adp2sgd.data.batches import PoissonBatches
from adp2sgd.data.cifar10 import NORMALIZE
from adp2sgd.data.feed import Ahead, Feed, Resident
from adp2sgd.data.records import Records
from adp2sgd.randomness.streams import Streams

IMAGES, LEARNERS, BATCH = 50_000, 16, 256


def pipeline(kind: type[Resident] | type[Ahead], device: torch.device) -> Callable[[int], Tensor]:
    """step → that step's batch as the model reads it, the way a learner makes it."""
    shard = IMAGES // LEARNERS
    records = Records(torch.randint(256, (shard, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (shard,)))
    streams = Streams(0, 0)
    feed: Feed = kind(records, PoissonBatches(shard, BATCH, streams), device)

    def make(step: int) -> Tensor:
        feed.draw(step)
        inputs, _ = feed.take()
        return crop_and_flip(NORMALIZE(inputs), streams("augment", step).torch_generator(device))

    return make


def training(device: torch.device) -> Callable[[int], Tensor]:
    model = models.build("resnet18").to(device)
    images, labels = torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(10, (BATCH,), device=device)

    def work(step: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    return work


def epoch_seconds(work: Callable[[int], Tensor], batches: int, repeat: int, device: torch.device) -> float:
    """Best of `repeat`, scaled from `batches` to an epoch."""
    best = float("inf")
    for round_ in range(repeat + 1):  # the first one warms up
        settle(device)
        began = time.perf_counter()
        for step in range(batches):
            work(round_ * batches + step)
        settle(device)
        if round_:
            best = min(best, time.perf_counter() - began)
    return best * IMAGES / BATCH / batches


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, help="default 196 (an epoch) on a GPU, else 2")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batches = arguments.batches or (196 if device.type == "cuda" else 2)
    works = {"resident": pipeline(Resident, device), "ahead": pipeline(Ahead, device), "resnet18": training(device)}
    seconds = {name: epoch_seconds(work, batches, arguments.repeat, device) for name, work in works.items()}
    shares = {name: seconds[name] / seconds["resnet18"] for name in ("resident", "ahead")}
    if arguments.json:
        print(json.dumps({"device": str(device), "epoch_seconds": seconds, "share_of_resnet18": shares}, indent=1))
        return
    for name, value in seconds.items():
        share = f"  {100 * shares[name]:.2f} % of resnet18" if name in shares else ""
        print(f"{name:10} {value:10.3f} s per epoch{share}")


if __name__ == "__main__":
    main()
