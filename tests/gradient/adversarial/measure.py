"""How far one record moves the clipped sum, through the path of a real run.

A case (see `cases.py`) becomes a task. `Path.of` takes it through `engine.setup` as every run does: the refusals, the
choice of the clipper at the initial weights, the learner with its `PrivateStep`. Only the noise is left out.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

import torch
from torch import Tensor, nn

from adp2sgd.config import Config, Privacy
from adp2sgd.data.batches import Batch
from adp2sgd.engine import setup
from adp2sgd.errors import PrivacyError
from adp2sgd.gradient.bookkeeping import BookKeeping
from adp2sgd.gradient.choose import Automatic
from adp2sgd.gradient.functional import Functional
from adp2sgd.learner import Learner
from adp2sgd.randomness.noise import NoiseSource
from adp2sgd.task import Loss
from cases import CASES
from conftest import gradient_of
from couplings import OUTLIERS
from kinds import ODD, RECORDS, Case

CLIPPERS = {BookKeeping: "fast", Functional: "vmap"}
ClippedSum = Callable[[Tensor, Tensor, float], Tensor]
"""(inputs, targets, clip norm) → the clipped sum in float64."""


class Silent(NoiseSource):
    """Adds nothing, and keeps the sum as it was before the noise."""

    def __init__(self) -> None:
        super().__init__(bytes(32), "test", seeded=True)
        self.total = torch.zeros(0)

    def add_normal(self, vector: Tensor, scale: float, *, out: Tensor | None = None, divisor: float = 1.0) -> None:
        assert scale > 0
        self.total = vector.detach().double().clone()


@dataclass(frozen=True, eq=False)
class Path:
    """A run that was prepared for one case. `refusal` says why, where private mode refuses the case."""

    name: str
    case: Case
    run: setup.Setup | None
    learner: Learner | None
    refusal: str = ""

    @classmethod
    def of(cls, name: str, folder: Folder, clipper: str | None = None) -> Path:
        """Everything that precedes the first step of a run. `clipper`: instead of the case's."""
        clipper = clipper or CASES[name].clipper
        privacy = Privacy(mode="private", noise_multiplier=1.0, delta=1e-5, clip_norm=1.0, clipper=clipper)
        config = Config(
            task="cases:task", options={"case": name}, batch_size=16, epochs=1, seed=0, device="cpu", privacy=privacy
        )
        try:
            with quiet():
                run = setup.prepare(config)
                learner = run.learner(0, folder)
        except PrivacyError as error:
            return cls(name, CASES[name], None, None, str(error))
        return cls(name, CASES[name], run, learner)

    @property
    def taken(self) -> str:
        """Who takes the gradients: "fast", "vmap" or "loop"; or "refused"."""
        if self.run is None:
            return "refused"
        clipper = self.run.compute.clipper
        return CLIPPERS.get(type(clipper.chosen if isinstance(clipper, Automatic) else clipper), "loop")  # type: ignore[call-overload, no-any-return]

    @property
    def why(self) -> str:
        """Why not by the fast clipper."""
        return str(getattr(self.run and self.run.compute.clipper, "reason", "")) or self.refusal

    def clipped_sum(self, inputs: Tensor, targets: Tensor, clip_norm: float) -> Tensor:
        """What a step of the run adds its noise to."""
        path = self.anew() if self.case.stateful else self
        assert path.run is not None
        assert path.learner is not None
        noise, path.learner.clip_norm = Silent(), clip_norm
        with quiet():
            step, batch = path.learner._gradient_step, Batch(inputs.clone(), targets.clone(), 16.0)
            gradient_of(step, path.run.compute.model, batch, noise)
        return noise.total

    @property
    def within_range(self) -> bool:
        """Whether the fast clipper is used at the present weights."""
        clipper = self.run and self.run.compute.clipper
        return isinstance(clipper, Automatic) and clipper.range is not None and clipper.range.holds()

    def anew(self) -> Path:
        """The same run with a new model, at the present weights: a step leaves something behind in the old one."""
        assert self.run is not None
        OUTLIERS.clear()
        with tempfile.TemporaryDirectory() as folder:
            path = Path.of(self.name, Folder(folder))
        assert path.run is not None
        path.run.compute.model.weights.copy_(self.run.compute.model.weights)
        return path

    @contextmanager
    def at(self, weights: str) -> Iterator[float]:
        """The model at weights that a neighbour sent; gives the clip norm that goes with them."""
        assert self.run is not None
        model, kept = self.run.compute.model, self.run.compute.model.weights.clone()
        if weights == "own":
            with torch.no_grad():
                self.case.weights(model.named_views(model.weights))
        else:
            WEIGHTS[weights](model.weights)
        try:
            yield self.case.clip if weights != "level" else self._level()
        finally:
            model.weights.copy_(kept)

    def _level(self) -> float:
        """The norm of the first record's gradient, so that alike ones lie at the clip norm to the last bit."""
        assert self.run is not None
        inputs, targets = records(self.case, 1)
        norm = float(
            torch.linalg.vector_norm(gradient_alone(self.run.compute.model.module, self.case.loss, inputs, targets))
        )
        return norm if 1e-6 <= norm < 1e6 else 1.0


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda weights: weights.mul_(factor)


