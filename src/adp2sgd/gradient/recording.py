"""Sees every call of a torch function during a forward pass, and runs those that read a trained parameter as layers
that record. Rules belong to functions, not to modules: a user's own module needs no registration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from adp2sgd.errors import PrivacyError
from adp2sgd.gradient import layers, rules
from adp2sgd.gradient.attention import attend
from adp2sgd.gradient.convolution import Geometry
from adp2sgd.gradient.recurrent import Direction, linear_uses


class UnsupportedError(Exception):
    """A parameter is used in a way that no rule covers."""


@dataclass(frozen=True, eq=False)
class Source:
    """A trained parameter, or a tensor that is computed from such parameters only."""

    tensor: Tensor
    roots: tuple[str, ...]
    derived: bool


class Recording(TorchFunctionMode):
    """One forward and backward pass over `n` records. After it, `squares` and `uses` say all about the gradients;
    `held` counts the bytes that were recorded."""

    def __init__(self, parameters: Mapping[str, Tensor], constants: Iterable[Tensor], n: int) -> None:
        super().__init__()
        self.n, self.parameters = n, parameters
        self.sources = {id(p): Source(p, (name,), False) for name, p in parameters.items()}
        self.constants = {id(c): c for c in constants}
        any_parameter = next(iter(parameters.values()))
        self.token = torch.zeros((), device=any_parameter.device, dtype=any_parameter.dtype, requires_grad=True)
        self.expected = dict.fromkeys(parameters, 0)
        self.waiting: dict[str, list[rules.Use]] = {name: [] for name in parameters}
        self.uses: dict[str, rules.Use] = {}
        self.small: dict[str, rules.Kept] = {}
        self.joined: rules.Joined | None = None
        self.squares: list[Tensor] = []
        self.held = 0
        self.leaves = [self.token]

    # --- What the backward pass hands in ---

    def finish(self) -> Tensor:
        """The squared norm of each record's whole gradient [n]; call it after the backward pass."""
        for name, uses in self.waiting.items():
            if uses:
                self._settle(name, uses[0] if len(uses) == 1 else rules.merge(uses))
        if self.small:
            self.joined = rules.Joined(self.small)
            self.squares.append(self.joined.kept.squares())
        if not self.squares:
            return self.token.detach().new_zeros(self.n)
        return torch.stack(self.squares).sum(0)

    def weighted(self, factors: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The weighted sum of the records' gradients, parameter by parameter; what was recorded is let go."""
        if self.joined:
            yield from self.joined.weighted(factors).items()
        while self.uses:
            name, use = self.uses.popitem()
            yield name, use.weighted(factors)

    def used(self, name: str) -> rules.Use | None:
        """How this parameter was used; None if the loss does not depend on it."""
        return self.uses.get(name) or self.small.get(name)

    def _settle(self, name: str, use: rules.Use) -> None:
        self.waiting[name] = []
        if isinstance(use, rules.Kept) and use.gradients.numel() <= rules.SMALL * self.n:
            self.small[name] = use
            return
        squares, self.uses[name] = rules.settle(use)
        self.squares.append(squares)

    def emitter(self, tensor: Tensor | None) -> layers.Emit | None:
        """Where the use of this tensor is to be handed in; None if it is not trained."""
        source = None if tensor is None else self.sources.get(id(tensor))
        if source is None:
            return None
        for name in source.roots:
            self.expected[name] += 1
        return partial(self._emit, source)

    def _emit(self, source: Source, use: rules.Use) -> None:
        with torch.no_grad():
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
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self, *args, **kwargs)
        tensors = [a for a in _tensors((args, kwargs.values()))]
        if not any(id(t) in self.sources for t in tensors):
            return func(*args, **kwargs)
        return self._loose(func, args, kwargs, tensors)

    def run(self, layer: layers.Layer, x: Tensor) -> Tensor:
        if id(x) in self.sources or x.dim() == 0 or len(x) == 0 or len(x) % self.n:
            raise UnsupportedError(f"a layer reads a tensor of shape {list(x.shape)}, which are not {self.n} records")
        out: Tensor = layers.Tap.apply(layer, self.token, x)  # type: ignore[no-untyped-call]
        return out

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        emit, emit_bias = self.emitter(weight), self.emitter(bias)
        x, w, b = _cast(input, weight, bias)
        if emit is None and emit_bias is None:
            return F.linear(x, w, b)
        return self.run(layers.LinearLayer(self.n, _plain(w), _plain_or_none(b), emit, emit_bias), x)

    def convolution(
        self, axes: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        kernel, steps = tuple(weight.shape[2:]), _each(dilation, axes)
        x = input
        if input.dim() != axes + 2:
            raise UnsupportedError(
                f"a convolution reads a tensor of shape {list(input.shape)} without records in front"
            )
        if padding == "same":
            both = [d * (k - 1) for k, d in zip(kernel, steps, strict=True)]
            x = F.pad(x, [a for b in reversed(both) for a in (0, b % 2)])
            padding = [b // 2 for b in both]
        padding = 0 if padding == "valid" else padding
        geometry = Geometry(kernel, _each(stride, axes), _each(padding, axes), steps, groups)
        emit, emit_bias = self.emitter(weight), self.emitter(bias)
        x, w, b = _cast(x, weight, bias)
        layer = layers.ConvolutionLayer(self.n, _plain(w), _plain_or_none(b), geometry, emit, emit_bias)
        return self.run(layer, x) if emit or emit_bias else layer.forward(x)[0]

    def group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        emits = [self.emitter(weight), self.emitter(bias)]
        x = _full(input)
        if not any(emits):
            return F.group_norm(x, num_groups, weight, bias, eps)
        layer = layers.GroupNormLayer(self.n, num_groups, _plain_or_none(weight), _plain_or_none(bias), eps, emits)
        return self.run(layer, x)

    def layer_norm(
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        emits = [self.emitter(weight), self.emitter(bias)]
        x = _full(input)
        if not any(emits):
            return F.layer_norm(x, normalized_shape, weight, bias, eps)
        shape = list(normalized_shape)
        layer = layers.LayerNormLayer(self.n, shape, _plain_or_none(weight), _plain_or_none(bias), eps, emits)
        return self.run(layer, x)

    def embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if max_norm is not None or scale_grad_by_freq:
            raise UnsupportedError("an embedding with max_norm or scale_grad_by_freq couples records")
        emit = self.emitter(weight)
        if emit is None:
            return F.embedding(input, weight)
        padding = padding_idx if padding_idx is None or padding_idx >= 0 else len(weight) + padding_idx
        return self.run(layers.EmbeddingLayer(self.n, _plain(weight), padding, emit), input)

    def lstm(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        if len(args) != 9 or not isinstance(args[2], (list, tuple)) or args[0].dim() != 3:
            raise UnsupportedError("an LSTM over packed or unbatched sequences has no rule")
        x, (h0, c0), flat, has_bias, count, dropout, training, both, batch_first = args
        if any(id(t) in self.sources for t in (x, h0, c0)):
            raise UnsupportedError("an LSTM whose first state is trained has no rule")
        size = 4 if has_bias else 2
        ends: list[tuple[Tensor, Tensor]] = []
        x = x.transpose(0, 1) if batch_first else x
        if x.shape[1] % self.n or len(flat) != size * count * (1 + both):
            raise UnsupportedError("an LSTM with projections, or whose rows do not divide into records, has no rule")
        for layer in range(count):
            sides = []
            for side in range(1 + both):
                at = layer * (1 + both) + side
                out, *end = self._direction(x.flip(0) if side else x, h0[at], c0[at], flat[at * size : (at + 1) * size])
                ends.append((end[0], end[1]))
                sides.append(out.flip(0) if side else out)
            x = torch.cat(sides, 2)
            if dropout and training and layer < count - 1:
                x = F.dropout(x, dropout)
        x = x.transpose(0, 1) if batch_first else x
        return x, torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends])

    def _direction(self, x: Tensor, h0: Tensor, c0: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        emits = [self.emitter(w) for w in weights]

        def emit(x: Tensor, before: Tensor, gates: Tensor) -> None:
            for to, use in zip(emits, linear_uses(self.n, x, before, gates), strict=False):
                if to:
                    to(use)

        plain = [_plain(w) for w in weights]
        bias = plain[2] + plain[3] if len(plain) == 4 else x.new_zeros(len(plain[0]))
        x, h0, c0 = (t.to(plain[0].dtype) for t in (x, h0, c0))
        out = Direction.apply(emit, self.token, x, h0, c0, plain[0], plain[1], bias)  # type: ignore[no-untyped-call]
        return out[0], out[1], out[2]

    def attention(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = dict(zip(ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
        call = ATTENTION_DEFAULTS | call
        odd = [k for k in ("bias_k", "bias_v", "static_k", "static_v") if call[k] is not None]
        if odd or call["add_zero_attn"] or call["query"].dim() != 3:
            raise UnsupportedError("attention with bias_kv, zero_attn, static keys or unbatched input has no rule")
        if call["use_separate_proj_weight"]:
            weights = [call[f"{name}_proj_weight"] for name in "qkv"]
        elif call["query"] is call["key"] is call["value"]:
            weights = [call["in_proj_weight"]]
        else:
            weights = self._pieces(call["in_proj_weight"])
        bias = call["in_proj_bias"]
        biases = [None] * len(weights) if bias is None else [bias] if len(weights) == 1 else self._pieces(bias)
        return attend(self.linear, weights, biases, call)

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        with self:
            return list(tensor.chunk(3))

    def batch_norm(self, input: Tensor, mean: Any, var: Any, *args: Any, **kwargs: Any) -> Tensor:
        named = dict(zip(("weight", "bias", "training"), args, strict=False)) | kwargs
        if named.get("training"):
            raise PrivacyError("BatchNorm couples the records of a batch; use norm = group, or a model without it")
        raise UnsupportedError("batch_norm with trained parameters has no rule")

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
        if name in ("matmul", "__matmul__") and id(args[1]) in self.sources and args[1].dim() == 2:
            with self:
                return F.linear(args[0], args[1].t())
        if name not in ELEMENTWISE:
            names = [r for t in tensors if id(t) in self.sources for r in self.sources[id(t)].roots]
            raise UnsupportedError(f"{name} of {', '.join(names)} has no rule")
        rows, axes = len(others[0]) if others[0].dim() else 0, max(t.dim() for t in others)
        swapped = [self._per_record(a, rows, axes) if id(a) in self.sources else a for a in args]
        return func(*swapped, **kwargs)

    def _derive(self, out: Any, tensors: list[Tensor]) -> Any:
        """What is computed from parameters alone is tracked, so that its gradient can be led back to them."""
        roots = [r for t in tensors if id(t) in self.sources for r in self.sources[id(t)].roots]
        for tensor in _tensors([out]):
            if tensor.requires_grad and id(tensor) not in self.sources:
                self.sources[id(tensor)] = Source(tensor, tuple(dict.fromkeys(roots)), True)
        return out

    def _spread(self, func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Tensor:
        """A parameter repeated for each record (a class token, say)."""
        tensor, sizes = args[0], args[1:]
        sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes
        fresh = len(sizes) > tensor.dim() or (tensor.dim() > 0 and tensor.shape[0] == 1)
        if not fresh or not sizes or sizes[0] <= 0 or sizes[0] % self.n:
            return self._derive(func(*args), [tensor])  # type: ignore[no-any-return]
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
ATTENTION_ARGUMENTS = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip
ATTENTION_DEFAULTS: dict[str, Any] = dict.fromkeys(ATTENTION_ARGUMENTS) | {
    "training": True, "need_weights": True, "average_attn_weights": True, "use_separate_proj_weight": False,
}  # fmt: skip
HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: Recording.linear,
    torch.conv1d: lambda self, *a, **k: self.convolution(1, *a, **k),
    torch.conv2d: lambda self, *a, **k: self.convolution(2, *a, **k),
    torch.conv3d: lambda self, *a, **k: self.convolution(3, *a, **k),
    F.group_norm: Recording.group_norm,
    F.layer_norm: Recording.layer_norm,
    F.embedding: Recording.embedding,
    F.batch_norm: Recording.batch_norm,
    F.multi_head_attention_forward: Recording.attention,
    torch.lstm: Recording.lstm,
}


def _pull(tensor: Tensor, root: Tensor, gradients: Tensor) -> Tensor:
    """Gradients of a derived tensor [n, *tensor.shape], led back to the parameter it is computed from."""
    given = gradients.reshape(-1, *tensor.shape)
    with torch.enable_grad():
        return torch.autograd.grad(tensor, root, given, retain_graph=True, is_grads_batched=True)[0]


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)) or type(value) is type({}.values()):
            yield from _tensors(value)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _plain_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Under autocast, what it would do to a matrix product."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _full(x: Tensor) -> Tensor:
    """Under autocast, what it would do to a normalization."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
