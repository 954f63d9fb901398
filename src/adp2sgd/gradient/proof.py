"""The program of a model and its loss, written down from passes over synthetic records and proven for any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from adp2sgd import tree
from adp2sgd.gradient.keeping import RULES
from adp2sgd.gradient.layouts import prove
from adp2sgd.gradient.program import Program, Writer, unite
from adp2sgd.tree import Inputs

SIZES = (3, 4)
"""Records of the two passes: sizes that both have are no sizes of a batch."""


def program_of(
    run: Callable[[Writer, Inputs, Tensor, int], Tensor], module: nn.Module, trained: Sequence[Tensor], inputs: Inputs,
    targets: Tensor, copies: int,
) -> Program:  # fmt: skip
    """What `run` does with a batch of any size. Only shape and type of a row of inputs and targets are used.

    Guarantee: that of `layouts.prove`.
    """
    written: list[tuple[Writer, Tensor]] = []
    with torch.random.fork_rng([targets.device] if targets.is_cuda else []):
        for records in (SIZES[0], *SIZES):  # first once more, so that tables kept outside of the model are made
            x, y = (synthetic(like, records * copies) for like in (inputs, targets))
            writer = Writer(module, x, y)
            written.append((writer, run(writer, x, y, records)))
    _, (one, first), (other, second) = written
    program = unite(one, SIZES[0], other, SIZES[1], (first, second))
    prove(program, RULES, trained, list(module.buffers()))
    return program


def synthetic(like: Inputs, rows: int) -> Any:
    """Random rows of the structure, shape and type of `like`; integers are 0 or 1, which every vocabulary has."""
    generator = Generator().manual_seed(0)

    def drawn(part: Tensor) -> Tensor:
        shape = (rows, *part.shape[1:])
        if part.is_floating_point():
            return torch.rand(shape, generator=generator, dtype=torch.float64).to(part)
        return torch.randint(0, 2, shape, generator=generator).to(part)

    return tree.each(drawn, like)
