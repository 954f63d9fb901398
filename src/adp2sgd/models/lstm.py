"""The bidirectional LSTM acoustic model: frames of speech features → scores of context-dependent phone states."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def lstm(
    *, inputs: int = 260, classes: int = 32_000, hidden: int = 512, layers: int = 6, projection: int = 256
) -> nn.Module:
    """[n, frames, inputs] → [n, frames, classes]; `hidden` cells per direction and layer; 43,154,944 parameters."""
    return nn.Sequential(
        BidirectionalLSTM(inputs, hidden, layers), nn.Linear(2 * hidden, projection), nn.Linear(projection, classes)
    )


class BidirectionalLSTM(nn.Module):
    """[n, frames, inputs] → [n, frames, 2·hidden], forward and backward states side by side.

    PyTorch's fused kernels write in place, which `torch.func` cannot follow; under its transforms the same recurrence
    is computed frame by frame from the same parameters.
    """

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.fused = LayersInPlace(inputs, hidden, layers, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        if _transformed(x) or _transformed(next(self.parameters())):
            return self.unrolled(x)
        out: Tensor = self.fused(x)[0]
        return out

    def unrolled(self, x: Tensor) -> Tensor:
        """The same function without in-place operations; slower."""
        for layer in range(self.fused.num_layers):
            forwards = _direction(x, *self._weights(f"l{layer}"))
            backwards = _direction(x.flip(1), *self._weights(f"l{layer}_reverse")).flip(1)
            x = torch.cat((forwards, backwards), dim=2)
        return x

    def _weights(self, suffix: str) -> list[Tensor]:
        return [getattr(self.fused, f"{kind}_{suffix}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


class LayersInPlace(nn.LSTM):
    """An LSTM that leaves its weights where they are."""

    def flatten_parameters(self) -> None:
        """Nothing: moving the weights to a buffer of their own, as cuDNN likes, would cut a `FlatModel`'s views."""


def _direction(x: Tensor, w_input: Tensor, w_hidden: Tensor, b_input: Tensor, b_hidden: Tensor) -> Tensor:
    """One direction of one layer. PyTorch's order of the gates: input, forget, cell, output."""
    frames = linear(x, w_input, b_input + b_hidden).unbind(1)  # all frames in one product
    state = cell = torch.zeros_like(frames[0][:, : w_hidden.shape[1]])
    states = []
    for frame in frames:
        enter, keep, new, leave = (frame + linear(state, w_hidden)).chunk(4, dim=1)
        cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
        state = leave.sigmoid() * cell.tanh()
        states.append(state)
    return torch.stack(states, dim=1)


def _transformed(tensor: Tensor) -> bool:
    """Whether a `torch.func` transform (vmap, grad) is at work on the tensor. PyTorch has no public question for it."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
