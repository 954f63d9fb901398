"""Cells that train: which configuration each one is, and what is kept of its run."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adp2sgd import config
from adp2sgd.cli.liveview import watching
from adp2sgd.cli.view import named
from adp2sgd.config import Config, Optimizer, Privacy, Speeds
from adp2sgd.device import can_compile, laid_out, let_go, precision_on
from adp2sgd.engine import simulate, train
from adp2sgd.engine.compute import pick_device
from adp2sgd.engine.evaluate import evaluate
from adp2sgd.engine.setup import Setup, prepare
from adp2sgd.engine.simulation import checkpoint
from adp2sgd.engine.status import RunStatus
from adp2sgd.engine.theta import mean_of
from adp2sgd.errors import DivergedError
from adp2sgd.metrics import Figures
from adp2sgd.run_folder import Folder, Point, Run, read_result
from adp2sgd.task import Augment, Task
from adp2sgd.tasks.generated import digits
from reproduction import paper
from reproduction.cells import Cell, Choice

JITTER = Speeds(kind="log-normal", spread=0.1)  # equal learners; without it they would step in a fixed order
QUICK_MODELS = {"cifar10": "cnn", "speech": "lstm"}
POINTS = 20  # evaluations in a run
EXPERIMENTS = Path(__file__).parents[1] / "experiments"  # the configurations


def recipe(model: str, choice: Choice) -> Config:
    """The paper's configuration for a model, or its small form on handwritten digits."""
    family = paper.family(model)
    base = config.load_config(EXPERIMENTS / f"paper_{family}.toml").replace(device=choice.device)
    if choice.quick:
        return _small(base, family)
    device = pick_device(choice.device)
    if model == "lstm_small":
        return config.load_config(EXPERIMENTS / "speech_small.toml").replace(
            device=choice.device, topology=base.topology
        )
    if family == "speech":  # in bfloat16 torch would run an LSTM in float16, and it has nothing to compile in one
        return base.replace(task=f"{family}/{model}")
    fused = can_compile(device) and not choice.processes and not choice.private
    return base.replace(task=f"{family}/{model}", precision=precision_on(device), compile=fused)


def _small(base: Config, family: str) -> Config:
    """The same recipe on 1,437 digits with 4 learners: one small CNN, or an LSTM that reads each image row by row."""
    device = "cpu" if base.device == "auto" else base.device
    small = base.replace(learners=4, batch_size=32, epochs=5.0, evaluate_every=1.0, device=device)
    if family == "cifar10":
        optimizer = base.optimizer.replace(lr=0.2, schedule=((160.0, 0.02), (240.0, 0.002)))
        return small.replace(task="digits/cnn", options={"norm": "batch"}, optimizer=stretched(optimizer, 5 / 300))
    options = {"hidden": 32, "layers": 1, "projection": 32}
    return small.replace(
        task="reproduction.training:digit_rows",
        batch_size=8,
        epochs=3.0,
        options=options,
        optimizer=stretched(base.optimizer, 3 / 20),
    )


def digit_rows(**options: int) -> Task:
    """The digits as 8 frames of 8 features, each to be labelled: a speech task that needs no file."""
    plain = digits(model="logistic")
    from adp2sgd import models

    def rows(records: Any) -> Any:
        frames = records.inputs.squeeze(1)
        return type(records)(frames, records.targets[:, None].expand(-1, frames.shape[1]).contiguous())

    build = partial(models.build, "lstm", inputs=8, classes=10, **options)
    return Task(model=build, train=rows(plain.train), test=rows(plain.test), prepare=plain.prepare)


def stretched(optimizer: Optimizer, factor: float) -> Optimizer:
    """The same course of learning rates in `factor` times the epochs."""
    schedule = tuple((epoch * factor, rate) for epoch, rate in optimizer.rates)
    warmup = optimizer.warmup.replace(epochs=optimizer.warmup.epochs * factor)
    return optimizer.replace(schedule=schedule, warmup=warmup, decay=optimizer.decay ** (1 / factor))


def doubled(settings: Config) -> Config:
    """Case III: twice the batch at twice the learning rate."""
    optimizer = settings.optimizer
    schedule = tuple((epoch, 2 * rate) for epoch, rate in optimizer.rates)
    warmup = optimizer.warmup.replace(from_=2 * optimizer.warmup.from_)
    fast = optimizer.replace(lr=2 * optimizer.lr, schedule=schedule, warmup=warmup)
    return settings.replace(batch_size=2 * settings.batch_size, optimizer=fast)