WEIGHTS: dict[str, Callable[[Tensor], Any]] = {
    "honest": lambda weights: None,
    "huge": _times(1e4),
    "overflowing": _times(1e30),
    "tiny": _times(1e-6),
    "denormal": _times(1e-40),
    "zero": torch.Tensor.zero_,
    "level": lambda weights: None,
}
"""What a neighbour may send, made from the initial weights in place; "own" is the case's."""
AMPLIFYING = ("huge", "overflowing")
"""At these, rounding (which may differ with the size of a batch) can grow by any factor, so that batches are taken
record by record."""


def records(case: Case, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` records of a case, whose odd one stands at ODD."""
    inputs, targets = case.records(max(count, RECORDS))
    return case.prepare(inputs[:count]), targets[:count]


def watched(count: int) -> list[int]:
    """The records that are left out in turn: all of a small batch, else the ends and the odd one."""
    return list(range(count)) if count <= 5 else [0, ODD, count - 1]


def influence(clipped_sum: ClippedSum, inputs: Tensor, targets: Tensor, clip_norm: float) -> float:
    """The farthest that leaving out one record moves the sum, in clip norms; infinite where a sum is not finite."""
    whole, most = clipped_sum(inputs, targets, clip_norm), 0.0
    for record in watched(len(inputs)):
        rest = torch.arange(len(inputs)) != record
        moved = float(torch.linalg.vector_norm(whole - clipped_sum(inputs[rest], targets[rest], clip_norm)))
        most = max(most, float("inf") if math.isnan(moved) else moved / clip_norm)
    return most


def gradient_alone(module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of one record by plain autograd."""
    OUTLIERS.clear()
    trained = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(module(inputs.clone()), targets).sum(), trained, allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, gradients, strict=True)]
    return torch.cat([g.reshape(-1) for g in flat])


def reference(path: Path, inputs: Tensor, targets: Tensor, clip_norm: float) -> Tensor:
    """The clipped sum by a loop over single records, in float64 where the model can, laid out like the weights.

    A record whose gradient is not finite in the model's own type contributes nothing, as in every clipper."""
    assert path.run is not None
    dtype = torch.float64 if path.case.widens else torch.float32
    total = torch.zeros_like(path.run.compute.model.weights, dtype=torch.float64)
    for row in range(len(inputs)):
        own = copy.deepcopy(
            path.run.compute.model.module
        ).train()  # a new one for each, in case that it keeps something
        wide, x, y = copy.deepcopy(own).to(dtype), inputs[row, None], targets[row, None]
        narrow = torch.linalg.vector_norm(gradient_alone(own, path.case.loss, x, y).double())
        if not narrow < torch.finfo(torch.float32).max:
            continue
        x = x.to(dtype) if x.is_floating_point() else x
        y = y.to(dtype) if y.is_floating_point() else y
        found = gradient_alone(wide, path.case.loss, x, y)
        total += found * min(1.0, clip_norm / max(float(torch.linalg.vector_norm(found)), 1e-300))
    sizes = {name: p.numel() for name, p in path.run.compute.model.module.named_parameters() if p.requires_grad}
    parts = dict(zip(sizes, total.split(list(sizes.values())), strict=True))
    return torch.cat([parts[piece.name] for piece in path.run.compute.model.slices])


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
