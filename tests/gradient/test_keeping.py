"""Every function that is taken to keep records apart does so. It is called in many ways; calls that the rules accept
are held to it in numbers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adp2sgd.gradient.keeping import RULES
from adp2sgd.gradient.layouts import UNIFORM, Value, located
from adp2sgd.gradient.program import Writer, unite
from adp2sgd.gradient.tape import Tape
from adp2sgd.gradient.vocabulary import EMPTY, FACTORIES, functions

DRAWING = {
    *FACTORIES, *EMPTY, *functions(
        "alpha_dropout dropout feature_alpha_dropout dropout_ alpha_dropout_ feature_alpha_dropout_ dropout1d dropout2d"
        " dropout3d rand_like randn_like bernoulli bernoulli_ rrelu rrelu_ rand randn"
    ),
}  # fmt: skip
SHAPES = ((), (2,), (2, 4), (2, 4, 4))  # of one record
SIZES = (3, 4)
Argument = Callable[[Tensor, Tensor], Any]


def constant(value: Any) -> Argument:
    return lambda x, z: value


X: Argument = lambda x, z: x  # noqa: E731 (one of many)
TENSORS: tuple[Argument, ...] = (
    lambda x, z: z,
    lambda x, z: (z * 2).long().clamp(0, 1),
    lambda x, z: z > 0.5,
    lambda x, z: z.unsqueeze(1),
    lambda x, z: z.flatten(1)[:, 0] if z.dim() > 1 else z,
    lambda x, z: z.transpose(0, -1),
    lambda x, z: torch.full(x.shape[1:], 0.5, dtype=x.dtype),
    lambda x, z: torch.full((1, *x.shape[1:]), 0.5, dtype=x.dtype),
    lambda x, z: torch.full((*x.shape[1:], 3), 0.5, dtype=x.dtype),
    lambda x, z: torch.eye(4, dtype=x.dtype),
    lambda x, z: torch.tensor(1),
    lambda x, z: torch.tensor([0, 1]),
)
AXES = tuple(constant(v) for v in (0, 1, -1, 2, (0, 1), (1, 2), [0], [1], (1, 1), (1, 1, 1, 1), 2.0, True, None))
INDICES = tuple(
    constant(v)
    for v in (slice(None), slice(1), (slice(None), 0), (slice(None), slice(1)), (..., 0), (None, slice(None)))
)
VIEWS: tuple[Argument, ...] = (
    *(constant(v) for v in ((-1,), (2, -1), (-1, 2), (0, -1), torch.int32, torch.float32)),
    lambda x, z: (len(x), -1),
    lambda x, z: (-1, len(x)),
    lambda x, z: (2, len(x)),
    lambda x, z: (len(x), 5),
    lambda x, z: (len(x), *x.shape),
)
SUMS = ("n,n->n", "nd,nd->n", "nd,md->nm", "nd,nd->d", "ntd,nsd->nts", "n...,n...->n", "nd,nd->dn", "...n,...n->...n")
EQUATIONS = tuple(constant(equation) for equation in SUMS)
LISTS: tuple[Argument, ...] = (lambda x, z: [x, z], lambda x, z: (x,), lambda x, z: [x, torch.full_like(x[:1], 0.5)])
WAYS: tuple[tuple[Argument, ...], ...] = (
    (X,),
    *itertools.product((X, TENSORS[1]), (*TENSORS, *AXES, *INDICES, *VIEWS)),
    *itertools.product(TENSORS, (X,)),
    *itertools.product((X,), AXES[:4], (*TENSORS, *AXES[:4], constant((-1, 1)), constant((1, -1)))),
    *itertools.product((X,), TENSORS, (*TENSORS[:4], *AXES[:4])),
    *itertools.product((X,), AXES[:2], TENSORS[:3], TENSORS[:3]),
    *itertools.product((X,), INDICES[2:4], (*TENSORS, constant(0.0))),
    *itertools.product(LISTS, AXES[:3]),
    *itertools.product(EQUATIONS, (X,), TENSORS[:8]),
)


def records(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, z = torch.rand(2, SIZES[1], *shape, generator=generator, dtype=torch.float64) + 0.1
    return x, z


def called(func: Callable[..., Any], way: tuple[Argument, ...], x: Tensor, z: Tensor) -> Tensor | None:
    """The first tensor that it returns, or changes."""
    args = tuple(argument(x, z) for argument in way)
    out = func(*args)
    parts = [args[0] if out is None else out] if out is None or isinstance(out, Tensor) else list(out)
    return next((part for part in parts if isinstance(part, Tensor)), None)


def accepted(func: Callable[..., Any], way: tuple[Argument, ...], x: Tensor, z: Tensor) -> Value | None:
    """Where the rules say that records lie in the result; None where they refuse the call."""
    written = []
    for n in SIZES:
        one, other = x[:n].clone(), z[:n].clone()
        writer = Writer(nn.Module(), one, other)
        with Tape({"unused": nn.Parameter(torch.zeros(1))}, [], n, writer):
            written.append((writer, called(func, way, one, other)))
    (first, out), (second, also) = written
    if out is None or also is None or first.ref(out) is None:
        return None
    program = unite(first, SIZES[0], second, SIZES[1], (out, also))
    return located(program, RULES, [], [])[program.result]


def by_record(out: Tensor, value: Value) -> Tensor:
    """[n, …]: what belongs to each record."""
    assert value.rows is not None
    rows, n = value.rows, out.shape[value.axis]
    outer, inner = (1, value.shape[value.axis].per_record) if rows == UNIFORM else rows
    moved = out.detach().movedim(value.axis, 0)
    return moved.reshape(outer, n // outer // inner, inner, *moved.shape[1:]).movedim(1, 0)


def same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left.double(), right.double(), rtol=1e-6, equal_nan=True)


def assert_kept(func: Callable[..., Any], way: tuple[Argument, ...], x: Tensor, z: Tensor) -> bool:
    """Whether the call is accepted. If so, no record's part depends on another record, nor on the size of the batch."""
    try:
        called(func, way, x.clone(), z.clone())
        value = accepted(func, way, x, z)
    except Exception:  # not the way to call it, or refused
        return False
    if value is None:
        return False
    whole = called(func, way, x.clone(), z.clone())
    if value.rows is None:
        other = called(func, way, 3 - x, 2 - z)
        assert same(whole, other), "holds something of the records"
        return True
    found = by_record(whole, value)
    fewer = by_record(called(func, way, x[:-1].clone(), z[:-1].clone()), value)
    assert same(found[:-1], fewer), "depends on the last record, or on the size"
    for record in (0, 2):
        one, other = x.clone(), z.clone()
        one[record], other[record] = 3 - one[record], 1 - other[record]
        changed = by_record(called(func, way, one, other), value)
        rest = torch.arange(len(x)) != record
        assert same(found[rest], changed[rest]), f"depends on record {record}"
    return True


NAMES = {getattr(func, "__qualname__", str(func)): func for func in RULES if func not in DRAWING}


@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if len(s) == 2 else pytest.mark.slow) for s in SHAPES])
def test_calls_that_the_rules_accept_keep_records_apart(shape):
    """About 300 ways to call each of 800 functions, most of which are no calls; the accepted ones are held to it."""
    x, z = records(shape)
    kept, wrong = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, func in NAMES.items():
            for way in WAYS:
                try:
                    kept += assert_kept(func, way, x, z)
                except AssertionError as error:
                    wrong.append((name, [str(a(x, z))[:40] for a in way], str(error)[:60]))
    assert not wrong, wrong[:20]
    assert kept > 300
