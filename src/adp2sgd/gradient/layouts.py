"""Where the records lie in every tensor of a program, or the first call that is not proven to keep them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adp2sgd.gradient.functions import HANDLERS, SHARING
from adp2sgd.gradient.program import GIVEN, Call, Fixed, Listed, Program, Ref, Scaled
from adp2sgd.gradient.rules import UnsupportedError
from adp2sgd.gradient.vocabulary import IN_PLACE, LENT, SPREADS, pure


class Rows(NamedTuple):
    """An axis of outer · n · inner places: place i belongs to record (i // inner) mod n."""

    outer: int
    inner: int


UNIFORM = Rows(0, 0)
"""All places of the axis hold the same, or random numbers of their own: they fit any order of the records. (For axes of
several places for each record.)"""


@dataclass(frozen=True)
class Value:
    """What is known of a tensor. `rows` is None where it holds nothing of any record. `index`: it holds the numbers 0,
    1, 2, … along the records' axis, which may pick rows of a batch and serve nothing else."""

    shape: tuple[Any, ...]
    rows: Rows | None = None
    trained: bool = False
    buffer: bool = False
    index: bool = False

    @property
    def axis(self) -> int:
        """The axis along which the records lie: the only one whose size grows with the batch."""
        return next(i for i, size in enumerate(self.shape) if isinstance(size, Scaled))

    @property
    def from_right(self) -> int:
        return len(self.shape) - self.axis

    @property
    def in_order(self) -> bool:
        """Whether the places of the axis are those of the first record, then those of the second, and so on."""
        return self.rows is not None and (self.rows.outer == 1 or self.shape[self.axis] == Scaled(1))

    @property
    def in_front(self) -> bool:
        """Whether rows of the first axis belong to the records in order, as the recorder takes them to."""
        return self.in_order and self.axis == 0


@dataclass(frozen=True)
class Site:
    """A call: its arguments with a `Value` for each tensor, all these values, and the shapes of what it returns."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Value, ...]
    shapes: tuple[tuple[Any, ...], ...]

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """An argument, by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def first(self) -> Value:
        value = self.args[0] if self.args else next(iter(self.kwargs.values()))
        if not isinstance(value, Value):
            raise self.refusal("is called in a way that is not checked")
        return value

    @property
    def out(self) -> Value:
        return Value(self.shapes[0])

    @property
    def with_records(self) -> list[Value]:
        return [value for value in self.tensors if value.rows is not None]

    @property
    def attributed(self) -> bool:
        """Whether a trained parameter meets records in it."""
        return any(value.trained for value in self.tensors) and bool(self.with_records)

    def refusal(self, why: str = "may mix the records of a batch") -> UnsupportedError:
        return UnsupportedError(f"{self.name} {why}")


Rule = Callable[[Site], Rows]
"""Where the records lie in the results of a call that reads or makes tensors with an axis of records."""


def prove(program: Program, rules: dict[Any, Rule], trained: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
    """Guarantee: every record's loss is a function of that record, the constants and the weights alone, the same in
    batches of any size, and what reads a trained parameter has the records in order. Else `UnsupportedError`."""
    result = located(program, rules, trained, buffers)[program.result]
    if not result.in_front or len(result.shape) != 1:
        raise UnsupportedError("the losses are not one for each record, in order")


def located(
    program: Program, rules: dict[Any, Rule], trained: Iterable[Tensor], buffers: Iterable[Tensor]
) -> dict[Ref, Value]:
    """Where the records lie in all tensors. Guarantee: what belongs to a record is a function of that record, the
    constants and the weights alone, the same in batches of any size."""
    known = {id(t): Value(tuple(t.shape), buffer=True) for t in buffers}
    known |= {id(t): Value(tuple(t.shape), trained=True) for t in trained}
    values = {Ref(GIVEN, at): Value(shape, Rows(1, shape[0].per_record)) for at, shape in enumerate(program.given)}
    for number, call in enumerate(program.calls):
        site = _site(call, values, known)
        rows = _rows(site, rules)
        grown = rows is None and any(value.trained for value in site.tensors)
        for ref, strides in call.changed:
            values[ref] = _changed(values[ref], strides, rows, site, dict(call.changed)[call.args[0]])
        if grown and (site.func in SHARING or any(not v.trained and not v.buffer for v in site.tensors)):
            program.shared |= {number}
        for output, shape in enumerate(call.shapes):
            values[Ref(number, output)] = Value(shape, rows, trained=grown, index=rows is not None and _counts(site))
    return values


def _counts(site: Site) -> bool:
    """Whether it returns the numbers of rows, along the records' axis."""
    return site.func is torch.arange or (site.func is Tensor.__getitem__ and site.first.index)


def _site(call: Call, values: dict[Ref, Value], known: dict[int, Value]) -> Site:
    tensors: list[Value] = []

    def resolved(part: Any) -> Any:
        if isinstance(part, Fixed):
            tensors.append(known.get(id(part.tensor), Value(tuple(part.tensor.shape))))
            return tensors[-1]
        if isinstance(part, Ref):
            tensors.append(values[part])
            return tensors[-1]
        return type(part)(resolved(p) for p in part) if type(part) in (tuple, Listed) else part

    if call.func in IN_PLACE and not isinstance(call.args[0], Ref):
        raise UnsupportedError(f"{call.name} changes a tensor that outlasts the pass")
    args, kwargs = resolved(call.args), {name: resolved(part) for name, part in call.named}
    return Site(call.func, call.name, args, kwargs, tuple(tensors[: LENT.get(call.func)]), call.shapes)


def _changed(
    value: Value, strides: tuple[Any, ...], rows: Rows | None, site: Site, own: tuple[Any, ...]
) -> Value:  # fmt: skip
    """A tensor after another one, which shares its memory, took numbers of records in the order `rows`. Both must have
    one place for each record, the same distance apart."""
    if rows in (None, UNIFORM) or value.rows not in (None, UNIFORM):
        return value
    alike = value.rows is not None and strides[value.axis] == own[site.first.axis]
    if not alike or value.shape[value.axis] != Scaled(1) or site.first.shape[site.first.axis] != Scaled(1):
        raise site.refusal("changes memory in an order that is not known")
    return replace(value, rows=Rows(1, 1))


def _rows(site: Site, rules: dict[Any, Rule]) -> Rows | None:
    """Where the records lie in the results; None where these hold nothing of any record."""
    axes = [sum(isinstance(size, Scaled) for size in shape) for shape in site.shapes]
    if not site.with_records and not any(axes):
        _refuse_parameters_as_records(site)
        if site.func not in rules and not pure(site.func):
            raise site.refusal("is not known to leave the model as it is")
        return None
    if site.func not in rules:
        raise site.refusal("is not known to keep the records of a batch apart")
    if any(count != 1 for count in axes) or not axes:
        raise site.refusal()
    if any(value.index for value in site.tensors) and site.func is not Tensor.__getitem__:
        raise site.refusal("reads the place of a record in its batch")
    rows = rules[site.func](site)
    if rows == UNIFORM and all(shape[Value(shape).axis] == Scaled(1) for shape in site.shapes):
        rows = Rows(1, 1)  # one place for each record can only be its own
    for shape in site.shapes:
        value = Value(shape, rows)
        if rows != UNIFORM and rows.outer * rows.inner != shape[value.axis].per_record:
            raise site.refusal()
    return rows


def _refuse_parameters_as_records(site: Site) -> None:
    """The recorder would take rows for records, in batches whose size divides their number."""
    trained = any(value.trained for value in site.tensors)
    if trained and site.func in HANDLERS and site.func not in SHARING:
        raise site.refusal("of constants and parameters alone has no rule")
    if trained and site.func in SPREADS:
        given, out = site.first.shape, site.shapes[0]
        if (len(out) > len(given) or given[:1] == (1,)) and out[:1] not in ((), (1,)):
            raise site.refusal("of a parameter to a fixed number of rows has no rule")


def joint(site: Site, values: Iterable[Value]) -> Rows:
    """The order of records that all of them have."""
    found = UNIFORM
    for value in values:
        assert value.rows is not None
        if found == UNIFORM:
            found = value.rows
        elif value.rows not in (UNIFORM, found):
            raise site.refusal()
    return found
