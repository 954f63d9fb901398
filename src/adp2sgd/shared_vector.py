"""A vector that a training thread changes while an exchange thread reads it and mixes into it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# Coordinates that `mix` works on at a time. They stay in a core's cache, and torch uses one thread for them: from
# 32,768 on it wakes a second one, which on busy cores costs a hundred times the copy itself.
BLOCK = 31 << 10
COPIED = 1 << 20  # bytes that `snapshot` copies at a time, so that training waits for a tenth of a millisecond at most


class SharedVector:
    """`values`, and a mutex that covers single vector operations.

    `mix` and `snapshot` go block by block, so that training waits for one block at most. Every coordinate is exchanged
    exactly. A copy may hold some blocks from before and some from after an operation that ran meanwhile.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.mutex = threading.Lock()  # for operations of the owner on `values`
        size = len(values) if values.is_cuda else min(len(values), BLOCK)
        self._change = torch.empty_like(values[:size])

    def copy_to(self, out: Tensor) -> Tensor:
        """All values at one moment, in `out`."""
        return self.copy_of(self.values, out)

    def copy_of(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of a vector that the owner changes together with the values, at one moment."""
        with self.mutex:
            return vector.clone() if out is None else out.copy_(vector)

    def snapshot(self, out: Tensor | None = None) -> Tensor:
        """A copy to send, in `out` if given."""
        out = torch.empty_like(self.values) if out is None else out
        if self.values.is_cuda:
            return self.copy_to(out)
        # numpy copies by memcpy, which is 1.7 times as fast as torch's copy (benchmarks/engine.py)
        target, source = out.view(torch.uint8).numpy(), self.values.view(torch.uint8).numpy()
        for start in range(0, len(source), COPIED):
            with self.mutex:
                np.copyto(target[start : start + COPIED], source[start : start + COPIED])
        return out

    def mix(self, mine: Tensor, theirs: Tensor, intact: Callable[[], bool] | None = None) -> bool:
        """Add (theirs − mine)/2.

        `intact` is called after a block of `theirs` has been read and before it is used. When it returns False, `mix`
        leaves out the remaining blocks and returns False.
        """
        for here, own, other in zip(*map(self._blocks, (self.values, mine, theirs)), strict=True):
            change = torch.sub(other, own, out=self._change[: len(own)])
            if intact is not None and not intact():
                return False
            with self.mutex:
                here.add_(change, alpha=0.5)
        return True

    def _blocks(self, vector: Tensor) -> tuple[Tensor, ...]:
        blocks: tuple[Tensor, ...] = vector.split(max(1, len(self._change)))
        return blocks
