"""The torch calls of a forward pass as data: written down for two sizes of a batch, compared with every later pass.

Guarantee: a pass that `Follower` accepts makes the calls of the program, in its order, on the same constants and
scalars, and each call reads what the same earlier calls returned. Only sizes that grow with the batch differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adp2sgd import tree
from adp2sgd.gradient.rules import UnsupportedError
from adp2sgd.gradient.vocabulary import IN_PLACE, METADATA, SIZES
from adp2sgd.tree import Inputs

TAG = "_adp2sgd_origin"
GIVEN = -1  # the number of the call whose outputs are the tensors of the inputs and, last, the targets
ATOMS = (
    int, float, complex, str, type(None), EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class Ref(NamedTuple):
    """The tensor that a call of this pass returned."""

    call: int
    output: int


class Scaled(NamedTuple):
    """A size: so many times the number of records."""

    per_record: int


class Listed(tuple[Any, ...]):
    """A list among the arguments: as an index it means something else than a tuple."""


class Fixed:
    """A tensor that the pass did not make. Parameters and buffers may have other values in another pass."""

    def __init__(self, tensor: Tensor, version: int | None) -> None:
        self.tensor, self.version = tensor, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self.tensor is other.tensor and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


class Call(NamedTuple):
    """`args`, and `named` ones: nested tuples of scalars, sizes, `Ref` and `Fixed`. `shapes`: of what it returned.
    `changed`: tensors that share memory with the one that it changed, and their strides."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[Any, ...], ...] = ()
    changed: tuple[tuple[Ref, tuple[Any, ...]], ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))


class Program:
    """`given`: the shapes of the inputs' tensors and of the targets. `result`: the losses. `shared`: the numbers of
    layers that read constants and parameters alone, as `layouts.prove` finds them (an embedding of positions, say)."""

    def __init__(self, given: tuple[tuple[Any, ...], ...], calls: tuple[Call, ...], result: Ref) -> None:
        self.given, self.calls, self.result = given, calls, result
        self.shared: frozenset[int] = frozenset()
        self._shapes: dict[int, list[tuple[tuple[int, ...], ...]]] = {}

    def shapes(self, n: int) -> list[tuple[tuple[int, ...], ...]]:
        """What each call returns for `n` records."""
        if n not in self._shapes:
            self._shapes[n] = [tuple(tuple(_sized(d, n) for d in shape) for shape in c.shapes) for c in self.calls]
        return self._shapes[n]


