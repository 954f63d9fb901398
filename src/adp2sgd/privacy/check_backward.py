"""Checks that the gradient of a batch is the sum of its records' gradients.

A hook, or a backward pass written in Python, can change gradients depending on the whole batch. Such code often acts
only beyond a threshold, so losses and inputs of several orders of magnitude are tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor, nn

from adp2sgd import tree
from adp2sgd.device import repeatable
from adp2sgd.errors import PrivacyError
from adp2sgd.privacy.probe_rows import FAILURES
from adp2sgd.tree import Inputs

if TYPE_CHECKING:
    from adp2sgd.task import Loss

LARGE = 1e3
"""Factor on some inputs and on the losses of some records."""
SPREAD = 4
"""The largest batch tried exceeds the expected size by this many standard deviations."""
MOST = 1000
"""Records that a clipper takes at once, at most."""


def sizes(records: int, expected: float | None) -> tuple[int, ...]:
    """Batch sizes to try: `records`, an odd number, and one that a Poisson batch of mean `expected` rarely exceeds."""
    if expected is None:
        return (records, 7)
    return (records, 7, min(MOST, int(expected + SPREAD * expected**0.5) + 1))


def runs_own_code(module: nn.Module, loss: Loss) -> bool:
    """Whether a pass may run code that is neither torch's nor this package's."""
    hooked = any(part._backward_hooks or part._backward_pre_hooks for part in module.modules())
    return hooked or any(p._backward_hooks for p in module.parameters()) or not repeatable(module, loss)


def refuse_coupled_backward(
    module: nn.Module, loss: Loss, inputs: Inputs, targets: Tensor, tolerance: float, batches: Iterable[int]
) -> None:
    """Refuse a model if the gradient of a batch differs from the sum of its records' gradients by more than `tolerance`
    of their norms. Batches of these sizes are drawn from the given records."""
    records = len(targets)
    weights = torch.ones(records, dtype=torch.float64)
    weights[1::2] = LARGE
    for factor, size in [(1.0, size) for size in batches] + [(LARGE, records)]:
        x = tree.each(lambda part, by=factor: part * by if part.is_floating_point() else part, inputs)  # type: ignore[misc]
        singles = [slice(i, i + 1) for i in range(records)]
        alone = [_gradient(module, loss, tree.take(x, i), targets[i], weights[i]) for i in singles]
        picked = torch.arange(records)
        if size != records:
            picked = torch.randint(0, records, (size,), generator=Generator().manual_seed(size))
        together = _gradient(module, loss, tree.take(x, picked), targets[picked], weights[picked])
        parts = [part for part in alone if part is not None]
        if together is None or len(parts) < records:  # a failure on unusual records says nothing about others
            continue
        expected = sum((parts[i] for i in picked.tolist()), torch.zeros_like(together))
        scale = sum(float(parts[i].norm()) for i in picked.tolist())
        if float((together - expected).norm()) > tolerance * scale:
            raise PrivacyError(
                f"the gradient of {size} synthetic records is not the sum of their gradients, so a hook, an "
                "autograd.Function, the model or the loss mixes the records of a batch; treat each record by itself"
            )


def _gradient(module: nn.Module, loss: Loss, inputs: Inputs, targets: Tensor, weights: Tensor) -> Tensor | None:
    """Gradient of the weighted sum of the losses, flattened; None if it fails or is not finite."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    with contextlib.suppress(*FAILURES), torch.enable_grad():
        losses = loss(tree.call(module, inputs), targets)
        total = (losses * weights.to(losses)).sum()
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        gradient = torch.cat([part.reshape(-1) for part in flat])
        return gradient if bool(gradient.isfinite().all()) else None
    return None
