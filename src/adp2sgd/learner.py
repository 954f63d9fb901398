"""THE ALGORITHM, once: what one learner does. No clock, no sockets, no processes; engines drive it.

One step of Algorithm 1 at learner k, in the paper's order:

    learner.begin()                 read ŵ, a snapshot of the own model, and sample a batch
    g = learner.gradient()          charge the budget, clip, add noise: the mean gradient at ŵ
    learner.mix(mine, theirs)       average with a partner: add (theirs − mine)/2, once per completed exchange
    learner.update(g)               descend with the gradient, which may be stale

A partner's snapshot may arrive at any time between these steps. Therefore `mix` adds a difference of two snapshots
and overwrites nothing: both sides change by exactly opposite amounts, whatever updates ran meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adp2sgd.data.batches import Batch
from adp2sgd.device import SETTLED, draws
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.privatize import Gradient, GradientStep, PrivateStep, Summed
from adp2sgd.optimizer import EMA, Optimizer
from adp2sgd.privacy.budget import Budget
from adp2sgd.progress import Progress
from adp2sgd.randomness.streams import Streams
from adp2sgd.sampler import Sampler
from adp2sgd.shared_vector import SharedVector
from adp2sgd.withhold import withholding_records


class Learner:
    """One worker of the paper: its model, its records, its noise, its budget.

    `state` is the vector that travels: the weights, then (outside private mode) the float buffers. `model` is only a
    place to compute at. The learners of one process may share it, because each step loads ŵ into it.
    An exchange thread may call `snapshot`, `mix` and `adopt` while a training thread does the rest.
    """

    def __init__(
        self,
        *,
        number: int,
        model: FlatModel,
        sampler: Sampler,
        gradient_step: GradientStep,
        optimizer: Optimizer,
        progress: Progress,
        streams: Streams,
        budget: Budget | None = None,
    ) -> None:
        self.number, self.name, self.steps = number, str(number), 0  # `name`: in messages
        self.sampler, self.optimizer, self.progress, self.budget = sampler, optimizer, progress, budget
        shared = [model.weights, model.buffers] if budget is None else [model.weights]  # private: no buffer travels
        self.vector = SharedVector(torch.cat(shared))
        self.state = self.vector.values
        self.weights, self.buffers = self.state[: len(model.weights)], self.state[len(model.weights) :]
        self.read = self.state.clone()  # ŵ
        optimizer.track(self.state)
        self.gradient_norm = torch.zeros(())  # of the last gradient, after the noise; stays at the learner
        self._model, self._gradient_step, self._streams = model, gradient_step, streams
        self._draws = budget is not None or draws(model.module)

    # ------------------------------------------------------------ Algorithm 1

    def begin(self) -> None:
        """Read ŵ and sample this step's batch."""
        self.vector.copy_to(self.read)
        self._sample()

    def gradient(self) -> Gradient:
        """The mean gradient at ŵ over the batch, privatized in private mode."""
        self._charge()
        with withholding_records(self.sampler.task, self.name, private=self.budget is not None):
            batch = self.sampler.batch()
            return self._noise(self._clip(batch), batch)

    def mix(self, mine: Tensor, theirs: Tensor, intact: Callable[[], bool] | None = None) -> bool:
        """This learner's half of an exchange of the snapshots `mine` and `theirs`; see `SharedVector.mix`."""
        return self.vector.mix(mine, theirs, intact)

    def update(self, gradient: Gradient) -> None:
        """Descend, and count the step."""
        self._descend(gradient)
        self.steps += 1
        self.progress.advance()

    def _sample(self) -> None:
        """Choose the batch's rows; in private mode every record is in it with the same probability, independently."""
        self.sampler.draw(self.steps)

    def _charge(self) -> None:
        """Count the step as spent, on disk, before anything of it is computed."""
        if self.budget is not None:
            self.budget.draw()

    def _clip(self, batch: Batch) -> Summed:
        """The sum of the records' gradients at ŵ, each clipped in private mode."""
        if self._draws:
            self._streams("layers", self.steps).seed_layers(self._model.device)
        self._model.load(self.read)
        return self._gradient_step.clip(self._model, batch)

    def _noise(self, total: Summed, batch: Batch) -> Gradient:
        """The sum plus noise, divided by the expected size of the batch."""
        return self._gradient_step.noise(self._model, total, batch, self._streams("noise", self.steps))

    def _descend(self, gradient: Gradient) -> None:
        """Comes after the noise, so it costs no privacy."""
        self.gradient_norm = torch.linalg.vector_norm(gradient.vector)
        with self.vector.mutex:
            self.optimizer.descend(self.weights, gradient.vector, self.progress.epoch)
            if gradient.buffers is not None:
                self.buffers.add_(gradient.buffers)
            self.optimizer.average(self.state)

    @property
    def may_step(self) -> bool:
        """False once the privacy budget allows no further step; the learner then goes on averaging."""
        return self.budget is None or not self.budget.exhausted

    @property
    def clip_norm(self) -> float | None:
        """C at the next step: public, as it follows from what earlier steps released. None outside private mode."""
        return self._gradient_step.clip_norm if isinstance(self._gradient_step, PrivateStep) else None

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        if isinstance(self._gradient_step, PrivateStep) and value is not None:
            self._gradient_step.clip_norm = value

    @property
    def noise_source(self) -> str:
        """Where batches and noise come from, in words."""
        return self._streams("noise", 0).name_on(self._model.device)

    def snapshot(self, out: Tensor | None = None) -> Tensor:
        """A copy of the state to send, in `out` if given."""
        return self.vector.snapshot(out)

    def evaluated(self, out: Tensor | None = None) -> Tensor:
        """A copy of what is evaluated and exported: the exponential average of the state if there is one, else it."""
        average = self.optimizer.state.get(EMA)
        return self.snapshot(out) if average is None else self.vector.copy_of(average, out)

    def optimizer_state(self) -> dict[str, Tensor]:
        """A copy of the optimizer's state at one moment."""
        with self.vector.mutex:
            return self.optimizer.copy()

    def adopt(self, state: Tensor) -> None:
        """Go on from another learner's model, with a new optimizer state: the old one belongs to a lost model."""
        with self.vector.mutex:
            self.state.copy_(state)
            self.optimizer.reset(self.state)

    def resume_at(self, step: int) -> None:
        """Go on after `step` own steps, with ŵ as restored from a checkpoint."""
        self.steps = step
        if self.budget is not None and self._streams.seeded:
            self.budget.charge(step)
        self._sample()

    def rehearse(self) -> None:
        """Run the passes on zeros a few times, so that the first step takes no longer than the others."""
        for _ in range(SETTLED + 2):
            self._gradient_step.clip(self._model, self.sampler.blank())