class Pass:
    """One forward pass. Tensors carry the call that made them as an attribute, with their version at that time: a
    change of a tensor by code that no call shows is noticed. Tensors that share memory share their version."""

    def __init__(self, inputs: Inputs, targets: Tensor) -> None:
        self.at = 0
        self.versions: dict[int, tuple[Any, int]] = {}  # of memory that calls have changed; held, lest it is used again
        self.lasting: dict[int, tuple[Tensor, Ref]] = {}  # tensors of the model that calls returned as they were
        given = [*tree.tensors(inputs), targets]
        self.given = tuple(tuple(tensor.shape) for tensor in given)
        for output, tensor in enumerate(given):
            setattr(tensor, TAG, (self, Ref(GIVEN, output), version_of(tensor)))

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Note or compare a call that is about to be made; its number, or None if it only reads sizes and types."""
        if func in METADATA:
            return None
        if torch._C._len_torch_dispatch_stack():
            raise UnsupportedError("a dispatch mode of the model's own changes what torch's functions do")
        self._take(func, args, tuple(sorted(kwargs.items())))
        self.at += 1
        return self.at - 1

    def done(self, number: int | None, func: Callable[..., Any], args: tuple[Any, ...], out: Any) -> None:
        """The call returned `out`."""
        if number is None:
            return
        tensors = [args[0]] if func in IN_PLACE else found_in((out,))
        owner, _, version = getattr(args[0], TAG, (None, None, 0)) if args else (None, None, 0)
        if owner is self and tensors and tensors[0] is args[0] and version != version_of(args[0]):
            self.versions[_memory(args[0])] = (args[0].untyped_storage(), version_of(args[0]))
            self._change(number, args[0])
        for output, tensor in enumerate(tensors):
            if getattr(tensor, TAG, (None,))[0] is not self and any(tensor is given for given in args):
                self.lasting[id(tensor)] = (tensor, Ref(number, output))
            else:
                setattr(tensor, TAG, (self, Ref(number, output), version_of(tensor)))
        self._give(number, tensors)

    def ref(self, tensor: Tensor) -> Ref | None:
        """Which call made it; None if none of this pass did."""
        owner, ref, version = getattr(tensor, TAG, (None, None, 0))
        if owner is not self:
            return self.lasting[id(tensor)][1] if id(tensor) in self.lasting else None
        now = version_of(tensor)
        if version != now and self.versions.get(_memory(tensor), (None, version))[1] != now:
            raise UnsupportedError("a tensor was changed after other parts of the model had read it")
        return ref

    def shares(self, number: int | None, others: list[Tensor], n: int) -> bool:
        """Whether a call of parameters and `others` reads constants and parameters alone."""
        raise NotImplementedError

    def _take(self, func: Callable[..., Any], args: tuple[Any, ...], named: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def _give(self, number: int, tensors: list[Tensor]) -> None:
        """What the call returned, where that is of interest."""

    def _change(self, number: int, tensor: Tensor) -> None:
        """The call changed its first argument."""


class Writer(Pass):
    """Writes a pass down."""

    def __init__(self, module: nn.Module, inputs: Inputs, targets: Tensor) -> None:
        super().__init__(inputs, targets)
        self.own = {id(t) for t in (*module.parameters(), *module.buffers())}
        self.calls: list[Call] = []
        self.of_records = {Ref(GIVEN, at) for at in range(len(self.given))}  # computed from inputs or targets
        given = enumerate([*tree.tensors(inputs), targets])
        self.made = [(tensor, Ref(GIVEN, at)) for at, tensor in given]  # held, lest memory is used again

    def shares(self, number: int | None, others: list[Tensor], n: int) -> bool:
        """Nothing is proven yet, and only the shape of the result is of interest."""
        of_records = any(self.ref(other) in self.of_records for other in others)
        return bool(others) and not of_records and all(other.dim() == 0 or len(other) % n for other in others)

    def _take(self, func: Callable[..., Any], args: tuple[Any, ...], named: tuple[Any, ...]) -> None:
        try:
            self.calls.append(Call(func, self._pattern(args), self._pattern(named)))
        except TypeError as error:
            raise UnsupportedError(f"{getattr(func, '__name__', func)} reads {error}, which is not checked") from error

    def _give(self, number: int, tensors: list[Tensor]) -> None:
        self.calls[number] = self.calls[number]._replace(shapes=tuple(tuple(t.shape) for t in tensors))
        self.made += [(tensor, Ref(number, output)) for output, tensor in enumerate(tensors)]
        if not self.of_records.isdisjoint(_refs((self.calls[number].args, self.calls[number].named))):
            self.of_records |= {Ref(number, output) for output in range(len(tensors))}

    def _change(self, number: int, tensor: Tensor) -> None:
        shared = tuple((ref, other.stride()) for other, ref in self.made if _memory(other) == _memory(tensor))
        self.calls[number] = self.calls[number]._replace(changed=shared)

    def _pattern(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter):
                raise TypeError(f"a {type(value).__name__}")
            return self.ref(value) or Fixed(value, None if id(value) in self.own else version_of(value))
        if isinstance(value, (tuple, list)):
            return (Listed if isinstance(value, list) else tuple)(self._pattern(v) for v in value)
        if isinstance(value, slice):
            return ("slice", *(self._pattern(v) for v in (value.start, value.stop, value.step)))
        if isinstance(value, ATOMS):
            return value
        raise TypeError(f"a {type(value).__name__}")


class Follower(Pass):
    """Compares a pass over `n` records with a program; raises `UnsupportedError` at the first difference."""

    def __init__(self, program: Program, inputs: Inputs, targets: Tensor, n: int) -> None:
        super().__init__(inputs, targets)
        self.program, self.n, self.shapes = program, n, program.shapes(n)

    def shares(self, number: int | None, others: list[Tensor], n: int) -> bool:
        return number in self.program.shared

    def _take(self, func: Callable[..., Any], args: tuple[Any, ...], named: tuple[Any, ...]) -> None:
        call = self.program.calls[self.at] if self.at < len(self.program.calls) else None
        if call is None or call.func != func or not self._like(call.args, args) or not self._like(call.named, named):
            raise UnsupportedError("the model takes another course than when it was checked")

    def _give(self, number: int, tensors: list[Tensor]) -> None:
        expected = self.shapes[number]
        if len(tensors) != len(expected) or any(t.shape != s for t, s in zip(tensors, expected, strict=True)):
            raise UnsupportedError("the model takes another course than when it was checked")

    def finish(self, losses: Any) -> None:
        """Call it with what the pass returned."""
        whole = self.at == len(self.program.calls) and isinstance(losses, Tensor)
        if not whole or self.ref(losses) != self.program.result:
            raise UnsupportedError("the model takes another course than when it was checked")

    def _like(self, pattern: Any, value: Any) -> bool:
        kind = type(pattern)
        if kind is Ref:
            return isinstance(value, Tensor) and self.ref(value) == pattern
        if kind is Fixed:
            return isinstance(value, Tensor) and self._same(pattern, value)
        if kind is tuple or kind is Listed:
            return self._all_like(pattern, value)
        if kind is Scaled:
            return bool(value == pattern.per_record * self.n)
        return type(value) is kind and _equal(value, pattern)

    def _all_like(self, pattern: tuple[Any, ...], value: Any) -> bool:
        if isinstance(value, slice):
            value = ("slice", value.start, value.stop, value.step)
        if not isinstance(value, list if type(pattern) is Listed else tuple) or len(value) != len(pattern):
            return False
        for part, given in zip(pattern, value, strict=True):  # noqa: SIM110 (called often)
            if not self._like(part, given):
                return False
        return True

    def _same(self, pattern: Fixed, value: Tensor) -> bool:
        unchanged = pattern.version is None or pattern.version == version_of(value)
        return value is pattern.tensor and unchanged and self.ref(value) is None


def unite(first: Writer, n: int, second: Writer, m: int, losses: tuple[Tensor, Tensor]) -> Program:
    """The program of which both passes, over `n` and over `m` records, are instances."""
    if len(first.calls) != len(second.calls):
        raise UnsupportedError("the course of the model depends on the size of the batch")
    calls = []
    for one, other in zip(first.calls, second.calls, strict=True):
        alike = one.func == other.func and len(one.changed) == len(other.changed)
        if not alike or len(one.args) != len(other.args) or len(one.named) != len(other.named):
            raise UnsupportedError("the course of the model depends on the size of the batch")
        where, both = SIZES.get(one.func, ()), zip(one.args, other.args, strict=True)
        args = tuple(_united(a, b, n, m, sizes=at in where) for at, (a, b) in enumerate(both))
        named = (_united(a, b, n, m, sizes=a[0] in SIZE_NAMES) for a, b in zip(one.named, other.named, strict=True))
        shapes = _united(one.shapes, other.shapes, n, m, sizes=True)
        changed = _united(one.changed, other.changed, n, m, sizes=True)
        calls.append(Call(one.func, args, tuple(named), shapes, changed))
    results = first.ref(losses[0]), second.ref(losses[1])
    if results[0] is None or results[0] != results[1]:
        raise UnsupportedError("the losses come from code that is not checked")
    return Program(_united(first.given, second.given, n, m, sizes=True), tuple(calls), results[0])


SIZE_NAMES = ("size", "sizes", "shape")


def _united(a: Any, b: Any, n: int, m: int, *, sizes: bool) -> Any:
    if type(a) in (tuple, Listed) and type(a) is type(b) and len(a) == len(b):
        return type(a)(_united(x, y, n, m, sizes=sizes) for x, y in zip(a, b, strict=True))
    if type(a) is type(b) and _equal(a, b):
        return a
    if sizes and type(a) is int and type(b) is int and a % n == 0 and a * m == b * n:
        return Scaled(a // n)
    raise UnsupportedError("a number in the model depends on the size of the batch")


def _sized(size: Any, n: int) -> int:
    return size.per_record * n if type(size) is Scaled else size


def version_of(tensor: Tensor) -> int:
    """How often its memory was changed."""
    if tensor.is_inference():
        raise UnsupportedError("changes of tensors are not seen in inference mode")
    return tensor._version


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _refs(pattern: Any) -> Iterable[Ref]:
    if type(pattern) is Ref:
        yield pattern
    elif type(pattern) in (tuple, Listed):
        for part in pattern:
            yield from _refs(part)


def found_in(values: Iterable[Any]) -> list[Tensor]:
    """All tensors in nested tuples and lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += found_in(value)
    return found
