"""Which clipper takes a model's gradients, and why."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.errors import Adp2sgdWarning, ConfigError, PrivacyError
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.agreement import PROBE_RECORDS, WithoutDropout, drift, objection
from adp2sgd.gradient.bookkeeping import BookKeeping
from adp2sgd.gradient.clipper import Clipped, Clipper
from adp2sgd.gradient.functional import Functional
from adp2sgd.gradient.hooks import known, refuse_hooks
from adp2sgd.gradient.loop import Loop
from adp2sgd.gradient.proof import synthetic
from adp2sgd.gradient.range import WeightRange
from adp2sgd.gradient.rules import UnsupportedError
from adp2sgd.privacy.checks import refuse_batchnorm, without_dropout
from adp2sgd.task import Loss
from adp2sgd.tree import Inputs

PROBED = 1 << 24  # numbers in the inputs of a probe, at most: a probe must not need more memory than a step


@dataclass(frozen=True, kw_only=True)
class Row:
    """How the gradients of one layer's parameters are taken."""

    layer: str
    parameters: int
    rule: str
    why: str


def build(
    model: FlatModel, loss: Loss, *, clipper: str = "auto", copies: int = 1, piece: int | None = None,
    autocast: torch.dtype | None = None, expected: float | None = None,
) -> Clipper:  # fmt: skip
    """A clipper by name; `auto` takes the fastest that agrees with the loop on records made for that.

    `copies`: so many rows in a row are augmented copies of one record. `piece`: records processed at once (by default
    what fits in half of the free memory; set it where runs must agree to the bit). `autocast`: layers run in this type.
    `expected`: the size of a batch, in the mean (see `BookKeeping`).
    """
    if clipper not in CLIPPERS:
        raise ConfigError(f"clipper = {clipper!r} is unknown; choose one of {', '.join(CLIPPERS)}")
    if copies < 1:
        raise ConfigError(f"copies = {copies} is impossible; give at least 1")
    options: dict[str, Any] = {"copies": copies}
    if clipper in ("auto", "book-keeping"):
        options |= {"piece": piece, "autocast": autocast, "expected": expected}
    made: Clipper = CLIPPERS[clipper](model, loss, **options)
    return made


