"""An LSTM whose gate gradients can be seen: the fused kernels hide them, so the recurrence is run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adp2sgd.gradient import rules

Gates = Callable[[Tensor, Tensor, Tensor], None]
"""(layer input [t, n, d], hidden states before each step [t, n, h], gate gradients [t, n, 4h]) → recorded."""


class Direction(torch.autograd.Function):
    """One direction of one layer. x [t, n, d] → hidden states [t, n, h], last hidden state, last cell state."""

    @staticmethod
    def forward(
        ctx: Any, emit: Gates, token: Tensor, x: Tensor, h0: Tensor, c0: Tensor, w_in: Tensor, w_rec: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, rows = x.shape[:2]
        size = h0.shape[-1]
        gates = torch.addmm(bias, x.reshape(steps * rows, -1), w_in.t()).view(steps, rows, 4 * size)
        hidden, cells = x.new_empty(steps + 1, rows, size), x.new_empty(steps + 1, rows, size)
        hidden[0], cells[0] = h0, c0
        for t in range(steps):
            now = gates[t].addmm_(hidden[t], w_rec.t())
            now[:, : 2 * size].sigmoid_()
            now[:, 2 * size : 3 * size].tanh_()
            now[:, 3 * size :].sigmoid_()
            i, f, g, o = now.chunk(4, 1)
            torch.addcmul(f * cells[t], i, g, out=cells[t + 1])
            torch.mul(o, cells[t + 1].tanh(), out=hidden[t + 1])
        ctx.emit = emit
        ctx.save_for_backward(x, gates, hidden, cells, w_in, w_rec)
        return hidden[1:].clone(), hidden[-1].clone(), cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_all: Tensor, d_last: Tensor, d_cell: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, gates, hidden, cells, w_in, w_rec = ctx.saved_tensors
        i, f, g, o = gates.chunk(4, 2)
        tanh_c = cells[1:].tanh()
        # Everything that does not depend on the later steps is taken for all steps at once.
        through = o * (1 - tanh_c.square())
        to_i, to_f, to_g = g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g.square())
        to_o = tanh_c * o * (1 - o)
        dh, dc = d_last.clone(), d_cell.clone()
        d_gates = torch.empty_like(gates)
        for t in range(len(x) - 1, -1, -1):
            dh = dh + d_all[t]
            dc = torch.addcmul(dc, dh, through[t])
            at = d_gates[t].chunk(4, 1)
            torch.mul(dc, to_i[t], out=at[0])
            torch.mul(dc, to_f[t], out=at[1])
            torch.mul(dc, to_g[t], out=at[2])
            torch.mul(dh, to_o[t], out=at[3])
            dc = dc * f[t]
            dh = d_gates[t] @ w_rec
        ctx.emit(x, hidden[:-1], d_gates)
        dx = d_gates @ w_in if ctx.needs_input_grad[2] else None
        return None, None, dx, dh, dc, None, None, None


def by_record(sequence: Tensor, n: int) -> Tensor:
    """[t, rows, d] → [n, t·rows/n, d]."""
    t, rows, d = sequence.shape
    return sequence.view(t, n, rows // n, d).permute(1, 0, 2, 3).reshape(n, -1, d)


def linear_uses(n: int, x: Tensor, before: Tensor, gates: Tensor) -> list[rules.Use]:
    """The uses of w_in, w_rec, b_in and b_rec of one direction: Linear layers over all steps."""
    outputs = by_record(gates, n)
    biases = rules.Kept(outputs.sum(1))
    return [rules.Linear(by_record(x, n), outputs), rules.Linear(by_record(before, n), outputs), biases, biases]
