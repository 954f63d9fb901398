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
"""A parameter's norm may grow or shrink by this factor before the weights are probed again."""
FARTHEST = 1000.0
"""A parameter whose norm is so many times that of the initial weights is never left to a fast clipper. One that is so
many times smaller than ordinary counts as no smaller: its last steps to zero change nothing."""
LEAST = 1e-5
"""Of the clip norm: a share that moves by less with the size of its batch is harmless."""
WORSE = 10.0
"""So many times as far as at the initial weights may rounding move a share, if it moves there by at most `LEAST`."""


class WeightRange:
    """A box around the norms that the parameters had when `drift` was last found small enough: each may be `GROWTH`
    times larger or smaller. No norm may be more than `FARTHEST` times what it was at first.

    `drift`: how far rounding moves a record's clipped share with the size of its batch, as a part of the clip norm, at
    the present weights and for synthetic records. `at_first`: the same at the initial weights, which are the present
    ones now. If it is larger than `LEAST`, or unknown (infinite), the initial weights have no box: each call probes
    until it finds harmless weights.
    """

    def __init__(self, model: FlatModel, drift: Callable[[], float], at_first: float) -> None:
        self._parameters = list(model.named_views(model.weights).values())
        ordinary = _ordinary(model)
        self._floor = ordinary / FARTHEST
        norms = self._norms()
        self._farthest = FARTHEST * torch.maximum(norms, ordinary)
        harmless = at_first <= LEAST
        self._drift, self._tolerated = drift, max(LEAST, WORSE * at_first) if harmless else LEAST
        self._probed = norms if harmless else torch.full_like(norms, torch.nan)  # nothing lies near NaN

    def holds(self) -> bool:
        """Whether the present weights may be left to a fast clipper. Outside the box they are probed. Where the probe
        finds them harmless, the box moves to them."""
        norms = self._norms()
        if bool(((norms <= GROWTH * self._probed) & (self._probed <= GROWTH * norms)).all()):
            return True
        if not bool((norms <= self._farthest).all()) or not self._drift() <= self._tolerated:
            return False
        self._probed = norms
        return True

    def _norms(self) -> Tensor:
        norms = torch.stack(torch._foreach_norm(self._parameters))
        return torch.maximum(norms, self._floor)  # NaN stays


def _ordinary(model: FlatModel) -> Tensor:
    """The norm of each parameter if its numbers were as large as those of the whole model: some start at zero. In a
    model that starts at zero altogether, numbers of 1 are ordinary."""
    size = torch.linalg.vector_norm(model.weights) / max(1, len(model.weights)) ** 0.5
    size = torch.where(size > 0, size, torch.ones_like(size))
    return torch.stack([size * (piece.end - piece.start) ** 0.5 for piece in model.slices])
