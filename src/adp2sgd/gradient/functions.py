"""The torch functions that have a rule, run as layers that record. Arguments are those of the functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adp2sgd.gradient import layers
from adp2sgd.gradient.attention import attend
from adp2sgd.gradient.convolution import Geometry
from adp2sgd.gradient.recurrent import Direction, linear_uses
from adp2sgd.gradient.rules import UnsupportedError

if TYPE_CHECKING:
    from adp2sgd.gradient.tape import Tape


def linear(tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    emit, emit_bias = tape.emitter(weight), tape.emitter(bias)
    x, w, b = _cast(input, weight, bias)
    if emit is None and emit_bias is None:
        return F.linear(x, w, b)
    return tape.run(layers.LinearLayer(tape.n, _plain(w), _plain_or_none(b), emit, emit_bias), x)


def turned_linear(tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input · weight + bias: the weight is [inputs, outputs], as in GPT-2."""
    if bias is not None and bias.dim() != 1:
        raise UnsupportedError("addmm of a matrix that is added has no rule")
    emit, emit_bias = tape.emitter(weight), tape.emitter(bias)
    x, w, b = _cast(input, weight, bias)
    return tape.run(layers.LinearLayer(tape.n, _plain(w), _plain_or_none(b), emit, emit_bias, turned=True), x)


def rms_norm(
    tape: Tape, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    emit = tape.emitter(weight)
    normal = F.rms_norm(_full(input), normalized_shape, None if emit else weight, eps)
    if not emit:
        return normal
    return tape.run(layers.ScaleLayer(tape.n, _plain(weight), emit), normal)  # type: ignore[arg-type]


def instance_norm(
    tape: Tape, input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise UnsupportedError("instance_norm with running statistics has no rule")
    return group_norm(tape, input, input.shape[1], weight, bias, eps)


def convolution(
    tape: Tape,
    axes: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    kernel, steps = tuple(weight.shape[2:]), _each(dilation, axes)
    x = input
    if input.dim() != axes + 2:
        raise UnsupportedError(f"a convolution reads a tensor of shape {list(input.shape)} without records in front")
    if padding == "same":
        both = [d * (k - 1) for k, d in zip(kernel, steps, strict=True)]
        x = F.pad(x, [a for b in reversed(both) for a in (0, b % 2)])
        padding = [b // 2 for b in both]
    padding = 0 if padding == "valid" else padding
    geometry = Geometry(kernel, _each(stride, axes), _each(padding, axes), steps, groups)
    emit, emit_bias = tape.emitter(weight), tape.emitter(bias)
    x, w, b = _cast(x, weight, bias)
    layer = layers.ConvolutionLayer(tape.n, _plain(w), _plain_or_none(b), geometry, emit, emit_bias)
    return tape.run(layer, x) if emit or emit_bias else layer.forward(x)[0]


def group_norm(
    tape: Tape,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    emits = [tape.emitter(weight), tape.emitter(bias)]
    if not any(emits):
        return F.group_norm(_full(input), num_groups, weight, bias, eps)
    fused = layers.FusedGroupNorm.takes(input, num_groups, weight, bias)
    kind: Any = layers.FusedGroupNorm if fused else layers.GroupNormLayer
    layer = kind(tape.n, num_groups, _plain_or_none(weight), _plain_or_none(bias), eps, emits)
    return tape.run(layer, input if fused else _full(input))


def layer_norm(
    tape: Tape,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    emits = [tape.emitter(weight), tape.emitter(bias)]
    x = _full(input)
    if not any(emits):
        return F.layer_norm(x, normalized_shape, weight, bias, eps)
    shape = list(normalized_shape)
    layer = layers.LayerNormLayer(tape.n, shape, _plain_or_none(weight), _plain_or_none(bias), eps, emits)
    return tape.run(layer, x)


def embedding(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedError("an embedding with max_norm or scale_grad_by_freq couples records")
    emit = tape.emitter(weight)
    if emit is None:
        return F.embedding(input, weight)
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else len(weight) + padding_idx
    return tape.run(layers.EmbeddingLayer(tape.n, _plain(weight), padding, emit), input)


def lstm(tape: Tape, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if len(args) != 9 or not isinstance(args[2], (list, tuple)) or args[0].dim() != 3:
        raise UnsupportedError("an LSTM over packed or unbatched sequences has no rule")
    x, (h0, c0), flat, has_bias, count, dropout, training, both, batch_first = args
    if any(id(t) in tape.sources for t in (x, h0, c0)):
        raise UnsupportedError("an LSTM whose first state is trained has no rule")
    size = 4 if has_bias else 2
    ends: list[tuple[Tensor, Tensor]] = []
    x = x.transpose(0, 1) if batch_first else x
    if x.shape[1] % tape.n or len(flat) != size * count * (1 + both):
        raise UnsupportedError("an LSTM with projections, or whose rows do not divide into records, has no rule")
    for layer in range(count):
        sides = []
        for side in range(1 + both):
            at = layer * (1 + both) + side
            out, *end = _direction(tape, x.flip(0) if side else x, h0[at], c0[at], flat[at * size : (at + 1) * size])
            ends.append((end[0], end[1]))
            sides.append(out.flip(0) if side else out)
        x = torch.cat(sides, 2)
        if dropout and training and layer < count - 1:
            x = F.dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends])


def _direction(tape: Tape, x: Tensor, h0: Tensor, c0: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    emits = [tape.emitter(w) for w in weights]

    def emit(x: Tensor, before: Tensor, gates: Tensor) -> None:
        for to, use in zip(emits, linear_uses(tape.n, x, before, gates), strict=False):
            if to:
                to(use)

    plain = [_plain(w) for w in weights]
    bias = plain[2] + plain[3] if len(plain) == 4 else plain[0].new_zeros(len(plain[0]))
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else bias.dtype
    given = (t.to(dtype) for t in (x, h0, c0, plain[0], plain[1], bias))
    with torch.autocast(kind, enabled=False):
        out = Direction.apply(emit, tape.token, *given)  # type: ignore[no-untyped-call]
    return out[0], out[1], out[2]


def attention(tape: Tape, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
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
        weights = _pieces(tape, call["in_proj_weight"])
    bias = call["in_proj_bias"]
    biases = [None] * len(weights) if bias is None else [bias] if len(weights) == 1 else _pieces(tape, bias)
    return attend(partial(linear, tape), weights, biases, call)


def _pieces(tape: Tape, tensor: Tensor) -> list[Tensor]:
    with tape:
        return list(tensor.chunk(3))


def batch_norm(tape: Tape, *args: Any, **kwargs: Any) -> Tensor:
    raise UnsupportedError("batch_norm has no rule")


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
    F.linear: linear,
    torch.conv1d: lambda tape, *a, **k: convolution(tape, 1, *a, **k),
    torch.conv2d: lambda tape, *a, **k: convolution(tape, 2, *a, **k),
    torch.conv3d: lambda tape, *a, **k: convolution(tape, 3, *a, **k),
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.instance_norm: instance_norm,
    F.embedding: embedding,
    F.batch_norm: batch_norm,
    F.multi_head_attention_forward: attention,
    torch.lstm: lstm,
}


SHARING = (F.embedding, F.linear, F.layer_norm)
"""Layers that may also read constants and parameters alone: their result is then computed once for all records."""


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
