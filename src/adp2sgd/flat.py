"""A model as one vector: exchange, averaging, noise, update and checkpoint are then single vector operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adp2sgd.errors import ConfigError

ALIGNED = 4  # numbers, 16 bytes of float32: a GPU's kernels read so many at once, some fail on what starts elsewhere


@dataclass(frozen=True)
class Slice:
    """Where one parameter or buffer lies in the vector."""

    name: str
    start: int
    end: int
    shape: torch.Size


class FlatModel:
    """A module whose trainable parameters are views into the vector `weights`, its float buffers views into `buffers`.

    Tied parameters appear once. Frozen parameters and integer buffers keep their own storage and never travel.
    Gradients of a plain backward pass accumulate in the vector `grad`.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self.module = module.to(device)
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        self.weights, self.slices = _pack({name: p.detach() for name, p in parameters.items()}, device)
        self.buffers, self.buffer_slices = _pack(buffers, device, self.weights.dtype)
        if self.weights.dtype != self.buffers.dtype:  # they travel as one vector
            raise ConfigError(
                f"the model's parameters are {self.weights.dtype}, its buffers {self.buffers.dtype}; give all one dtype"
            )
        self.grad = torch.zeros_like(self.weights)
        for piece in self.slices:
            parameter = parameters[piece.name]
            parameter.data = self.weights[piece.start : piece.end].view(piece.shape)
            parameter.grad = self.grad[piece.start : piece.end].view(piece.shape)
        for piece in self.buffer_slices:
            buffers[piece.name].data = self.buffers[piece.start : piece.end].view(piece.shape)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def load(self, state: Tensor) -> None:
        """Take the weights, then the float buffers, of `state`; in private mode buffers are constants, not in it."""
        self.weights.copy_(state[: len(self.weights)])
        if len(state) > len(self.weights):
            self.buffers.copy_(state[len(self.weights) :])

    def named_views(self, vector: Tensor) -> dict[str, Tensor]:
        """The pieces of `vector` (laid out like `weights`) by parameter name, as views."""
        return {piece.name: vector[piece.start : piece.end].view(piece.shape) for piece in self.slices}


def _pack(
    tensors: dict[str, Tensor], device: torch.device | str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, tuple[Slice, ...]]:
    """The tensors one after the other; those of an odd size last, so that all others are aligned."""
    slices, start = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].numel() % ALIGNED != 0):
        slices.append(Slice(name, start, start + tensor.numel(), tensor.shape))
        start += tensor.numel()
    dtypes = {tensor.dtype for tensor in tensors.values()} or {dtype}
    if len(dtypes) > 1:
        raise ConfigError(f"the model mixes {sorted(map(str, dtypes))}; give all its parameters one dtype")
    vector = torch.empty(start, dtype=dtypes.pop(), device=device)
    for piece in slices:
        vector[piece.start : piece.end].copy_(tensors[piece.name].reshape(-1))
    return vector, tuple(slices)
