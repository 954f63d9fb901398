"""Multi-head attention with the batch in front, so that its projections are on the tape like any Linear layer."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Project = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""An `F.linear` that is on the tape."""


def attend(project: Project, weights: list[Any], biases: list[Any], call: dict[str, Any]) -> tuple[Any, Any]:
    """What `F.multi_head_attention_forward` returns, for the arguments `call`; tensors are [length, batch, width].

    `weights`, `biases`: of the input projections; a single one is of all three, applied to the query.
    """
    heads, out_dtype = call["num_heads"], call["query"].dtype
    streams = [call[name].transpose(0, 1) for name in ("query", "key", "value")[: len(weights)]]
    projected = [project(x, w, b) for x, w, b in zip(streams, weights, biases, strict=True)]
    q, k, v = projected if len(projected) == 3 else projected[0].chunk(3, -1)
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = _mask(call, q)
    dropout = call["dropout_p"] if call["training"] else 0.0
    shares = None
    if call["need_weights"]:
        scores = q @ k.transpose(2, 3) / sqrt(q.shape[-1])
        shares = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
        mixed = shares @ v
        shares = shares.mean(1) if call["average_attn_weights"] else shares
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    mixed = mixed.transpose(1, 2).flatten(2)
    out = project(mixed, call["out_proj_weight"], call["out_proj_bias"])
    return out.transpose(0, 1).to(out_dtype), shares


def _mask(call: dict[str, Any], q: Tensor) -> Tensor | None:
    """All masks as one that is added to the scores [batch, heads, queries, keys]."""
    mask: Tensor | None = None
    if call["attn_mask"] is not None:
        given = _additive(call["attn_mask"], q.dtype)
        mask = given.unflatten(0, (len(q), -1)) if given.dim() == 3 else given[None, None]
    if call["key_padding_mask"] is not None:
        padding = _additive(call["key_padding_mask"], q.dtype)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
