"""For each torch function that may keep the records of a batch apart: when it does, and where they lie after it."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adp2sgd.gradient import vocabulary as words
from adp2sgd.gradient.layouts import UNIFORM, Rows, Rule, Site, Value, joint
from adp2sgd.gradient.program import Listed, Scaled


def aligned(site: Site, out: Value, values: tuple[Value, ...] | list[Value], least: int = 1) -> Rows:
    """Tensors aligned at their last axes: what lies at the axis of records has records there too, or one place."""
    place = out.from_right
    for value in values:
        constant = value.rows is None
        if constant and len(value.shape) >= place and value.shape[-place] != 1:
            raise site.refusal()
        if (not constant and value.from_right != place) or place < least:
            raise site.refusal()
    return joint(site, [value for value in values if value.rows is not None])


def elementwise(site: Site) -> Rows:
    rows = aligned(site, site.out, site.tensors)
    others = [value for value in site.tensors if not value.trained and not value.buffer]
    if site.attributed and not (others[0].in_front and len(others[0].shape) == max(len(v.shape) for v in others)):
        raise site.refusal("of a parameter has no rule where the records do not lie in front")
    return rows


def of_first(site: Site) -> Rows:
    """Where the records of the first tensor lie; others are constants, or only give a type."""
    if site.first.rows is None or site.first.axis != site.out.axis or len(site.with_records) > 1:
        raise site.refusal()
    return site.first.rows


def move(site: Site) -> Rows:
    if site.first.rows is None:
        raise site.refusal()
    return site.first.rows


def one_hot(site: Site) -> Rows:
    if site.get(1, "num_classes", -1) < 0:
        raise site.refusal("without a number of classes reads it from the batch")
    return of_first(site)


def along(site: Site) -> Rows:
    """Joins numbers along axes, of which none may be the records'; several tensors have as many axes each."""
    place, default = words.ALONG[site.func]
    named = site.kwargs.get("dims", site.kwargs.get("axis", default))
    axes = site.get(place, "dim", named)
    if isinstance(axes, Value) and site.name in ("max", "min"):  # the larger or the smaller numbers of two tensors
        return elementwise(site)
    axes = site.args[1:] if site.name == "flip" and len(site.args) > 2 else axes if isinstance(axes, tuple) else (axes,)
    alike = len({(len(v.shape), v.axis) for v in site.tensors if v.rows is not None}) == 1
    if not alike or len(site.with_records) < len(site.tensors) or not axes or any(type(a) is not int for a in axes):
        raise site.refusal()
    if any(a % len(v.shape) == v.axis for a in axes for v in site.tensors):
        return _unsplit(site) if site.func in words.SPLITS else _interleaved(site)
    return joint(site, site.tensors)


def _unsplit(site: Site) -> Rows:
    """A batch that is split into one part only; `Follower` sees it where there are more."""
    if len(site.shapes) != 1 or site.shapes[0] != site.first.shape or site.first.rows is None:
        raise site.refusal()
    return site.first.rows


def _interleaved(site: Site) -> Rows:
    """`repeat_interleave` along the records' own axis."""
    times, rows = site.get(1, "repeats"), site.first.rows
    if site.name != "repeat_interleave" or type(times) is not int or rows is None or not site.first.in_order:
        raise site.refusal()
    return Rows(1, site.first.shape[site.first.axis].per_record * times)


def batch_first(site: Site) -> Rows:
    """Functions of images and of classes: the records lie in front of every tensor that has any."""
    found = site.with_records
    if not found or any(value.axis != 0 for value in found) or site.out.axis != 0:
        raise site.refusal()
    return joint(site, found)


def last_axes(site: Site, count: int) -> Rows:
    """Joins the last `count` axes of its first tensor."""
    if site.first.rows is None or site.first.from_right <= count or len(site.with_records) > 1:
        raise site.refusal()
    return site.first.rows