class Automatic:
    """Clipper that checks itself: book-keeping, then `torch.func`, then the loop, the first that agrees with the loop.

    The check runs once, on synthetic records, so the choice and its warning tell nothing of the data: by `settle`, or
    else at the first call. It is as good as the weights that it runs at, so whoever takes models from others must
    settle before. Guarantee: whatever the check says, the first two clippers raise `UnsupportedError` in a pass that is
    not proven to keep records apart, and the loop takes it.
    """

    def __init__(
        self, model: FlatModel, loss: Loss, *, copies: int = 1, piece: int | None = None,
        autocast: torch.dtype | None = None, expected: float | None = None,
    ) -> None:  # fmt: skip
        self.model, self.copies, self.piece = model, copies, piece
        self.bookkeeping = BookKeeping(model, loss, copies=copies, piece=piece, autocast=autocast, expected=expected)
        self.loop = Loop(model, loss, copies=copies)
        self.functional = Functional(model, loss, copies=copies)
        self.chosen: Clipper | None = None
        self.range: WeightRange | None = None
        self.reason, self.told = "", False

    def clipped_sum(self, inputs: Inputs, targets: Tensor, clip_norm: float, records: int | None = None) -> Clipped:
        """See `Clipper.clipped_sum`. A pass that is not proven to keep its records apart is taken record by record."""
        if self.chosen is None:
            self.settle(inputs, targets)
        assert self.chosen is not None
        if self.range is not None and not self.range.holds():
            self._say_once("the weights amplify rounding errors")
            return self.loop.clipped_sum(inputs, targets, clip_norm, records)
        try:
            return self.chosen.clipped_sum(inputs, targets, clip_norm, records)
        except UnsupportedError:  # its text may tell how many records were drawn
            self._say_once("some batches are taken in a way that is not proven to keep records apart")
            return self.loop.clipped_sum(inputs, targets, clip_norm, records)

    def settle(self, inputs: Inputs, targets: Tensor) -> None:
        """Choose at the present weights, for good."""
        self.chosen = self.choose(inputs, targets)
        if self.chosen is not self.loop:
            rows = (synthetic(like, PROBE_RECORDS * self.copies) for like in (inputs, targets))
            kind: Any = partial(type(self.chosen), copies=self.copies)  # type: ignore[call-arg]
            probe = partial(drift, kind, self.model, self.loop.loss, *rows, copies=self.copies)
            width = self.copies * max(part.shape[1:].numel() for part in tree.tensors(inputs))
            largest = min(self.bookkeeping.most, max(16, PROBED // max(1, width)))
            later = partial(probe, sizes=(7, 16, largest))
            self.range = WeightRange(self.model, later, at_first=probe(sizes=(7,)))

    def choose(self, inputs: Inputs, targets: Tensor) -> Clipper:
        """The first clipper that agrees with the loop on synthetic records; only shape and type of these are used."""
        refuse_batchnorm(self.model.module)
        x, y = (synthetic(like, PROBE_RECORDS * self.copies) for like in (inputs, targets))
        try:
            refuse_hooks(self.model.module, self.model.module.parameters())
        except UnsupportedError as error:
            return self._say(self.loop, str(error))
        for clipper in (self.bookkeeping, self.functional):
            reason = self._objection(clipper, x, y)
            if not reason and clipper is self.bookkeeping:
                reason = self._trial(x, y)
            if not reason:
                return clipper if clipper is self.bookkeeping else self._say(clipper, self.reason)
            self.reason = self.reason or reason
        return self._say(self.loop, self.reason)

    def _objection(self, clipper: BookKeeping | Functional, x: Inputs, y: Tensor) -> str:
        """Code that is not torch's or this package's is also run in batches of an odd size and of the largest."""
        model, loss = self.model, self.loop.loss
        sizes = () if known(model.module, loss) else (7, max(8, self.bookkeeping.most))
        kind = partial(type(clipper), copies=self.copies)
        return objection(kind, model, loss, x, y, copies=self.copies, sizes=sizes)

    def _trial(self, x: Inputs, y: Tensor) -> str:
        """Why book-keeping fails in the type, layout and size that steps have; else empty, and it knows how many
        records it may take at once: what fits in half of the free memory, if one needs twice what the tape holds."""
        own = self.bookkeeping
        twin = FlatModel(without_dropout(copy.deepcopy(self.model.module).train()), self.model.device)
        clipper = BookKeeping(twin, own.loss, copies=self.copies, autocast=own.autocast)
        try:
            own.prove(x, y)
            held = self._pass(clipper, x, y)
            if self.piece is None:
                own.piece = max(1, free_bytes(y.device) // 2 // max(1, 2 * held * self.copies // len(y)))
            if own.most > PROBE_RECORDS:  # a model may take larger batches in parts
                self._pass(clipper, *(synthetic(like, own.most * self.copies) for like in (x, y)))
        except PrivacyError:
            raise
        except Exception as error:  # the loop can take it
            return str(error).split("\n")[0]
        return ""

    def _pass(self, clipper: BookKeeping, x: Inputs, y: Tensor) -> int:
        """Bytes that the tape holds after one whole pass."""
        with WithoutDropout():
            tape = clipper.taped(self.bookkeeping.laid_out(x), y)
        with torch.no_grad():
            tape.finish()
            dict(tape.weighted(torch.ones(len(y) // self.copies, device=y.device)))
        return tape.held

    def _say_once(self, reason: str) -> None:
        if not self.told:
            self._say(self.loop, reason)
        self.told = True

    def _say(self, clipper: Clipper, reason: str) -> Clipper:
        name = type(clipper).__name__
        warnings.warn(f"gradients are taken by the slower {name} clipper: {reason}", Adp2sgdWarning, stacklevel=4)
        return clipper


def explain(
    model: FlatModel, loss: Loss, inputs: Inputs, targets: Tensor, *, copies: int = 1,
    autocast: torch.dtype | None = None,
) -> list[Row]:  # fmt: skip
    """For each layer the rule that `auto` uses on a batch of this shape and type, and why."""
    clipper = Automatic(model, loss, copies=copies, autocast=autocast)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = clipper.choose(inputs, targets)
    if chosen is not clipper.bookkeeping:
        sizes = {piece.name: piece.end - piece.start for piece in model.slices}
        return [
            Row(layer=name, parameters=n, rule=type(chosen).__name__.lower(), why=clipper.reason)
            for name, n in sizes.items()
        ]
    inputs, targets = (synthetic(like, len(targets)) for like in (inputs, targets))
    tape = clipper.bookkeeping.taped(clipper.bookkeeping.laid_out(inputs), targets)
    with torch.no_grad():
        tape.finish()
    rows = []
    for piece in model.slices:
        use = tape.used(piece.name)
        rule, why = ("none", "the loss does not depend on it") if use is None else (use.rule, use.why)
        rows.append(Row(layer=piece.name, parameters=piece.end - piece.start, rule=rule, why=why))
    return rows


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on the device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    info = Path("/proc/meminfo")
    if not info.exists():
        return 4 << 30
    lines = dict(line.split(":") for line in info.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


CLIPPERS: dict[str, Any] = {"auto": Automatic, "book-keeping": BookKeeping, "functional": Functional, "loop": Loop}
