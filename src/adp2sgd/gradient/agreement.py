"""Whether a clipper gives the gradients of the loop, on synthetic records and in batches of several sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from adp2sgd import tree
from adp2sgd.errors import PrivacyError
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.clip import FADES
from adp2sgd.gradient.clipper import Clipped, Clipper
from adp2sgd.gradient.loop import Loop
from adp2sgd.gradient.proof import synthetic
from adp2sgd.privacy.checks import without_dropout
from adp2sgd.task import Loss
from adp2sgd.tree import Inputs

PROBE_RECORDS = 4  # none of them its own mirror image

Kind = Callable[[FlatModel, Loss], Clipper]


def objection(
    kind: Kind, model: FlatModel, loss: Loss, x: Inputs, y: Tensor, *, copies: int, sizes: Iterable[int]
) -> str:  # fmt: skip
    """Why this kind of clipper cannot be used; empty if it agrees with the loop on `PROBE_RECORDS` records `x` and `y`,
    and on batches of `sizes` records made of them.

    In float64, where rounding cannot flip a ReLU and so hide or feign a difference; in the model's own type where it
    insists on that. In training mode, as steps run, without dropout.
    """
    unlike = partial(_unlike, loss)
    for dtype, tolerance in ((torch.float64, 1e-6), (model.weights.dtype, 1e-2)):
        try:
            twin = FlatModel(without_dropout(copy.deepcopy(model.module).train().to(dtype)), model.device)
        except Exception as error:  # a compiled function, say, that cannot be copied
            return f"the model cannot be copied ({str(error).splitlines()[0]})"
        # Layers that start at zero would hide what lies behind them.
        twin.weights.add_(synthetic(twin.weights, len(twin.weights)).sub_(0.5), alpha=0.02)
        inputs, targets = (tree.each(partial(_wide, dtype=dtype), t) for t in (x, y))
        alone = Loop(twin, unlike, copies=copies)
        try:
            with WithoutDropout():
                norms = alone.clipped_sum(inputs, targets, float("inf")).norms
                clip = float(norms.min()) / 2
                parts = [alone.clipped_sum(*rows, clip) for rows in _records(inputs, targets, copies)]
        except RuntimeError:
            continue
        for piece in twin.slices:
            if not any(part.total[piece.start : piece.end].any() for part in parts):  # nothing of it could differ
                return f"synthetic records give {piece.name} no gradient, so it cannot be checked"
        try:
            return _compared(kind(twin, unlike), parts, inputs, targets, clip, sizes, tolerance)
        except PrivacyError:
            raise
        except Exception as error:  # whatever a model does, the loop can take its gradient
            return str(error).split("\n")[0]
    return "the model cannot be checked"


def _compared(
    clipper: Any, parts: list[Clipped], inputs: Inputs, targets: Tensor, clip: float, sizes: Iterable[int],
    tolerance: float,
) -> str:  # fmt: skip
    """Unclipped sums do not tell whose gradient a part is; so losses of different size are clipped to one norm, and
    every parameter is compared by itself."""
    copies = len(targets) // len(parts)
    for size in (len(parts), *sizes):
        picked = torch.arange(size)
        if size != len(parts):  # an order that no permutation of the batch repeats
            picked = torch.randint(0, len(parts), (size,), generator=Generator().manual_seed(size))
        rows = (picked[:, None] * copies + torch.arange(copies)).flatten().to(targets.device)
        total = sum((parts[i].total for i in picked.tolist()), torch.zeros_like(parts[0].total))
        expected = Clipped(total, torch.cat([parts[i].norms for i in picked.tolist()]))
        with WithoutDropout():
            found = clipper.clipped_sum(tree.take(inputs, rows), targets[rows], clip)
        if not agree(clipper.model, found, expected, tolerance):
            return "a record's gradient in a batch differs from its gradient alone"
    return ""


def drift(
    kind: Kind, model: FlatModel, loss: Loss, x: Inputs, y: Tensor, *, copies: int, sizes: Iterable[int]
) -> float:  # fmt: skip
    """How far rounding moves a record's share of the clipped sum with the size of its batch, at the present weights.

    As a part of the clip norm: the median over synthetic records, each by the loop and in batches of `sizes` copies of
    itself, in the model's own type. Infinite where that cannot be told: no gradient, or one that is not finite.
    """
    found = []
    with WithoutDropout(), torch.random.fork_rng([y.device] if y.is_cuda else []):
        try:
            twin = FlatModel(without_dropout(copy.deepcopy(model.module).train()), model.device)
            alone, together = Loop(twin, loss, copies=copies), kind(twin, loss)
            for rows in _records(x, y, copies):
                whole = alone.clipped_sum(*rows, math.inf)
                clip = float(whole.norms) / 2
                if not 0 < clip < FADES / 2:
                    return math.inf
                moved = 0.0
                for size in sizes:
                    batch = (tree.joined([part] * size) for part in rows)
                    mean = together.clipped_sum(*batch, clip).total.double() / size
                    moved = max(moved, float(torch.linalg.vector_norm(mean - whole.total / 2)) / clip)
                found.append(moved)
        except Exception:  # whatever a model does, the loop can take its gradient
            return math.inf
    return float(torch.tensor(found).nan_to_num(math.inf).median())


def _records(inputs: Inputs, targets: Tensor, copies: int) -> Iterable[tuple[Inputs, Tensor]]:
    return zip(tree.split(inputs, copies), targets.split(copies), strict=True)


def _wide(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.to(dtype) if part.is_floating_point() else part


def _unlike(loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
    """The loss, in an own size for each row: by its value, since the loop sees one record at a time."""
    losses = loss(outputs, targets)
    return losses * (1 + (losses.detach() * 1e3).sin().square() * 3)


class WithoutDropout(TorchFunctionMode):
    """Dropout that a model calls as a function passes everything."""

    CALLS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func in self.CALLS and args else func(*args, **(kwargs or {}))


def agree(model: FlatModel, found: Clipped, expected: Clipped, tolerance: float) -> bool:
    """Whether norms, and the sum of every parameter, are equal up to this relative difference. Sums that are rounding
    alone (of a bias before a softmax, say) may differ."""
    if not torch.allclose(found.norms, expected.norms, rtol=tolerance, atol=1e-9):
        return False
    rounding = float(torch.linalg.vector_norm(expected.total)) * (1e-12 if tolerance < 1e-3 else 1e-5)
    for piece in model.slices:
        right = expected.total[piece.start : piece.end]
        wrong = float(torch.linalg.vector_norm(found.total[piece.start : piece.end] - right))
        if not wrong <= tolerance * float(torch.linalg.vector_norm(right)) + rounding:
            return False
    return True
