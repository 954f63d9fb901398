"""One record at a time: the reference that the other engines are checked against, and the last fallback."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from adp2sgd.flat import FlatModel
from adp2sgd.gradient.clip import clip_factors
from adp2sgd.gradient.engine import Clipped
from adp2sgd.gradient.untouched import may_keep, untouched
from adp2sgd.task import Loss


class Loop:
    """Engine that runs the model on each record alone, and puts back what that changes in the model, so nothing can
    couple records. Any dtype, any module."""

    def __init__(self, model: FlatModel, loss: Loss, *, copies: int = 1) -> None:
        self.model, self.loss, self.copies = model, loss, copies
        self._guarded = may_keep(model.module)

    def clipped_sum(self, inputs: Tensor, targets: Tensor, clip_norm: float) -> Clipped:
        """See `Engine.clipped_sum`. Rows i·copies … of the inputs are the copies of record i."""
        dtype = self.model.weights.dtype
        total = torch.zeros_like(self.model.weights, dtype=torch.float64)
        norms = []
        for start in range(0, len(inputs), self.copies):
            rows = slice(start, start + self.copies)
            with untouched(self.model.module, self.loss) if self._guarded else nullcontext():
                gradient = self.gradient(inputs[rows], targets[rows])
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            norms.append(norm.where(torch.isfinite(norm), torch.full_like(norm, float("inf"))))
            if torch.isfinite(norm):
                total.add_(gradient, alpha=float(clip_factors(norm, clip_norm, dtype)))
        return Clipped(total, torch.stack(norms).to(dtype) if norms else self.model.weights.new_zeros(0))

    def gradient(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the mean loss over these rows, laid out like the model's weights."""
        named = dict(self.model.module.named_parameters())
        parameters = [named[piece.name] for piece in self.model.slices]
        with torch.enable_grad():
            loss = self.loss(self.model.module(inputs), targets).mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        return torch.cat([g.reshape(-1) for g in flat])
