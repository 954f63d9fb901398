"""The weights for which a fast clipper is used. A neighbour may send weights that amplify rounding errors.

A batch of another size is taken by other kernels, which round otherwise. Ordinary weights keep that difference at about
1e-6 of a gradient. Weights a thousand times as large can turn it into another gradient, for every record of the batch.
The decision depends on the weights alone, which are public; it never reads a record.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adp2sgd.flat import FlatModel

GROWTH = 4.0
"""A parameter's norm may grow by this factor before the weights are probed again."""
FARTHEST = 1000.0
"""A parameter whose norm is so many times that of the initial weights is never left to a fast clipper."""
LEAST = 1e-5
"""Of the clip norm: a share that moves by less with the size of its batch is harmless."""
WORSE = 10.0
"""So many times as far as at the initial weights may rounding move a share."""


class WeightRange:
    """Limits on the norm of each parameter: `GROWTH` times what it was at weights where `drift` was small enough, and
    at most `FARTHEST` times what it was at first.

    `drift`: how far rounding moves a record's clipped share with the size of its batch, as a part of the clip norm, at
    the present weights and for synthetic records. `at_first`: the same at the initial weights, which are the present
    ones now.
    """

    def __init__(self, model: FlatModel, drift: Callable[[], float], at_first: float) -> None:
        self._parameters = list(model.named_views(model.weights).values())
        self._drift, self._tolerated = drift, max(LEAST, WORSE * at_first)
        self._first = torch.maximum(self._norms(), _ordinary(model))
        self._limits = GROWTH * self._first

    def holds(self) -> bool:
        """Whether the present weights lie within the limits. Where a probe finds other weights harmless, the limits
        move to include them."""
        norms = self._norms()
        if bool((norms <= self._limits).all()):
            return True
        if not bool((norms <= FARTHEST * self._first).all()) or not self._drift() <= self._tolerated:
            return False
        self._limits = torch.maximum(self._limits, GROWTH * norms)
        return True

    def _norms(self) -> Tensor:
        return torch.stack(torch._foreach_norm(self._parameters))


def _ordinary(model: FlatModel) -> Tensor:
    """The norm of each parameter if its numbers were as large as those of the whole model: some start at zero. In a
    model that starts at zero altogether, numbers of 1 are ordinary."""
    size = torch.linalg.vector_norm(model.weights) / max(1, len(model.weights)) ** 0.5
    size = torch.where(size > 0, size, torch.ones_like(size))
    return torch.stack([size * (piece.end - piece.start) ** 0.5 for piece in model.slices])