def cell(
    study: str, model: str, algorithm: str, noise: float, seed: int, choice: Choice, *, variant: str = "",
    speeds: Speeds = JITTER, large_batch: bool = False,
) -> Cell:  # fmt: skip
    """The cell of one run. Everything that a user can ask for is part of its identity; the device is not."""
    base = recipe(model, choice)
    epochs = choice.epochs or base.epochs
    settings = base.replace(
        algorithm=algorithm,
        seed=seed,
        epochs=epochs,
        optimizer=_optimizer(base, epochs, choice),
        evaluate_every=epochs / POINTS,
        checkpoint_every=_checkpoint_every(base, epochs),
        speeds=speeds.replace(pad=choice.processes, step_s=_nominal(choice)),
    )
    settings = (
        _private(settings, noise) if choice.private else settings.replace(privacy=Privacy(mode="paper", sigma=noise))
    )
    if large_batch:
        settings = doubled(settings)
    named = QUICK_MODELS[paper.family(model)] if choice.quick else model
    identity = _identity(settings, named, {"z" if choice.private else "sigma": noise}, choice, variant)
    return Cell(
        study=study,
        identity=identity,
        measure=partial(_measure, settings, choice.processes),
        resumes=not choice.processes,
    )


def private_recipe(algorithm: str, seed: int, choice: Choice) -> Cell:
    """What the paper's claim should be replaced by: the accuracy of a model that suits privacy, at ε = 8."""
    base = config.load_config(EXPERIMENTS / "cifar10_private.toml").replace(device=choice.device)
    epochs = choice.epochs or base.epochs
    settings = base.replace(
        algorithm=algorithm,
        seed=seed,
        epochs=epochs,
        precision=precision_on(pick_device(choice.device)),
        optimizer=_optimizer(base, epochs, choice),
        evaluate_every=epochs / POINTS,
        checkpoint_every=epochs / 4,
    )
    identity = _identity(settings, paper.RECIPE, {"epsilon": base.privacy.epsilon}, choice)
    return Cell(
        study="table1",
        identity=identity,
        measure=partial(_measure, settings, choice.processes),
        resumes=not choice.processes,
    )


def _identity(settings: Config, model: str, noise: dict[str, Any], choice: Choice, variant: str = "") -> dict[str, Any]:
    """A cell without `momentum` was trained by plain SGD."""
    return {
        "form": "quick" if choice.quick else "",
        "model": model,
        "algorithm": settings.algorithm,
        **noise,
        "variant": variant,
        "engine": "processes" if choice.processes else "",
        **({"momentum": settings.optimizer.momentum} if settings.optimizer.momentum else {}),
        "epochs": settings.epochs,
        "seed": settings.seed,
    }


def _optimizer(base: Config, epochs: float, choice: Choice) -> Optimizer:
    """The recipe's, stretched to `epochs`. Private mode has no momentum unless the user asks for it."""
    own = 0.0 if choice.private else base.optimizer.momentum
    momentum = own if choice.momentum is None else choice.momentum
    return stretched(base.optimizer, epochs / base.epochs).replace(momentum=momentum)


def _checkpoint_every(base: Config, epochs: float) -> float:
    """Epochs between checkpoints. On a GPU a short run is over before writing one would pay; an interrupted run
    writes one in any case."""
    return max(5.0 if pick_device(base.device).type == "cpu" else 100.0, epochs / 2)


def _nominal(choice: Choice) -> float:
    """Seconds of a normal step: long enough that sixteen real learners can share one GPU without slowing each other."""
    if not choice.processes:
        return 1.0
    return 0.1 if choice.quick else 0.125


def _private(settings: Config, noise_multiplier: float) -> Config:
    """What the paper's noise would take to be private: clipping, Poisson batches, GroupNorm, an accountant."""
    options = {key: "group" if key == "norm" else value for key, value in settings.options.items()}
    private = Privacy(mode="private", noise_multiplier=noise_multiplier, delta=1e-5) if noise_multiplier else Privacy()
    return settings.replace(privacy=private, options=options)


