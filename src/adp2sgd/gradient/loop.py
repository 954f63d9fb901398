"""One record at a time: the reference that the other clippers are checked against, and the last fallback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.clip import clip_factors
from adp2sgd.gradient.clipper import Clipped
from adp2sgd.gradient.hooks import known
from adp2sgd.gradient.state import Memory
from adp2sgd.task import Loss
from adp2sgd.tree import Inputs


class Loop:
    """Clipper that runs the model on each record alone, from the same weights and the same state in Python each time
    (see `Memory` for what that leaves out). Any dtype, any module, any hook."""

    def __init__(self, model: FlatModel, loss: Loss, *, copies: int = 1) -> None:
        self.model, self.loss, self.copies = model, loss, copies
        self._memory = Memory(model.module, loss)

    def clipped_sum(self, inputs: Inputs, targets: Tensor, clip_norm: float, records: int | None = None) -> Clipped:
        """See `Clipper.clipped_sum`. Rows i·copies … of the inputs are the copies of record i."""
        dtype = self.model.weights.dtype
        total = torch.zeros_like(self.model.weights, dtype=torch.float64)
        norms: list[Tensor] = []
        plain = known(self.model.module, self.loss)
        before = () if plain else tuple((vector, vector.detach().clone()) for vector in self._vectors())
        for x, y in zip(tree.split(inputs, self.copies), tree.split(targets, self.copies), strict=True):
            counts = records is None or len(norms) < records
            with nullcontext() if plain else self._kept(before):
                gradient = self.gradient(tree.each(Tensor.clone, x), y.clone())  # a layer may change them
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            finite = torch.isfinite(norm)
            norms.append(norm.where(finite, torch.full_like(norm, float("inf"))))
            safe = torch.where(finite & counts, gradient, torch.zeros_like(gradient))  # no NaN · 0, and no branch
            total.add_(safe, alpha=float(clip_factors(norm, clip_norm, dtype)))
        return Clipped(total, torch.stack(norms).to(dtype) if norms else self.model.weights.new_zeros(0))

    def gradient(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """The gradient of the mean loss over these rows, laid out like the model's weights."""
        named = dict(self.model.module.named_parameters())
        parameters = [named[piece.name] for piece in self.model.slices]
        with torch.enable_grad():
            loss = self.loss(tree.call(self.model.module, inputs), targets).mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        return torch.cat([g.reshape(-1) for g in flat])

    def _vectors(self) -> list[Tensor]:
        """All numbers that a pass might change: weights, gradients, frozen parameters, buffers. Writes to
        `Tensor.data` leave no other trace."""
        module = self.model.module
        frozen = [p for p in module.parameters() if not p.requires_grad]
        return [self.model.weights, self.model.grad, *frozen, *module.buffers()]

    @contextmanager
    def _kept(self, before: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """All numbers are `before` again afterwards, and what the model keeps in Python is what it was."""
        gradients = [(p, p.grad) for p in self.model.module.parameters()]
        try:
            with self._memory.kept():
                yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for vector, right in before:
                if not torch.equal(vector.detach(), right):
                    vector.data.copy_(right)
