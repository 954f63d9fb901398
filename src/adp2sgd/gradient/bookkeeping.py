"""One forward and one backward pass, then the clipped sum from what was recorded: no second pass, and no layer's
per-record gradients are formed where Gram matrices cost less. Measured against others by benchmarks/gradient.py."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from adp2sgd.flat import FlatModel
from adp2sgd.gradient.clip import clip_factors, finite_or_infinite
from adp2sgd.gradient.engine import Clipped
from adp2sgd.gradient.recording import Recording
from adp2sgd.task import Loss


class BookKeeping:
    """Engine for models whose parameters are used in ways that `recording` has rules for.

    `piece`: at most so many records are processed at once. `autocast`: run layers in that type; norms and sums stay
    in float32 and are of the same values. Raises `UnsupportedError` where there is no rule.
    """

    name = "book-keeping"

    def __init__(
        self, model: FlatModel, loss: Loss, *, copies: int = 1, piece: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.copies, self.piece, self.autocast = model, loss, copies, piece, autocast

    def clipped_sum(self, inputs: Tensor, targets: Tensor, clip_norm: float) -> Clipped:
        """See `Engine.clipped_sum`. Rows i·copies … of the inputs are the copies of record i."""
        records = len(inputs) // self.copies
        if records == 0 or not self.model.slices:
            zeros = torch.zeros_like(self.model.weights)
            return Clipped(zeros, zeros.new_zeros(records))
        rows = min(self.piece or records, records) * self.copies
        parts = zip(inputs.split(rows), targets.split(rows), strict=True)
        done = [self._piece(x, y, clip_norm) for x, y in parts]
        if len(done) == 1:
            return done[0]
        total = done[0].total
        for part in done[1:]:
            total += part.total
        return Clipped(total, torch.cat([part.norms for part in done]))

    def record(self, inputs: Tensor, targets: Tensor) -> tuple[Recording, Tensor]:
        """The recorded passes over these rows, and each record's norm."""
        module = self.model.module
        named = dict(module.named_parameters())
        trained = {piece.name: named[piece.name] for piece in self.model.slices}
        recording = Recording(trained, module.buffers(), len(inputs) // self.copies)
        autocast = torch.autocast(inputs.device.type, self.autocast) if self.autocast else nullcontext()
        with torch.enable_grad(), autocast, recording:
            losses = self.loss(module(inputs), targets)
            mean = losses.sum() / self.copies
        if mean.requires_grad:
            # Only what leads to recorded layers: the parameters' own `grad` is never written.
            mean.backward(inputs=recording.leaves)
        with torch.no_grad():
            return recording, finite_or_infinite(recording.finish())

    def _piece(self, inputs: Tensor, targets: Tensor, clip_norm: float) -> Clipped:
        recording, norms = self.record(inputs, targets)
        with torch.no_grad():
            total = torch.zeros_like(self.model.weights)
            factors = clip_factors(norms, clip_norm)
            views = self.model.named_views(total)
            for name, part in recording.weighted(factors):
                views[name].copy_(part)
            del recording
            good = torch.isfinite(norms)
            if bool(good.all()):
                return Clipped(total, norms)
            # A record's NaN times factor 0 is NaN, so such records are left out of the sum altogether.
            rows = good.repeat_interleave(self.copies)
            again = self.clipped_sum(inputs[rows], targets[rows], clip_norm)
            norms[good] = again.norms
            return Clipped(again.total, norms)
