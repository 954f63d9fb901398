"""The contract of a clipper: the sum of per-record gradients, each clipped to one norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adp2sgd.tree import Inputs


@dataclass(frozen=True, eq=False, repr=False)
class Clipped:
    """`total`: the sum of the clipped per-record gradients, laid out like `FlatModel.weights`; in float64 where it was
    added up in pieces, since rounding it before the noise would count as a record's influence.
    `norms`: each record's L2 norm over all parameters, before clipping; infinite where the gradient is not finite."""

    total: Tensor
    norms: Tensor


class Clipper(Protocol):
    """Built once for a `FlatModel` and a per-record loss; reads the model's current weights at each call."""

    def clipped_sum(self, inputs: Inputs, targets: Tensor, clip_norm: float, records: int | None = None) -> Clipped:
        """Guarantee: adding or removing one record moves `total` by at most `clip_norm` in L2 norm.

        A record whose gradient is not finite contributes zero. An empty batch gives zero. The model's `grad` vector
        is left untouched.
        With `records` only the first so many records count. The others fill up the batch: they contribute zero whatever
        their gradients are. The passes then depend neither on `records` nor on any value, and `norms` are of all.
        """
        ...
