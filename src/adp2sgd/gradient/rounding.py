"""How far rounding may carry a record's share of the sum from the gradient whose norm was taken.

A neighbour may send weights for which a record's terms x_t ⊗ g_t cancel: the gradient is then small, its terms are
not, and their rounding is all that is left. So squares come from Gram matrices in float64, and each norm carries a
`doubt` in proportion to S = Σ_t ‖x_t‖‖g_t‖, which the clip factor allows for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDINGS = 4
"""So many roundings of S are allowed for in every sum; those of a sum's terms have both signs and mostly cancel."""
BLOCK = 256
"""So many squares are added in float32, further ones in float64: a long float32 sum loses up to 1e-3 of itself."""
GRAM_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Operands are widened to float64 in portions of about this size."""
GRAM_WIDTH = 512
"""A GPU takes longer inner products in pieces, so that all its processors have a part in them."""
TENSOR_FLOAT = 2.0**-11
"""Half a unit of TF32, in which a GPU may multiply float32 numbers."""
HALF = 3 * 2.0**-8
"""The same for bfloat16, to which a CPU may round three factors if precision "medium" is asked of it."""
TRANSFORMED = 64 * 2.0**-24
"""What convolution by Winograd's or Fourier's transform may add, which cuDNN is free to choose."""

SMALLEST = 2.0**-124
"""What a gradient times its clip factor may be wrong by, however small it is: in float32 by 2^-150, or 2^-126 where
such small numbers count as zero; in three parts of bfloat16 by what each part lacks."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Of each record's gradient [n], in float64: `squares`, its squared norm, and `doubt`, how far its share of the sum
    may lie from it by rounding (a norm; None where the sum is of the very values whose norm was taken).

    `doubt` counts `ROUNDINGS` roundings; in the worst case there are as many as `terms`. `lost` is what the share may
    differ by besides, however small the clip factor.
    """

    squares: Tensor
    doubt: Tensor | None = None
    terms: int = 0
    lost: Tensor | None = None


def together(parts: list[Measured]) -> Measured:
    """The parameters' gradients as one vector. A square is never negative, so none hides another."""
    squares = torch.stack([part.squares for part in parts]).clamp(min=0).sum(0)
    doubt, lost = (_joined([getattr(part, name) for part in parts]) for name in ("doubt", "lost"))
    return Measured(squares, doubt, max(part.terms for part in parts), lost)


def _joined(norms: list[Tensor | None]) -> Tensor | None:
    known = [norm for norm in norms if norm is not None]
    return torch.linalg.vector_norm(torch.stack(known), dim=0) if known else None


def roundoff(operand: Tensor, kind: str = "") -> float:
    """Rounding error of a sum of products with this operand, relative to S. `kind`: "matmul", "convolution" or none."""
    if operand.dtype == torch.float64:
        return ROUNDINGS * 2.0**-53
    fine = ROUNDINGS * 2.0**-24
    if not kind:
        return fine
    if operand.is_cuda:
        return fine + (TENSOR_FLOAT if _tensor_float(kind) else TRANSFORMED if kind == "convolution" else 0.0)
    return fine if torch.get_float32_matmul_precision() == "highest" else HALF


def as_multiplied(operand: Tensor, kind: str) -> Tensor:
    """The values that a product of this kind reads: rounded where it would drop the low bits of float32."""
    if not operand.is_cuda or operand.dtype != torch.float32 or not _tensor_float(kind):
        return operand
    return operand.view(torch.int32).add(0x1000).bitwise_and_(-0x2000).view(torch.float32)


def _tensor_float(kind: str) -> bool:
    return torch.backends.cudnn.allow_tf32 if kind == "convolution" else torch.backends.cuda.matmul.allow_tf32


def underflow(numbers: int, inputs: Tensor) -> Tensor:
    """[n]: the norm of what a share may be wrong by where so many gradients at the outputs of each record are first
    multiplied with the clip factor, and then with inputs; `inputs`: the squares of all of these. Of little weight, but
    where weights are made for it: inputs of 1e38, and gradients that the factor brings below float32's numbers."""
    return SMALLEST * (numbers * inputs).sqrt()


def squares(gradients: Tensor) -> Tensor:
    """[n]: squared norms of gradients [n, …], to 3e-7 of themselves."""
    rows = gradients.reshape(len(gradients), -1)
    whole = rows.shape[1] // BLOCK * BLOCK if rows.dtype != torch.float64 else 0
    if not whole:
        return lengths(rows)
    most = rows if whole == rows.shape[1] else rows[:, :whole]
    blocks = torch.linalg.vector_norm(most.view(len(rows), -1, BLOCK), dim=2, dtype=torch.float32)
    found: Tensor = torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64).square_()
    return found if whole == rows.shape[1] else found.add_(lengths(rows[:, whole:]))


def lengths(rows: Tensor) -> Tensor:
    """[n]: Σ_t ‖x_t‖² of rows [n, …], in float64, where nothing under- or overflows."""
    found: Tensor = torch.linalg.vector_norm(rows.reshape(len(rows), -1).double(), dim=1)
    return found.square_()


def gram(rows: Tensor) -> Tensor:
    """[n, t, t]: inner products of the rows [n, t, d] of each record, in float64."""
    portion = max(1, GRAM_BYTES[rows.device.type] // (8 * rows.shape[1] * rows.shape[2]))
    found = [_gram(part) for part in rows.split(portion)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _gram(rows: Tensor) -> Tensor:
    whole = rows.shape[2] // GRAM_WIDTH * GRAM_WIDTH
    if not rows.is_cuda or whole <= GRAM_WIDTH:
        wide = rows.double()
        return torch.bmm(wide, wide.transpose(1, 2))
    pieces = rows[:, :, :whole].unflatten(2, (-1, GRAM_WIDTH)).transpose(1, 2)
    wide = pieces.to(torch.float64, memory_format=torch.contiguous_format).flatten(0, 1)
    found = torch.bmm(wide, wide.transpose(1, 2)).view(len(rows), -1, rows.shape[1], rows.shape[1]).sum(1)
    return found if whole == rows.shape[2] else found.add_(_gram(rows[:, :, whole:]))


def reach(gram_in: Tensor, gram_out: Tensor) -> Tensor:
    """[n]: S = Σ_t ‖x_t‖‖g_t‖ from both Gram matrices."""
    diagonals = [grams.diagonal(dim1=1, dim2=2) for grams in (gram_in, gram_out)]
    return (diagonals[0] * diagonals[1]).sqrt().sum(1)