def pad(site: Site) -> Rows:
    return last_axes(site, len(site.get(1, "pad", ())) // 2)


def reshape(site: Site) -> Rows:
    """In memory order `step` numbers in a row belong to one record; one axis must hold whole such rows, n of them."""
    given, out = site.first, site.out
    if given.rows is None:
        raise site.refusal()
    if prod(_places(given)) != prod(_places(out)):  # other numbers: the same bits read as another type
        raise site.refusal()
    if given.rows == UNIFORM:
        return UNIFORM
    step = given.rows.inner * prod(given.shape[given.axis + 1 :])
    after, count = prod(out.shape[out.axis + 1 :]), out.shape[out.axis].per_record
    inner = step // max(1, after)
    if after == 0 or inner == 0 or step % after or count % inner:
        raise site.refusal()
    return Rows(count // inner, inner)


def _places(value: Value) -> list[int]:
    """The sizes of its axes for one record."""
    return [size.per_record if isinstance(size, Scaled) else size for size in value.shape]


def spread(site: Site) -> Rows:
    """Repeats a tensor along new axes and axes of one place; what has no records, along theirs."""
    given, out = site.first, site.out
    if given.rows is not None:
        if given.shape[given.axis] != out.shape[out.axis] or given.from_right != out.from_right:
            raise site.refusal()
        return given.rows
    size, place = out.shape[out.axis].per_record, out.from_right
    own = given.shape[-place] if len(given.shape) >= place else 1
    if own == 1 and not given.trained:
        return UNIFORM
    if own == 1 and out.axis == 0:
        return Rows(1, size)
    if given.trained or site.name not in ("repeat", "tile") or size != own:
        raise site.refusal()
    return Rows(1, size)


def made(site: Site) -> Rows:
    """Zeros, ones, or random numbers; a tensor that is given only lends its type."""
    return UNIFORM


NOTHING = (0,)
"""The shape of an empty tensor, which `cat` passes over (a cache of attention starts with one)."""


def joined(site: Site) -> Rows:
    axis, parts = site.get(1, "dim", site.kwargs.get("axis", 0)), [v for v in site.tensors if v.shape != NOTHING]
    if type(axis) is not int or any(v.rows is None or v.axis != parts[0].axis for v in parts):
        raise site.refusal()
    along_records = site.name != "stack" and axis % len(parts[0].shape) == parts[0].axis
    if len({len(v.shape) for v in parts}) > 1 or (along_records and len(parts) > 1):
        raise site.refusal()
    return joint(site, parts)


def product(site: Site, at: int = 0) -> Rows:
    """Matrix products: the records lie along rows of the left, columns of the right, or matrices of both."""
    left, right = site.args[at : at + 2] if len(site.args) > at + 1 else (None, None)
    if not isinstance(left, Value) or not isinstance(right, Value):
        raise site.refusal("is called in a way that is not checked")
    if site.attributed and not (right.trained and left.in_front):
        raise site.refusal("of a parameter has no rule where the records do not lie in front")
    least = 1 if left.rows is None else 2 if right.rows is None else 3
    for value, inner in ((left, 1), (right, 2)):
        contracted = inner if len(value.shape) > 1 else 1
        if value.rows is not None and (value.from_right == contracted or value.from_right < least):
            raise site.refusal()
    records = [value for value in (left, right) if value.rows is not None]
    place = records[0].from_right if records else 0
    if place >= 3:
        aligned(site, records[0], [left, right])
    if at:
        aligned(site, site.out, [site.first])
    rows = joint(site, records)
    return joint(site, [*records, site.first]) if at and site.first.rows is not None else rows


def einsum(site: Site) -> Rows:
    """The records' letter is the same in all tensors that have any, in no other one, and in the result."""
    equation, *operands = site.args
    operands = list(operands[0]) if operands and isinstance(operands[0], tuple) else operands
    if not isinstance(equation, str) or "->" not in equation or len(operands) != len(site.tensors):
        raise site.refusal("is called in a way that is not checked")
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    letters = {_letter(term, value) for term, value in zip(terms, operands, strict=True) if value.rows is not None}
    constants = "".join(term for term, value in zip(terms, operands, strict=True) if value.rows is None)
    letter = letters.pop() if len(letters) == 1 else None
    own = [term.count(letter or " ") for term, value in zip(terms, operands, strict=True) if value.rows is not None]
    if letter is None or letter in constants or right.count(letter) != 1 or any(count != 1 for count in own):
        raise site.refusal()
    return joint(site, site.with_records)


def _letter(term: str, value: Value) -> str | None:
    """The letter of the axis of records; None where it lies under an ellipsis."""
    if "..." not in term:
        return term[value.axis]
    before, after = term.split("...")
    if value.axis < len(before):
        return before[value.axis]
    return after[-value.from_right] if value.from_right <= len(after) else None


def attention(site: Site) -> Rows:
    """`scaled_dot_product_attention`: records lie along axes in front of the last two."""
    if site.attributed and not site.first.in_front:
        raise site.refusal("with a trained mask has no rule where the records do not lie in front")
    return aligned(site, site.out, site.tensors, least=3)


def _indices(site: Site) -> list[Any]:
    """What picks from each axis of the first tensor, in order; None makes a new axis."""
    given = site.args[1]
    parts = list(given) if type(given) is tuple and given[:1] != ("slice",) else [given]
    # A constant of one axis picks along one axis, be it of numbers or of booleans.
    picks = [p for p in parts if isinstance(p, (bool, Value, Listed)) or (type(p) is tuple and p[:1] != ("slice",))]
    if picks and (site.func is Tensor.__setitem__ or not all(_picks_one_axis(p) for p in picks)):
        raise site.refusal("by a tensor or a list may mix the records of a batch")
    missing = len(site.first.shape) - sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    return parts[:at] + [WHOLE] * missing + parts[at + 1 :]


def _picks_one_axis(part: Any) -> bool:
    if isinstance(part, Listed):
        return all(type(number) is int for number in part)
    return isinstance(part, Value) and part.rows is None and len(part.shape) == 1


WHOLE = ("slice", None, None, None)


def _picked(site: Site) -> int:
    """The place from the right of the records' axis in what is picked; it must be picked whole."""
    axis, after = -1, 0
    for part in _indices(site):
        axis += part is not None
        if part is not None and axis == site.first.axis and part not in (WHOLE, ("slice", 0, None, None)):
            raise site.refusal("of some records takes a batch apart")
        after += axis >= site.first.axis and type(part) is not int
    return after


def numbered(site: Site) -> Rows:
    """`arange` over the rows of the batch."""
    if len(site.args) != 1 or not isinstance(site.args[0], Scaled):
        raise site.refusal("of records is not known to keep them apart")
    return Rows(1, site.args[0].per_record)


def _own(site: Site, index: Any) -> Rows:
    """Every row of a batch, picked by its own number; along other axes, by constants: `mask[numbers, places]`."""
    numbers, *others = index if type(index) is tuple else (index,)
    batch, rows = site.first, numbers.rows
    fits = batch.in_front and batch.rows == rows and batch.shape[0] == numbers.shape[numbers.axis] and not batch.index
    constants = all(isinstance(part, Value) and part.rows is None for part in others)
    if not fits or not constants or any(size != 1 for size in numbers.shape if not isinstance(size, Scaled)):
        raise site.refusal("by a tensor or a list may mix the records of a batch")
    return rows


def getitem(site: Site) -> Rows:
    index = site.args[1]
    first = index[0] if type(index) is tuple and index else index
    if isinstance(first, Value) and first.index:
        return _own(site, index)
    if any(value.index for value in site.tensors[1:]):
        raise site.refusal("by a tensor or a list may mix the records of a batch")
    if site.first.rows is None:  # a table that records look something up in
        if not isinstance(index, Value) or index.rows is None:
            raise site.refusal()
        return index.rows
    _picked(site)
    return site.first.rows


def setitem(site: Site) -> Rows:
    place, new = _picked(site), site.args[2]
    if not isinstance(new, Value):
        return site.first.rows or UNIFORM
    if new.rows is None and len(new.shape) >= place and new.shape[-place] != 1:
        raise site.refusal()
    if new.rows is not None and new.from_right != place:
        raise site.refusal()
    return joint(site, site.with_records)


# --- Layers: those with a trained parameter are recorded, and need the records in order ---


def linear(site: Site) -> Rows:
    return _recorded(site, last_axes(site, 1))


def embedding(site: Site) -> Rows:
    return _recorded(site, of_first(site))


def normalized(site: Site) -> Rows:
    return _recorded(site, last_axes(site, len(site.get(1, "normalized_shape"))))


def image_layer(site: Site) -> Rows:
    return _recorded(site, batch_first(site))


def instance_norm(site: Site) -> Rows:
    if site.get(1, "running_mean") is not None:
        raise site.refusal("keeps statistics of batches")
    return _recorded(site, batch_first(site))


def _recorded(site: Site, rows: Rows) -> Rows:
    if site.attributed and (not site.first.in_front or len(site.with_records) > 1):
        raise site.refusal("of a parameter has no rule where the records do not lie in front, in order")
    return rows


def lstm(site: Site) -> Rows:
    if len(site.args) != 9 or not isinstance(site.args[1], tuple):
        raise site.refusal("of packed sequences has no rule")
    x, states, first = site.args[0], site.args[1], site.args[8]
    places = {id(x): 0 if first else 1} | {id(state): 1 for state in states}
    for value in (x, *states):
        if value.rows is None or value.axis != places[id(value)] or (value is x and not value.in_order):
            raise site.refusal()
    return joint(site, [x, *states])


def multi_head(site: Site) -> Rows:
    names = ("query", "key", "value")
    streams = [site.get(at, name) for at, name in enumerate(names)]
    if any(len(v.shape) != 3 or v.rows is None or v.axis != 1 or not v.in_order for v in streams):
        raise site.refusal()
    rows, heads = joint(site, streams), site.get(4, "num_heads")
    padding, mask = site.get(14, "key_padding_mask"), site.get(16, "attn_mask")
    if padding is not None and (padding.rows not in (rows, UNIFORM) or padding.axis != 0):
        raise site.refusal()
    fits = (Rows(1, rows.inner * heads), UNIFORM)
    if mask is not None and len(mask.shape) == 3 and (mask.rows not in fits or mask.axis != 0):
        raise site.refusal()
    if mask is not None and len(mask.shape) != 3 and mask.rows is not None:
        raise site.refusal()
    return rows


def alone(site: Site) -> Rows:
    raise site.refusal("of records is not known to keep them apart")


RULES: dict[Any, Rule] = (
    dict.fromkeys(words.ALONE, alone)
    | {torch.arange: numbered}
    | dict.fromkeys(words.ELEMENTWISE, elementwise)
    | dict.fromkeys(words.functions("type_as bucketize"), of_first)
    | dict.fromkeys(words.ALONG, along)
    | dict.fromkeys(words.BATCH_FIRST, batch_first)
    | dict.fromkeys(words.LAST_TWO, partial(last_axes, count=2))
    | dict.fromkeys(words.RESHAPES, reshape)
    | dict.fromkeys(words.MOVES, move)
    | dict.fromkeys(words.SPREADS, spread)
    | dict.fromkeys(words.FACTORIES, made)
    | dict.fromkeys(words.JOINS, joined)
    | dict.fromkeys(words.functions("matmul __matmul__ bmm mm mv"), product)
    | dict.fromkeys(words.functions("baddbmm addmm"), partial(product, at=1))
    | dict.fromkeys(words.functions("one_hot"), one_hot)
    | dict.fromkeys(words.functions("conv1d conv2d conv3d group_norm"), image_layer)
    | dict.fromkeys(words.functions("layer_norm rms_norm"), normalized)
    | {
        F.linear: linear, F.embedding: embedding, F.pad: pad, torch._C._nn.pad: pad, F.instance_norm: instance_norm,
        F.scaled_dot_product_attention: attention, torch.einsum: einsum, torch.lstm: lstm,
        F.multi_head_attention_forward: multi_head, Tensor.__getitem__: getitem, Tensor.__setitem__: setitem,
    }
)  # fmt: skip
