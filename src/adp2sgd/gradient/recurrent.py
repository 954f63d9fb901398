"""An LSTM whose gate gradients can be seen: the fused kernels hide them, so the recurrence is run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adp2sgd.gradient import rules

Gates = Callable[[Tensor, Tensor, Tensor], None]
"""(layer input [t, n, d], hidden states before each step [t, n, h], gate gradients [t, n, 4h]) → the tape."""


class Direction(torch.autograd.Function):
    """One direction of one layer. x [t, n, d] → hidden states [t, n, h], last hidden state, last cell state."""

    @staticmethod
    def forward(
        ctx: Any,
        emit: Gates,
        token: Tensor,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_in: Tensor,
        w_rec: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gates = torch.addmm(bias, x.reshape(-1, x.shape[2]), w_in.t()).view(len(x), -1, len(w_in))
        run = fused_steps if x.is_cuda else plain_steps
        hidden, cells, gates = run(gates, h0, c0, w_rec.t())
        ctx.emit = emit
        ctx.save_for_backward(x, gates, hidden, cells, w_in, w_rec)
        return hidden[1:].clone(), hidden[-1].clone(), cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_all: Tensor, d_last: Tensor, d_cell: Tensor) -> tuple[Any, ...]:
        x, gates, hidden, cells, w_in, w_rec = ctx.saved_tensors
        run = fused_back if x.is_cuda else plain_back
        d_gates, dh, dc = run(d_all, d_last, d_cell, gates, cells, w_rec)
        ctx.emit(x, hidden[:-1], d_gates)
        dx = d_gates @ w_in if ctx.needs_input_grad[2] else None
        return None, None, dx, dh, dc, None, None, None


def plain_steps(gates: Tensor, h0: Tensor, c0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden and cell states [t + 1, n, h], and the gates after their non-linearity (in place of the given ones)."""
    hidden = gates.new_empty(len(gates) + 1, *h0.shape)
    cells = torch.empty_like(hidden)
    hidden[0], cells[0] = h0, c0
    size = h0.shape[1]
    for t, now in enumerate(gates):
        now.addmm_(hidden[t], w)
        now[:, : 2 * size].sigmoid_()
        now[:, 2 * size : 3 * size].tanh_()
        now[:, 3 * size :].sigmoid_()
        i, f, g, o = now.chunk(4, 1)
        torch.addcmul(f * cells[t], i, g, out=cells[t + 1])
        torch.mul(o, cells[t + 1].tanh(), out=hidden[t + 1])
    return hidden, cells, gates


def fused_steps(gates: Tensor, h0: Tensor, c0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with two kernels a step."""
    hidden, cells, active = [h0.contiguous()], [c0.contiguous()], []
    for now in gates:
        h, c, gate = torch.ops.aten._thnn_fused_lstm_cell(now, hidden[-1] @ w, cells[-1])
        hidden.append(h)
        cells.append(c)
        active.append(gate.view_as(now))
    return torch.stack(hidden), torch.stack(cells), torch.stack(active)


def plain_back(
    d_all: Tensor, dh: Tensor, dc: Tensor, gates: Tensor, cells: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates before their non-linearity, of the first hidden state and of the first cell state."""
    i, f, g, o = gates.chunk(4, 2)
    tanh_c = cells[1:].tanh()
    # What does not depend on later steps is taken for all steps at once.
    through = o * (1 - tanh_c.square())
    to_o = tanh_c * o * (1 - o)
    to_others = torch.cat([g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g.square())], 2)
    d_gates = torch.empty_like(gates)
    size = dh.shape[1]
    for t in range(len(gates) - 1, -1, -1):
        dh = dh + d_all[t]
        dc = torch.addcmul(dc, dh, through[t])
        torch.mul(dc.repeat(1, 3), to_others[t], out=d_gates[t, :, : 3 * size])
        torch.mul(dh, to_o[t], out=d_gates[t, :, 3 * size :])
        dc = dc * f[t]
        dh = d_gates[t] @ w
    return d_gates, dh, dc


def fused_back(
    d_all: Tensor, dh: Tensor, dc: Tensor, gates: Tensor, cells: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with three kernels a step."""
    dc = dc.contiguous()
    found = []
    for t in range(len(gates) - 1, -1, -1):
        back = torch.ops.aten._thnn_fused_lstm_cell_backward_impl
        d_gate, dc, _ = back(dh + d_all[t], dc, cells[t], cells[t + 1], gates[t], False)
        found.append(d_gate.view_as(gates[t]))
        dh = found[-1] @ w
    return torch.stack(found[::-1]), dh, dc


def by_record(sequence: Tensor, n: int) -> Tensor:
    """[t, rows, d] → [n, t·rows/n, d]."""
    t, rows, d = sequence.shape
    return sequence.view(t, n, rows // n, d).permute(1, 0, 2, 3).reshape(n, -1, d)


def linear_uses(n: int, x: Tensor, before: Tensor, gates: Tensor) -> list[rules.Use]:
    """The uses of w_in, w_rec, b_in and b_rec of one direction: Linear layers over all steps."""
    outputs = by_record(gates, n)
    biases = rules.Kept(outputs.sum(1, dtype=torch.float64 if outputs.dtype == torch.float64 else torch.float32))
    return [rules.Linear(by_record(x, n), outputs), rules.Linear(by_record(before, n), outputs), biases, biases]
