"""How a device is used: the one place for torch's switches, layouts and captured CUDA graphs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from adp2sgd import tree

AUTOCAST: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""`Config.precision` → the type that layers run in; weights, sums, noise and updates stay as they are."""

SETTLED = 3  # batches of a shape before its step is captured: kernels are chosen and memory is warm by then
MOST_GRAPHS = 12
KEPT_BYTES = 256 << 20


def tune(device: torch.device, precision: str, *, private: bool = False, padded: bool = False) -> None:
    """Set torch's switches for a run. bfloat16 asks for speed: measured kernels, and TF32 where float32 remains.

    Where steps are `padded` kernels are not measured: each thread would do so anew, while the clock runs.
    Private mode never uses TF32: a norm and a sum of operands rounded to 11 bits may disagree, and clipping with them.
    """
    keep_memory()
    fast = device.type == "cuda" and precision == "bfloat16"
    torch.backends.cudnn.benchmark = fast and not padded
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if fast and not private else "highest")
        torch.backends.cudnn.allow_tf32 = not private


def keep_memory() -> None:
    """Have the C library keep up to `KEPT_BYTES` of freed memory for the next step: the kernel would clear the same
    pages in every step, which takes a tenth of a small CNN's. Does nothing where that library is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at most this
        library.mallopt(-1, KEPT_BYTES)  # M_TRIM_THRESHOLD


def keep_large_blocks() -> None:
    """From now on keep freed blocks of more than 32 MiB too, which the C library else takes from the kernel anew.

    For when the records are loaded: what steps allocate comes again in every step. With a model of 40 MiB a step then
    takes half the CPU time (benchmarks/engine.py, `rate_with_exchange`).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX


def precision_on(device: torch.device) -> str:
    """The `Config.precision` that studies use: bfloat16 where the device is made for it."""
    return "bfloat16" if device.type == "cuda" else "float32"


def can_compile(device: torch.device) -> bool:
    """Whether kernels can be made for this device: a GPU, Triton, and a C compiler for its launchers."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None and shutil.which("cc") is not None


def laid_out(inputs: Tensor) -> Tensor:
    """Images on a GPU with their channels last, which its matrix units read; everything else as it is."""
    if inputs.is_cuda and inputs.dim() == 4:
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs


def move(rows: Tensor, device: torch.device) -> Tensor:
    """`rows` on the device, without making the host wait for the work that the GPU still has."""
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)


class CapturedGraphs:
    """`work(*given)` as CUDA graphs, one for each shape of what it is given (tensors or trees): hundreds of kernels
    by one launch.

    `work` may only touch memory that stays where it is, and must do the same at every call. A shape is captured once
    it has come `SETTLED` times; on a CPU, for further shapes after `MOST_GRAPHS`, and where capturing fails, `work`
    is simply called. A result is overwritten by the next call.
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self._seen: Counter[Any] = Counter()
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, tuple[Any, ...], Any]] = {}
        self._pool: Any = None
        self._failed = False

    def __call__(self, *given: Any) -> Any:
        first = tree.tensors(given[0])[0]
        if not first.is_cuda or self._failed:
            return self._work(*given)
        with torch.cuda.device(first.device):  # on another one the captured graph would be empty
            return self._replayed(given)

    def _replayed(self, trees: tuple[Any, ...]) -> Any:
        tensors = [tensor for part in trees for tensor in tree.tensors(part)]
        shape = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if shape not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] <= SETTLED or len(self._graphs) >= MOST_GRAPHS or not self._capture(shape, trees):
                return self._work(*trees)
        graph, given, result = self._graphs[shape]
        places = [place for part in given for place in tree.tensors(part)]
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        graph.replay()
        return result

    def _capture(self, shape: Any, trees: tuple[Any, ...]) -> bool:
        given = tuple(tree.each(Tensor.clone, part) for part in trees)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()  # one after the other, they share their memory
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others may use the GPU
                result = self._work(*given)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # torch stays on the stream of the capture
            self._failed = True
            warnings.warn(f"steps are not captured as a CUDA graph: {str(error).splitlines()[0]}", stacklevel=4)
            return False
        self._graphs[shape] = (graph, given, result)
        return True


def compiled(module: nn.Module, *, fixed: bool) -> Callable[[Tensor], Tensor]:
    """The module fused by torch.compile; `fixed`: all batches have one size, and another one is compiled on its own."""
    # All classifiers share one `forward`, whose compiled forms torch would otherwise stop making at the eighth.
    torch._dynamo.config.recompile_limit = 64
    made: Callable[[Tensor], Tensor] = torch.compile(module, dynamic=False if fixed else None)
    return made


def let_go() -> None:
    """Free what a finished run held: its parts refer to each other, and a GPU has no room to wait for the collector."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def repeatable(module: nn.Module, loss: Callable[..., Any]) -> bool:
    """Whether model and loss do the same at every call, so that they may be captured: known of torch's and of ours.
    Code that chooses in Python (by `random`, say) does not; a module or function may say that it does by an attribute
    `repeatable = True`."""
    return all(_known(type(part)) or getattr(part, "repeatable", False) for part in module.modules()) and (
        _known(loss) or _known(type(loss)) or getattr(loss, "repeatable", False)
    )


def draws(module: nn.Module) -> bool:
    """Whether layers may take random numbers: dropout does, and of code that is not torch's or ours nobody knows."""
    layers = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
    return any(
        not _known(type(part)) or isinstance(part, layers) or getattr(part, "dropout", 0.0) != 0.0
        for part in module.modules()
    )


def _known(thing: Any) -> bool:
    return getattr(thing, "__module__", "").partition(".")[0] in ("torch", "adp2sgd")
