"""The paper's model table: parameters, MiB, and the time of training on this device."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adp2sgd import models
from adp2sgd.config import Config, Optimizer, Privacy
from adp2sgd.data.augment import crop_and_flip
from adp2sgd.data.cifar10 import NORMALIZE
from adp2sgd.data.records import Records
from adp2sgd.device import can_compile, precision_on
from adp2sgd.engine.compute import pick_device
from adp2sgd.engine.setup import prepare
from adp2sgd.task import Task
from reproduction import paper
from reproduction.cells import Cell, Choice, device_name

QUICK = ("shufflenet", "mobilenet", "resnet18")
BATCHES = {"cuda": (200, 20), "cpu": (2, 1)}  # measured, and before them to warm up


def cells(choice: Choice) -> list[Cell]:
    """One per model and device."""
    device = pick_device(choice.device)
    words = device_name(str(device)).split(",", maxsplit=1)[0]
    place = "".join(c if c.isalnum() else " " for c in words).split()
    names = choice.models or (QUICK if choice.quick else tuple(paper.MODELS))
    batch = 8 if choice.quick else 32 if device.type == "cpu" else None
    form = {"form": "quick" if choice.quick else ""}
    return [
        Cell(
            study="sizes",
            identity={**form, "model": name, "place": "-".join(place)},
            measure=partial(_measure, name, str(device), batch or paper.BATCH[paper.family(name)]),
        )
        for name in names
    ]


def random_records(model: str, records: int) -> Task:
    """Random images or frames of the paper's shapes: a step takes as long on them as on real ones."""
    stream = torch.Generator().manual_seed(0)
    build = partial(models.build, model)
    if model == "lstm":
        inputs = torch.randn(records, 21, 260, generator=stream)
        made = Records(inputs, torch.randint(32_000, (records, 21), generator=stream))
        return Task(model=build, train=made, test=made.take(torch.arange(1)))
    inputs = torch.randint(256, (records, 3, 32, 32), dtype=torch.uint8, generator=stream)
    made = Records(inputs, torch.randint(10, (records,), generator=stream))
    test = made.take(torch.arange(1))
    return Task(model=build, train=made, test=test, prepare=NORMALIZE, augment=crop_and_flip)


def _measure(model: str, device: str, batch: int, scratch: Path, quiet: bool) -> dict[str, Any]:
    """Seconds of one learner's step, noise, norms and augmentation included; an epoch is extrapolated from it."""
    measured, warm = BATCHES[torch.device(device).type]
    family = paper.family(model)
    layers = family == "cifar10"  # an LSTM is one fused kernel, which bfloat16 would run in float16
    settings = Config(
        task="reproduction.sizes:random_records",
        options={"model": model, "records": 4 * batch},
        learners=1,
        batch_size=batch,
        seed=0,
        device=device,
        precision=precision_on(torch.device(device)) if layers else "float32",
        compile=layers and can_compile(torch.device(device)),
        optimizer=Optimizer(lr=1e-3, weight_decay=5e-4),
        privacy=Privacy(mode="paper", sigma=1.0),
    )
    learner = prepare(settings).learner(0, scratch)

    def steps(count: int) -> float:
        before = time.perf_counter()
        for _ in range(count):
            learner.begin()
            learner.update(learner.gradient())
        float(learner.gradient_norm)  # waits for the GPU
        return time.perf_counter() - before

    steps(warm)
    step_s = steps(measured) / measured
    info = models.describe(model)
    epoch_s = step_s * paper.SAMPLES[family] / batch
    return {
        "device": device,
        "parameters": info.parameters,
        "mib": round(info.mib, 2),
        "batch_size": batch,
        "precision": settings.precision,
        "measured_steps": measured,
        "step_s": round(step_s, 6),
        "epoch_s_extrapolated": round(epoch_s, 2),
        "hours_extrapolated": round(epoch_s * paper.EPOCHS[family] / 3600, 3),
    }
