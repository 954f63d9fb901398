"""One forward and one backward pass, then the clipped sum from what was recorded: no second pass, and no layer's
per-record gradients are formed where Gram matrices cost less. Measured against others by benchmarks/gradient.py."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.device import CapturedGraphs, laid_out, move, repeatable
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.clip import AT_ONCE, clip_factors, effective_norms, finite_or_infinite
from adp2sgd.gradient.clipper import Clipped
from adp2sgd.gradient.hooks import eager, known, masks_as_given, refuse_foreign, refuse_hooks, without_saved_hooks
from adp2sgd.gradient.program import Follower, Program, Writer
from adp2sgd.gradient.proof import program_of
from adp2sgd.gradient.state import Memory
from adp2sgd.gradient.tape import Tape
from adp2sgd.task import Loss
from adp2sgd.tree import Inputs

PAD = 16
"""On a GPU a batch is filled up to a multiple of so many records, where its expected size is not known."""
SPREAD = 2.0
"""Standard deviations of a Poisson batch that a pass has room for beyond its expected size: one in fifty takes two."""


class BookKeeping:
    """Clipper for models whose parameters are used in ways that `tape` has rules for.

    `piece`: at most so many records (and `AT_ONCE`) are processed at once. `autocast`: run layers in that type; norms
    and sums are of the same values. Raises `UnsupportedError` where there is no rule. On a GPU the passes are recorded
    as CUDA graphs.

    `expected`: the size of a batch, in the mean. A GPU then takes every batch in passes of one size, filled up with
    records that do not count. In a batch of another size it might use other kernels, whose rounding, in bfloat16, moves
    a gradient by percents: one record more would then move the others' shares.
    """

    def __init__(
        self, model: FlatModel, loss: Loss, *, copies: int = 1, piece: int | None = None,
        autocast: torch.dtype | None = None, expected: float | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.copies, self.piece, self.autocast = model, loss, copies, piece, autocast
        self.expected = expected
        named = dict(model.module.named_parameters())
        self.trained = {piece.name: named[piece.name] for piece in model.slices}
        self._programs: dict[Any, Program] = {}
        self._memory = Memory(model.module, loss)
        self._captured = {training: CapturedGraphs(self._sum) for training in (True, False)}
        self._captured_fixed = {training: CapturedGraphs(self._silent_sum) for training in (True, False)}

    def clipped_sum(self, inputs: Inputs, targets: Tensor, clip_norm: float, records: int | None = None) -> Clipped:
        """See `Clipper.clipped_sum`. Rows i·copies … of the inputs are the copies of record i."""
        given = len(targets) // self.copies
        if given == 0 or not self.model.slices:
            zeros = torch.zeros_like(self.model.weights)
            return Clipped(zeros, zeros.new_zeros(given))
        if records is not None:
            return self._fixed(inputs, targets, clip_norm, records)
        rows = self._at_once * self.copies
        if len(targets) <= rows:
            return self._piece(inputs, targets, clip_norm)
        total, norms = torch.zeros_like(self.model.weights, dtype=torch.float64), []
        for x, y in zip(tree.split(inputs, rows), targets.split(rows), strict=True):
            part = self._piece(x, y, clip_norm)
            total += part.total
            norms.append(part.norms)
        return Clipped(total, torch.cat(norms))

    def taped(self, inputs: Inputs, targets: Tensor) -> Tape:
        """The recorded passes over these rows. Guarantee: they keep records apart, else `UnsupportedError` is raised.

        Code that is not torch's or this package's is checked at every pass, and what it keeps in Python is put back.
        The model reads copies: a layer in place would change the batch, which is read again where a record has no
        finite gradient.
        """
        module, records = self.model.module, len(targets) // self.copies
        inputs, targets = tree.each(Tensor.clone, inputs), targets.clone()
        refuse_hooks(module, self.trained.values())
        program = self._program(inputs, targets)
        if known(module, self.loss) and not program.shared:
            tape = Tape(self.trained, module.buffers(), records)
            self._backward(tape, self._forward(tape, inputs, targets))
            return tape
        with self._memory.kept(), without_saved_hooks(), eager(), masks_as_given():
            course = Follower(program, inputs, targets, records)
            tape = Tape(self.trained, module.buffers(), records, course)
            losses = self._forward(tape, inputs, targets)
            course.finish(losses)
            refuse_foreign(losses.grad_fn)
            self._backward(tape, losses)
        return tape

    def prove(self, inputs: Inputs, targets: Tensor) -> None:
        """Do beforehand, in training mode, what the first pass over such rows would do; else `UnsupportedError`."""
        with self._memory.kept():
            self.model.module.train()
            self._program(inputs, targets)

    def _forward(self, tape: Tape, inputs: Inputs, targets: Tensor) -> Tensor:
        autocast = torch.autocast(targets.device.type, self.autocast) if self.autocast else nullcontext()
        with torch.enable_grad(), autocast, tape:
            return self.loss(tree.call(self.model.module, inputs), targets)

    def _backward(self, tape: Tape, losses: Tensor) -> None:
        with torch.enable_grad():
            mean = losses.sum() / self.copies if self.copies > 1 else losses.sum()
        if mean.requires_grad:
            # Only what leads to recorded layers: the parameters' own `grad` is never written.
            mean.backward(inputs=tape.leaves)

    def _program(self, inputs: Inputs, targets: Tensor) -> Program:
        """What the model does with a batch of rows of this shape and type; proven once, on synthetic records."""
        given = tuple((part.shape[1:], part.dtype) for part in (*tree.tensors(inputs), targets))
        kind = (self.model.module.training, tuple(inputs) if isinstance(inputs, dict) else type(inputs), given)
        if kind not in self._programs:
            module, trained = self.model.module, [*self.trained.values()]

            def run(writer: Writer, x: Inputs, y: Tensor, records: int) -> Tensor:
                with self._memory.kept(), without_saved_hooks(), eager(), masks_as_given():
                    return self._forward(Tape(self.trained, module.buffers(), records, writer), x, y)

            self._programs[kind] = program_of(run, module, trained, inputs, targets, self.copies)
        return self._programs[kind]

    @property
    def _at_once(self) -> int:
        """Records of a pass: at most, or where `expected` is known, on a GPU, of every one."""
        if self.expected is None or not on_gpu(self.model.device):
            return self._fitting
        return self._share(self.expected + SPREAD * math.sqrt(self.expected))

    @property
    def _fitting(self) -> int:
        most = AT_ONCE[self.model.device.type]
        return min(self.piece or most, most)

    def _share(self, room: float) -> int:
        """Records of a pass, where few passes of one size have room for `room` records."""
        share = room / math.ceil(room / self._fitting)
        return min(self._fitting, math.ceil(share / PAD) * PAD)

    @property
    def most(self) -> int:
        """Records that a pass is hardly ever larger than: the expected batch and four deviations, or what fits."""
        if self.expected is None:
            return self._at_once
        return min(self._at_once, math.ceil(self.expected + 4 * math.sqrt(self.expected)))

    def laid_out(self, inputs: Inputs) -> Inputs:
        """As steps have them: on a GPU bfloat16 images have their channels last, if every layer is known to bear it."""
        return tree.each(laid_out, inputs) if self.autocast and self._repeatable else inputs

    @cached_property
    def _repeatable(self) -> bool:
        return repeatable(self.model.module, self.loss)

    def _piece(self, inputs: Inputs, targets: Tensor, clip_norm: float) -> Clipped:
        records = len(targets) // self.copies
        given = (inputs, targets, *self._scalars(clip_norm, records))
        if on_gpu(self.model.device):
            work = self._captured[self.model.module.training] if self._repeatable else self._sum
            missing = -records % PAD if self.expected is None else self._at_once - records
            total, norms = work(*self._padded(given, missing))
            filled, norms = norms, norms[:records].clone()
            if bool(torch.isfinite(filled).all()):
                return Clipped(total, norms)
            if bool(torch.isfinite(norms).all()):  # the filling rows are at fault, which hold no record
                total, norms = self._sum(self.laid_out(inputs), *given[1:])
        else:
            total, norms = self._sum(*given)
        good = torch.isfinite(norms)
        if bool(good.all()):
            return Clipped(total, norms)
        # A record's NaN times factor 0 is NaN, so such records are left out of the sum altogether.
        rows = good.repeat_interleave(self.copies)
        again = self.clipped_sum(tree.take(inputs, rows), targets[rows], clip_norm)
        norms[good] = again.norms
        return Clipped(again.total, norms)

    def _fixed(self, inputs: Inputs, targets: Tensor, clip_norm: float, records: int) -> Clipped:
        """Of the first `records` records, by passes that depend on neither their number nor any value."""
        given, size = len(targets) // self.copies, self._share(len(targets) // self.copies)
        gpu, rows = on_gpu(self.model.device), size * self.copies
        work = self._captured_fixed[self.model.module.training] if gpu and self._repeatable else self._silent_sum
        total, norms = torch.zeros_like(self.model.weights, dtype=torch.float64), []
        for start, x, y in zip(range(0, given, size), tree.split(inputs, rows), targets.split(rows), strict=True):
            counted = min(max(records - start, 0), len(y) // self.copies)
            missing = size - len(y) // self.copies if gpu else 0
            part, its_norms = work(*self._padded((x, y, *self._scalars(clip_norm, counted)), missing))
            total += part
            norms.append(its_norms.clone())
        return Clipped(total, torch.cat(norms)[:given])

    def _silent_sum(self, inputs: Inputs, targets: Tensor, clip_norm: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
        return self._sum(inputs, targets, clip_norm, records, silent=True)

    def _sum(
        self, inputs: Inputs, targets: Tensor, clip_norm: Tensor, records: Tensor, *, silent: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Clipped sum and norms of the first `records` records; the others only fill up the shape. `silent`: those, and
        records whose gradients are not finite, add nothing to the sum, which is finite then."""
        tape = self.taped(inputs, targets)
        with torch.no_grad():
            measured = tape.finish()
            dtype = self.model.weights.dtype
            norms = finite_or_infinite(measured.squares, dtype)
            room = clip_norm if measured.lost is None else (clip_norm - measured.lost).clamp(min=0)
            factors = clip_factors(effective_norms(measured), room, dtype)
            factors = factors * (torch.arange(len(factors), device=factors.device) < records)
            parts = dict(tape.weighted(factors, factors > 0 if silent else None))
            unused = (name for name in self.trained if name not in parts)
            parts |= {name: torch.zeros_like(self.trained[name]) for name in unused}
            return torch.cat([parts[name].reshape(-1) for name in self.trained]), norms

    def _scalars(self, clip_norm: float, records: int) -> tuple[Tensor, Tensor]:
        """As tensors: a recorded step must not hold on to their values."""
        both = torch.tensor([clip_norm, records], dtype=torch.float64)
        clip, count = move(both, self.model.device)
        return clip, count

    def _padded(self, given: tuple[Any, ...], missing: int) -> tuple[Any, ...]:
        """The rows filled up with zeros for `missing` records, so that they have one of few shapes."""
        inputs, targets, *scalars = given

        def filled(rows: Tensor) -> Tensor:
            return torch.cat([rows, rows.new_zeros(missing * self.copies, *rows.shape[1:])])

        inputs, targets = tree.each(filled, inputs), filled(targets)
        return (self.laid_out(inputs), targets, *scalars)


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