def _measure(settings: Config, processes: bool, scratch: Path, quiet: bool) -> dict[str, Any]:
    """Train, or go on where an interrupted run was, and evaluate."""
    folder, before = scratch / "run", time.perf_counter()
    resumed = not processes and _begun(folder, settings)
    points: dict[int, Point] = {}
    figures: dict[str, Any] = {"device": str(pick_device(settings.device)), "config": settings.to_dict()}
    try:
        if processes:
            shutil.rmtree(folder, ignore_errors=True)
            run = train(settings, folder, on_status=lambda now: points.update({p.global_steps: p for p in now.curve}))
        else:
            run = _simulated(settings, folder, resumed, points, quiet)
    except DivergedError as error:
        figures |= {"diverged": str(error).partition(";")[0], "curve": _curve(list(points.values()))}
        return figures | {"accuracy": None, "loss": None, "virtual_seconds": None}
    finally:
        let_go()
    took = time.perf_counter() - before
    rate = None if resumed else round(run.global_steps * settings.batch_size / took)  # of a whole run only
    figures |= _figures(run) | {"images_per_second": rate}
    if not processes and settings.options.get("norm") == "batch":
        setup, theta = prepare(settings), mean_of(_states(folder, settings)).theta
        again = recomputed(setup, theta)
        figures |= {"accuracy_recomputed": again.get("accuracy"), "loss_recomputed": again["loss"]}
        if setup.task.augment is not None:
            again = recomputed(setup, theta, augment=setup.task.augment)
            figures |= {
                "accuracy_recomputed_augmented": again.get("accuracy"),
                "loss_recomputed_augmented": again["loss"],
            }
    return figures


def _begun(folder: Path, settings: Config) -> bool:
    """Whether a run was interrupted here that can go on, one with these settings: a recipe may have changed since."""
    kept = any((folder / name).exists() for name in ("result.json", checkpoint.NAME))
    return kept and config.difference(settings, Folder.open(folder).settings) is None


def _simulated(settings: Config, folder: Path, resume: bool, points: dict[int, Point], quiet: bool) -> Run:
    if resume:
        if (folder / "result.json").exists():
            return read_result(folder)
        saved = checkpoint.read(Folder.open(folder))
        points |= {p["global_steps"]: Point(**p) for p in (saved.facts["curve"] if saved else ())}
    else:
        shutil.rmtree(folder, ignore_errors=True)
    with watching(named(settings), quiet=quiet) as show:

        def on_status(status: RunStatus) -> None:
            if status.point is not None:
                points[status.point.global_steps] = status.point
            show(status)

        return simulate(settings, folder, resume=resume, on_status=on_status)


def _figures(run: Run) -> dict[str, Any]:
    return {
        "accuracy": run.accuracy,
        "loss": run.loss,
        "single_learners": {
            "accuracy": [_rounded(each.accuracy, 5) for each in run.learners],
            "loss": [_rounded(each.loss, 5) for each in run.learners],
        },
        "consensus": run.consensus,
        "epochs": run.epochs,
        "global_steps": run.global_steps,
        "virtual_seconds" if run.clock == "virtual" else "real_seconds": run.seconds,
        "steps": [each.steps for each in run.learners],
        "staleness_mean": math.fsum(each.staleness_mean * each.share for each in run.learners),
        "staleness_max": max(each.staleness_max for each in run.learners),
        "guarantee": None if run.guarantee is None else asdict(run.guarantee),
        "curve": _curve(run.curve),
    }


def _curve(points: Sequence[Point]) -> dict[str, list[Any]]:
    """Columns: a third of the size of a list of points."""
    rows = sorted(points, key=lambda each: each.global_steps)
    digits = {"epoch": 4, "seconds": 3, "loss": 5, "accuracy": 5, "consensus": 6}
    return {name: [_rounded(getattr(row, name), to) for row in rows] for name, to in digits.items()}


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _states(folder: Path, settings: Config) -> list[Tensor]:
    home, device = Folder.open(folder), str(pick_device(settings.device))
    names = (f"learner-{k}/checkpoint.safetensors" for k in range(settings.learners))
    kept = (home.load_tensors(name, device)[0] for name in names)
    return [torch.cat([each["weights"], each["buffers"]]) for each in kept]


@torch.no_grad()
def recomputed(setup: Setup, theta: Tensor, augment: Augment | None = None) -> Figures:
    """θ's quality with its BatchNorm statistics taken anew over the training records instead of averaged: over the
    records as they are, or through `augment` as training sees them."""
    model, generator = setup.compute.model, torch.Generator(setup.compute.model.device).manual_seed(0)
    model.weights.copy_(theta[: len(model.weights)])
    for layer in model.module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.reset_running_stats()
            layer.momentum = None  # the plain mean over all batches
    model.module.train()
    for rows in torch.arange(len(setup.task.train)).split(setup.plan.config.batch_size):
        if len(rows) > 1:
            batch = setup.task.prepare(setup.task.train.read(rows)[0].to(model.device))
            model.module(laid_out(batch if augment is None else augment(batch, generator)))
    return evaluate(model, setup.task, torch.cat([model.weights, model.buffers]))
