"""Hands a Python object to a learner's process. Its tensors lie in shared memory, where the process reads them.

The supervisor alone runs a task's function and holds all records. A learner gets the task's model, loss and metric, and
its own site's records: it never sees the records of another site. Functions that no module holds (of a notebook, a
script, a test) are handed over as they are. Pickle is safe here: only the parent process writes this memory, and the
memory has no name by which anybody else could find it.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNED = 64  # bytes
COUNT = struct.Struct("<Q")


def _packer(stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> Any:
    """A pickler that keeps plain tensors out of its stream, as buffers."""
    import cloudpickle  # type: ignore[import-untyped]

    class Packer(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided:
                plain = value.detach().contiguous()
                raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
                return _tensor, (pickle.PickleBuffer(raw.data), plain.dtype, tuple(plain.shape), value.requires_grad)
            return super().reducer_override(value)

    return Packer(stream, protocol=5, buffer_callback=buffers.append)


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    view = memoryview(raw)
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    return torch.frombuffer(view, dtype=dtype).view(shape).requires_grad_(requires_grad)


def pack(value: Any) -> int:
    """Put `value` into new anonymous memory; returns its file descriptor, which other processes may inherit."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _packer(stream, buffers).dump(value)
    parts = [memoryview(stream.getbuffer()), *(buffer.raw() for buffer in buffers)]
    sizes = [part.nbytes for part in parts]
    descriptor = os.memfd_create("adp2sgd-handover")
    os.set_inheritable(descriptor, True)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(COUNT.pack(len(sizes)) + b"".join(map(COUNT.pack, sizes)))
        for part in parts:
            file.write(b"\0" * (-file.tell() % ALIGNED))
            file.write(part)
    return descriptor


def unpack(descriptor: int) -> Any:
    """What `pack` put there. Tensors share the memory until they are written to, and then have their own copy."""
    whole = memoryview(mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    (count,) = COUNT.unpack_from(whole)
    sizes = [COUNT.unpack_from(whole, COUNT.size * (1 + i))[0] for i in range(count)]
    at, parts = COUNT.size * (1 + count), []
    for size in sizes:
        at += -at % ALIGNED
        parts.append(whole[at : at + size])
        at += size
    return pickle.loads(parts[0], buffers=parts[1:])
