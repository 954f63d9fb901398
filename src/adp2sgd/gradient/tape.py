"""Sees every call of a torch function during a forward pass, and runs those that read a trained parameter as layers
that record. Rules belong to functions, not to modules: a user's own module needs no registration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from adp2sgd.gradient import functions, layers, rules
from adp2sgd.gradient.functions import HANDLERS
from adp2sgd.gradient.program import Pass, found_in
from adp2sgd.gradient.rounding import Measured, together
from adp2sgd.gradient.rules import UnsupportedError
from adp2sgd.gradient.vocabulary import EMPTY


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """A trained parameter, or a tensor that is computed from such parameters only."""

    tensor: Tensor
    roots: tuple[str, ...]
    derived: bool
    tokens: Tensor | None = None  # of a lookup in the one root, an embedding of constants


class Tape(TorchFunctionMode):
    """One forward and backward pass over `n` records. After it, `measured` and `uses` say all about the gradients;
    `held` counts the bytes that were recorded."""

    def __init__(
        self, parameters: Mapping[str, Tensor], constants: Iterable[Tensor], n: int, course: Pass | None = None
    ) -> None:
        """`course`: told of every call, and may refuse it."""
        super().__init__()
        self.n, self.parameters, self.course = n, parameters, course
        self.sources = {id(p): Source(p, (name,), False) for name, p in parameters.items()}
        self.constants = {id(c): c for c in constants}
        any_parameter = next(iter(parameters.values()))
        self.token = torch.zeros((), device=any_parameter.device, dtype=any_parameter.dtype, requires_grad=True)
        self.expected = dict.fromkeys(parameters, 0)
        self.waiting: dict[str, list[rules.Use]] = {name: [] for name in parameters}
        self.uses: dict[str, rules.Use] = {}
        self.small: dict[str, rules.Kept] = {}
        self.joined: rules.Joined | None = None
        self.measured: list[Measured] = []
        self.held, self.keep = 0, rules.most_kept(any_parameter.device)
        self.leaves = [self.token]

    # --- What the backward pass hands in ---

    def finish(self) -> Measured:
        """The norm of each record's whole gradient; call it after the backward pass."""
        for name, uses in self.waiting.items():
            if uses:
                self._settle(name, uses[0] if len(uses) == 1 else rules.merge(uses))
        if self.small:
            self.joined = rules.Joined(self.small)
            self.measured.append(self.joined.kept.measure())
        if not self.measured:
            return Measured(self.token.detach().new_zeros(self.n, dtype=torch.float64))
        return together(self.measured)

    def weighted(self, factors: Tensor, counted: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
        """The weighted sum of the records' gradients, parameter by parameter; what was recorded is let go. Those that
        are not `counted` [n] add nothing, even where their gradients are not finite."""
        if self.joined:
            rules.silence(self.joined.kept, counted)
            yield from self.joined.weighted(factors).items()
        while self.uses:
            name, use = self.uses.popitem()
            rules.silence(use, counted)
            yield name, use.weighted(factors)

    def used(self, name: str) -> rules.Use | None:
        """How this parameter was used; None if the loss does not depend on it."""
        return self.uses.get(name) or self.small.get(name)

    def _settle(self, name: str, use: rules.Use) -> None:
        self.waiting[name] = []
        recorded, use = use, rules.settle(use, self.keep)
        if use is not recorded:
            self.held += recorded.formed
        if isinstance(use, rules.Kept) and use.gradients.numel() <= rules.SMALL * self.n:
            self.small[name] = use
            return
        self.uses[name] = use
        self.measured.append(use.measure())

    def emitter(self, tensor: Tensor | None) -> layers.Emit | None:
        """Where the use of this tensor is to be handed in; None if it is not trained."""
        source = None if tensor is None else self.sources.get(id(tensor))
        if source is None:
            return None
        for name in source.roots:
            self.expected[name] += 1
        return partial(self._emit, source)

    def _emit(self, source: Source, use: rules.Use) -> None:
        # Runs within the backward pass, where torch itself tracks nothing.
        if source.tokens is not None and isinstance(use, rules.Kept):
            tokens = source.tokens.reshape(1, -1).expand(self.n, -1)
            outputs = use.gradients.reshape(self.n, tokens.shape[1], -1)
            self._hand_in(source.roots[0], rules.Embedding(tokens, outputs, len(self.parameters[source.roots[0]])))
            return
        for name in source.roots:
            pull = partial(_pull, source.tensor, self.parameters[name])
            self._hand_in(name, rules.Derived(use, pull) if source.derived else use)

    def _hand_in(self, name: str, use: rules.Use) -> None:
        self.held += use.held
        self.waiting[name].append(use)
        if self.expected[name] == 1:
            self._settle(name, use)

    # --- What the forward pass calls ---

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__iter__:
            with self:
                return iter(args[0].unbind(0))
        if self.course is None:
            return self._call(func, args, kwargs)
        number = self.course.call(func, args, kwargs)
        out = self._call(func, args, kwargs, number)
        if func in EMPTY:
            out.zero_()
        self.course.done(number, func, args, out)
        return out

    def _call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], number: int | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None:
            self._refuse_reading(getattr(func, "__name__", ""), args)
        tensors = found_in((*args, *kwargs.values()))
        others = [t for t in tensors if id(t) not in self.sources]
        trained = len(others) < len(tensors)
        if trained and self.course is not None and self.course.shares(number, others, self.n):
            return self._shared(func, args, kwargs, tensors)
        if handler is not None:
            return handler(self, *args, **kwargs)
        return self._loose(func, args, kwargs, tensors) if trained else func(*args, **kwargs)

    def _refuse_reading(self, name: str, args: tuple[Any, ...]) -> None:
        """What a model does by its records' values (a branch, a choice or an order of rows), it may do otherwise with
        records that no check has seen, so that rows would no longer be the records' own."""
        if name in READING or (name == "where" and len(args) == 1):
            raise UnsupportedError(f"{name} lets the course of the model depend on its records")
        if self.course is None and name in ("__getitem__", "__setitem__") and id(args[0]) not in self.sources:
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            if isinstance(first, Tensor):
                raise UnsupportedError("rows are picked by a tensor, which may mix up the records")

    def run(self, layer: layers.Layer, x: Tensor) -> Tensor:
        if id(x) in self.sources or x.dim() == 0 or len(x) == 0 or len(x) % self.n:
            raise UnsupportedError(f"a layer reads a tensor of shape {list(x.shape)}, which are not {self.n} records")
        out: Tensor = layers.Tap.apply(layer, self.token, x)  # type: ignore[no-untyped-call]
        return out

    # --- Parameters outside of layers ---

    def _loose(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        name = getattr(func, "__name__", str(func))
        others = [t for t in tensors if id(t) not in self.sources and id(t) not in self.constants]
        if name in ("expand", "repeat", "broadcast_to") and not others:
            return self._spread(func, name, args)
        if not others:
            return self._derive(func(*args, **kwargs), tensors)
        if name == "expand_as" and len(tensors) == 2:
            return self._spread(torch.Tensor.expand, "expand", (args[0], *args[1].shape))
        if name in PRODUCTS and id(args[-1]) in self.sources and args[-1].dim() == 2 and not kwargs:
            return functions.turned_linear(self, *args[-2:], args[0] if len(args) == 3 else None)
        if func is F.scaled_dot_product_attention:
            return self._attention(args, kwargs)
        if name not in ELEMENTWISE:
            names = [r for t in tensors if id(t) in self.sources for r in self.sources[id(t)].roots]
            raise UnsupportedError(f"{name} of {', '.join(names)} has no rule")
        rows, axes = len(others[0]) if others[0].dim() else 0, max(t.dim() for t in others)
        swapped = [self._per_record(a, rows, axes) if id(a) in self.sources else a for a in args]
        return func(*swapped, **kwargs)

    def _derive(self, out: Any, tensors: list[Tensor]) -> Any:
        """What is computed from parameters alone is tracked, so that its gradient can be led back to them."""
        roots = [r for t in tensors if id(t) in self.sources for r in self.sources[id(t)].roots]
        for tensor in found_in([out]):
            if tensor.requires_grad and id(tensor) not in self.sources:
                self.sources[id(tensor)] = Source(tensor, tuple(dict.fromkeys(roots)), True)
        return out

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Attention whose mask is trained (a bias by relative position, say)."""
        query, *others = args
        mask = kwargs.get("attn_mask", others[2] if len(others) > 2 else None)
        if any(id(stream) in self.sources for stream in (query, *others[:2])) or id(mask) not in self.sources:
            raise UnsupportedError("attention of trained queries, keys or values has no rule")
        own = self._per_record(mask, len(query), query.dim())
        if "attn_mask" in kwargs:
            return F.scaled_dot_product_attention(*args, **kwargs | {"attn_mask": own})
        return F.scaled_dot_product_attention(*args[:3], own, *args[4:], **kwargs)

    def _shared(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """A function of constants and parameters alone: computed once for all records."""
        out = self._derive(func(*args, **kwargs), tensors)
        plain = func is F.embedding and len(args) > 1 and all(not option for option in (*args[2:], *kwargs.values()))
        if plain and id(args[1]) in self.sources and not self.sources[id(args[1])].derived:
            self.sources[id(out)] = replace(self.sources[id(out)], tokens=args[0])
        return out

    def _spread(self, func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Tensor:
        """A parameter repeated for each record (a class token, say)."""
        tensor, sizes = args[0], args[1:]
        sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes
        fresh = len(sizes) > tensor.dim() or (tensor.dim() > 0 and tensor.shape[0] == 1)
        if not fresh or not sizes or sizes[0] == -1 or sizes[0] == 1 != self.n:
            return self._derive(func(*args), [tensor])  # type: ignore[no-any-return]
        if sizes[0] % self.n:  # along another axis, whose length some batch may have: never to be taken for records
            raise UnsupportedError(f"{name} of a parameter to {sizes[0]} rows, which are not {self.n} records")
        own = self._per_record(tensor, sizes[0], len(sizes))
        out: Tensor = own.repeat(1, *sizes[1:]) if name == "repeat" else own.expand(*sizes)
        return out

    def _per_record(self, tensor: Tensor, rows: int, axes: int) -> Tensor:
        """A copy of the parameter for each row (no memory is used), whose gradients are the rows' gradients."""
        if rows == 0 or rows % self.n or tensor.dim() > axes or (tensor.dim() == axes and tensor.shape[0] != 1):
            raise UnsupportedError(f"a parameter of shape {list(tensor.shape)} meets {rows} rows, not {self.n} records")
        shape = [1] * (axes - tensor.dim()) + list(tensor.shape)
        own = tensor.detach().view(shape).expand(rows, *shape[1:]).requires_grad_()
        emit = self.emitter(tensor)
        assert emit is not None

        def hand_in(gradient: Tensor) -> None:
            emit(rules.Kept(gradient.reshape(self.n, -1, *tensor.shape).sum(1)))

        own.register_hook(hand_in)
        self.leaves.append(own)
        return own


ELEMENTWISE = {
    "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "rsub", "mul",
    "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "div", "div_", "__truediv__", "__rtruediv__", "true_divide",
    "maximum", "minimum", "pow", "__pow__", "where", "lerp", "addcmul",
}  # fmt: skip


PRODUCTS = ("matmul", "__matmul__", "addmm")
READING = {
    "__bool__", "__int__", "__float__", "__index__", "__array__", "is_nonzero", "item", "tolist", "numpy", "equal",
    "allclose", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "index_select",
    "argsort", "sort", "topk",
}  # fmt: skip


def _pull(tensor: Tensor, root: Tensor, gradients: Tensor) -> Tensor:
    """Gradients of a derived tensor [n, *tensor.shape], led back to the parameter it is computed from."""
    given = gradients.reshape(-1, *tensor.shape)
    with torch.enable_grad():
        return torch.autograd.grad(tensor, root, given, retain_graph=True, is_grads_batched=True)[0]
