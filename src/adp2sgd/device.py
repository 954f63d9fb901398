"""How a device is used: the one place for torch's switches, layouts and recorded steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

AUTOCAST: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""`Config.precision` → the type that layers run in; weights, sums, noise and updates stay as they are."""

SETTLED = 3  # equal batches in a row before a step is recorded: kernels are chosen and memory is warm by then


def tune(device: torch.device, precision: str, *, private: bool = False) -> None:
    """Set torch's switches for a run. bfloat16 asks for speed: measured kernels, and TF32 where float32 remains.

    Private mode never uses TF32: a norm and a sum of operands rounded to 11 bits may disagree, and clipping with them.
    """
    fast = device.type == "cuda" and precision == "bfloat16"
    torch.backends.cudnn.benchmark = fast
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if fast and not private else "highest")
        torch.backends.cudnn.allow_tf32 = not private


def laid_out(inputs: Tensor) -> Tensor:
    """Images on a GPU with their channels last, which its matrix units read; everything else as it is."""
    if inputs.is_cuda and inputs.dim() == 4:
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs


def move(rows: Tensor, device: torch.device) -> Tensor:
    """`rows` on the device, without making the host wait for the work that the GPU still has."""
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)


class Recorded:
    """`work(inputs, targets)` as a CUDA graph: hundreds of kernels by one launch.

    `work` may only touch memory that stays where it is. It is recorded once `SETTLED` batches of one shape came in a
    row; on a CPU, for any other shape, and where recording fails, it is simply called.
    """

    def __init__(self, work: Callable[[Tensor, Tensor], None]) -> None:
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs = self._targets = torch.empty(0)
        self._equal = 0
        self._failed = False

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        same = inputs.shape == self._inputs.shape and targets.shape == self._targets.shape
        if self._graph is None and inputs.is_cuda and not self._failed:
            self._equal = self._equal + 1 if same else 0
            if self._equal >= SETTLED:
                self._record(inputs, targets)
            else:
                self._inputs, self._targets = inputs, targets
        if self._graph is None or not same:
            self._work(inputs, targets)
            return
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()

    def _record(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may use the GPU meanwhile
                self._work(self._inputs, self._targets)
        except RuntimeError as error:
            self._failed = True
            warnings.warn(f"steps are not recorded as a CUDA graph: {str(error).splitlines()[0]}", stacklevel=3)
        else:
            self._graph = graph
