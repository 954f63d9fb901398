"""Where the learners of one process compute: a device, one model, and the gradient steps that they share."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.config import Config
from adp2sgd.device import AUTOCAST, compiled, tune
from adp2sgd.engine.plan import Plan
from adp2sgd.errors import WITHHELD, ConfigError, kind, tellable
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import choose
from adp2sgd.gradient.clipper import Clipper
from adp2sgd.gradient.privatize import Adaptation, GradientStep, PlainStep, PrivateStep
from adp2sgd.privacy.budget import Budget
from adp2sgd.privacy.mechanism import beside_count
from adp2sgd.task import Task

SEEDED_PIECE = 512  # most rows whose gradients are taken at once in a seeded run; a record or unit may have several


class Compute:
    """The model starts at the plan's initial weights: the same in every process."""

    def __init__(self, plan: Plan, task: Task, device: torch.device, *, largest_shard: int) -> None:
        """`task` gives model and loss. Of its records only type and shape are used."""
        self.plan, self.task, self.device = plan, task, device
        self._largest_shard = largest_shard
        config = plan.config
        tune(device, config.precision, private=plan.private, padded=config.speeds.pad)
        self.model = build_model(task, device, config.task, plan.seed, private=plan.private)
        if config.init_from is not None:
            begin_with(self.model, Path(config.init_from).expanduser())

    @cached_property
    def plain_step(self) -> PlainStep:
        """One for all learners of the process: they share the model, and so the captured CUDA graphs."""
        config = self.plan.config
        loss, sigma, autocast = self.task.loss, config.privacy.sigma or 0.0, AUTOCAST[config.precision]
        if not config.compile or self.device.type != "cuda":
            return PlainStep(loss, sigma, autocast)
        return PlainStep(loss, sigma, autocast, network=partial(compiled, fixed=config.privacy.mode == "paper"))

    @cached_property
    def clipper(self) -> Clipper:
        """Takes the private gradients of all learners of the process.

        It is chosen at the initial weights, before any neighbour's weights are loaded, because they could mislead the
        choice. A seeded run does not depend on the memory that happens to be free.
        """
        config = self.plan.config
        copies = rows_together(config, self.task)
        piece = None if config.seed is None else max(1, SEEDED_PIECE // copies)
        made = choose.build(
            self.model, self.task.loss, clipper=config.privacy.clipper, copies=copies, piece=piece,
            autocast=AUTOCAST[config.precision], expected=min(config.batch_size, self._largest_shard),
        )  # fmt: skip
        if isinstance(made, choose.Automatic):
            stored, targets = self.task.train.blank()
            inputs = self.task.prepare(tree.each(lambda part: part.to(self.device), stored))
            made.settle(inputs, targets.to(self.device))
        return made

    def gradient_step(self, budget: Budget | None) -> GradientStep:
        """What turns a learner's batches into gradients: plain without a budget, else with the budget's noise."""
        config = self.plan.config
        privacy = config.privacy
        if budget is None:
            return self.plain_step
        clip_norm, noise = privacy.clip_norm, budget.plan.mechanism.noise_multiplier
        count_noise = privacy.noise_on_count(config.batch_size)
        if privacy.clip_quantile is None or count_noise is None:
            return PrivateStep(self.clipper, clip_norm=clip_norm, noise_multiplier=noise)
        adaptation = Adaptation(
            quantile=privacy.clip_quantile, rate=privacy.clip_rate, count_noise=count_noise, start=clip_norm
        )
        own = beside_count(noise, count_noise)
        return PrivateStep(self.clipper, clip_norm=clip_norm, noise_multiplier=own, adaptation=adaptation)

    def named(self, theta: Tensor) -> dict[str, Tensor]:
        """θ under torch's own names, with everything that the module's `load_state_dict` asks for.

        The model itself is only read, so another thread may compute with it meanwhile.
        """
        size = len(self.model.weights)
        found = {}
        for name, tensor in self.model.module.state_dict().items():
            part = _same_place(tensor, self.model.weights, theta[:size])
            part = _same_place(tensor, self.model.buffers, theta[size:]) if part is None else part
            found[name] = (tensor.detach() if part is None else part).clone()
        return found


def _same_place(tensor: Tensor, vector: Tensor, other: Tensor) -> Tensor | None:
    """The part of `other` that lies where `tensor` lies in `vector`; None if it is no view into it."""
    inside = len(other) == len(vector) and tensor.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    if not inside or not tensor.numel():
        return None
    start = tensor.storage_offset()
    return other[start : start + tensor.numel()].view(tensor.shape)


def rows_together(config: Config, task: Task) -> int:
    """Rows that are clipped as one: the copies of a record, or those of all rows of a unit."""
    return config.privacy.copies * (1 if task.train.units is None else config.privacy.records_per_unit)


def build_model(task: Task, device: torch.device, name: str, seed: int, *, private: bool) -> FlatModel:
    """The model of the task called `name`, with initial weights from `seed`."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            model = FlatModel(task.model(), device)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise ConfigError(f'the model of task = "{name}" does not fit into memory; make it smaller') from None
        if private and not tellable(error):
            raise ConfigError(f'the model of task = "{name}" cannot be made ({kind(error)}); {WITHHELD}') from None
        raise
    if not len(model.weights):
        raise ConfigError(f'the model of task = "{name}" has no trainable parameter; set requires_grad on some')
    return model


def begin_with(model: FlatModel, path: Path) -> None:
    """Load the weights of a run's folder, or of a safetensors file with torch's own names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path / "model/weights.safetensors" if path.is_dir() else path
    try:
        model.module.load_state_dict(load_file(file, device=str(model.device)))
    except (OSError, SafetensorError) as error:
        why = next(iter(str(error).splitlines()), "").partition(":")[0]
        raise ConfigError(f'init_from = "{path}" cannot be read ({why}); give a finished run or its model') from None
    except RuntimeError as error:
        why = str(error).splitlines()[-1].strip()
        raise ConfigError(f'init_from = "{path}" holds another model ({why}); use the same task and options') from None


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'device = "{name}" is unknown; use auto, cpu, cuda or cuda:N') from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device = "{name}" is not supported; use auto, cpu, cuda or cuda:N')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device = "{name}" but this machine has no usable GPU; use device = "cpu"')
    return device
