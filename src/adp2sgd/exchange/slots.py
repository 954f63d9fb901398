"""Snapshots in shared memory: who writes a slot, who reads it, and when it may be used again.

A learner's memory is one page of words, then its slots, then the vectors of SYNC's all-reduce. `sequence` says which
snapshot a slot holds, and only its owner writes it; the receiver writes the same number to `release` when it has read
the slot. A slot that was never released (its reader died) is used again after a while; a reader that was merely asleep
sees that the sequence has moved on.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adp2sgd.exchange.protocol import Message

# one exchange at a time, one whose reader has not released it yet, one for a learner that comes back, one to spare;
# pages are taken only when they are written
SLOTS = 4
LOOK = SLOTS  # one more slot, for the supervisor: looks at θ, and the last model
ROUNDS = 2  # vectors that SYNC's all-reduce uses in turn
PAGE = 4096


@dataclass(frozen=True)
class Layout:
    """How a learner's shared memory is laid out; the same for all."""

    length: int
    dtype: torch.dtype

    @property
    def stride(self) -> int:
        return math.ceil(self.length * self.dtype.itemsize / PAGE) * PAGE

    @property
    def deadline_s(self) -> float:
        """How long an answer with a snapshot may take."""
        return 1.0 + self.stride / 100e6

    @property
    def size(self) -> int:
        return PAGE + (SLOTS + 1 + ROUNDS) * self.stride

    def create(self, learner: int) -> int:
        """The file descriptor of new, anonymous memory; its pages are taken only when they are written."""
        descriptor = os.memfd_create(f"adp2sgd-{learner}")
        os.ftruncate(descriptor, self.size)
        os.set_inheritable(descriptor, True)
        return descriptor


class Memory:
    """One learner's words and slots, mapped into this process."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self._map = mmap.mmap(descriptor, layout.size)
        self._words = memoryview(self._map)[:PAGE].cast("Q")
        vectors = [
            torch.frombuffer(self._map, dtype=layout.dtype, count=layout.length, offset=PAGE + i * layout.stride)
            if layout.length
            else torch.empty(0, dtype=layout.dtype)
            for i in range(SLOTS + 1 + ROUNDS)
        ]
        self.slots, self.rounds = vectors[: SLOTS + 1], vectors[SLOTS + 1 :]

    def sequence(self, slot: int) -> int:
        return self._words[1 + 2 * slot]

    def set_sequence(self, slot: int, value: int) -> None:
        self._words[1 + 2 * slot] = value

    def released(self, slot: int) -> int:
        return self._words[2 + 2 * slot]

    def release(self, slot: int, sequence: int) -> None:
        self._words[2 + 2 * slot] = sequence

    @property
    def exposed(self) -> bool:
        """Whether the owner's death now may leave a half-exchange behind."""
        return bool(self._words[0])

    @exposed.setter
    def exposed(self, value: bool) -> None:
        self._words[0] = int(value)


class Slots:
    """The own memory: where snapshots are taken to. On a GPU `take` also keeps a copy there, for the own half."""

    def __init__(self, memory: Memory, state: Tensor, snapshot: Callable[[Tensor], Tensor], patience_s: float) -> None:
        """`snapshot` copies into a given tensor what is to be sent."""
        self.memory = memory
        self._state = state
        self._snapshot = snapshot
        self._patience_s = patience_s
        self._taken = [-math.inf] * SLOTS
        self._needed: dict[int, int] = {}  # the address of a snapshot that this side still needs → its slot
        self._staged: dict[int, Tensor] = {}
        self._stream = _pin(memory.slots, state.device)

    @property
    def free(self) -> list[int]:
        """The slots that nobody reads any more."""
        old = time.monotonic() - self._patience_s
        memory, others = self.memory, (i for i in range(SLOTS) if i not in self._needed.values())
        return [i for i in others if self._taken[i] < old or memory.released(i) == memory.sequence(i)]

    def take(self) -> Tensor:
        """A snapshot in a free slot. Look at `free` first."""
        slot = self.free[0]
        self._taken[slot] = time.monotonic()
        self.memory.set_sequence(slot, self.memory.sequence(slot) + 1)  # a late reader notices before the first byte
        taken = self.copy_to(slot)
        self._needed[taken.data_ptr()] = slot
        return taken

    def copy_to(self, slot: int, snapshot: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Fill the slot by `snapshot`, or by that of the exchanges."""
        snapshot = snapshot or self._snapshot
        if self._stream is None:
            return snapshot(self.memory.slots[slot])
        return self._through_gpu(slot, self._stream, snapshot)

    def slot_of(self, snapshot: Tensor) -> int:
        return self._needed[snapshot.data_ptr()]

    def done(self, snapshot: Tensor) -> None:
        """This side no longer needs the snapshot."""
        self._needed.pop(snapshot.data_ptr(), None)

    def take_back(self, slot: int) -> None:
        """Nobody was told of this snapshot: only this side may still need it."""
        self.memory.release(slot, self.memory.sequence(slot))

    def _through_gpu(self, slot: int, stream: torch.cuda.Stream, snapshot: Callable[[Tensor], Tensor]) -> Tensor:
        """All work on the state is queued behind the training's; only this thread waits for the copy to the host."""
        if slot not in self._staged:
            self._staged[slot] = torch.empty_like(self._state)
        staged = snapshot(self._staged[slot])
        stream.wait_stream(torch.cuda.default_stream(self._state.device))
        with torch.cuda.stream(stream):
            self.memory.slots[slot].copy_(staged, non_blocking=True)
        stream.synchronize()
        return staged


@dataclass(frozen=True)
class Receipt:
    """Where a received snapshot lies."""

    memory: Memory
    slot: int
    sequence: int

    @property
    def intact(self) -> bool:
        return self.memory.sequence(self.slot) == self.sequence


class Peers:
    """The others' memories: where snapshots are read from."""

    def __init__(self, descriptors: list[int], layout: Layout, device: torch.device) -> None:
        self._descriptors = descriptors
        self._layout = layout
        self._device = device
        self._memories: dict[int, Memory] = {}
        self._stream: torch.cuda.Stream | None = None
        self._arrived: Tensor | None = None

    def memory(self, learner: int) -> Memory:
        if learner not in self._memories:
            memory = self._memories[learner] = Memory(self._descriptors[learner], self._layout)
            self._stream = _pin(memory.slots, self._device) or self._stream
        return self._memories[learner]

    def opened(self, message: Message, slot: int, sequence: int) -> Message | None:
        """The message with its snapshot; None if that has been overwritten."""
        memory = self.memory(message.sender)
        receipt = Receipt(memory, slot, sequence)
        if not receipt.intact:
            return None
        if self._stream is None:
            return replace(message, snapshot=memory.slots[slot], receipt=receipt, intact=lambda: receipt.intact)
        if self._arrived is None:
            self._arrived = torch.empty(self._layout.length, dtype=self._layout.dtype, device=self._device)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))  # the last exchange may still read it
        with torch.cuda.stream(self._stream):
            self._arrived.copy_(memory.slots[slot], non_blocking=True)
        self._stream.synchronize()
        return replace(message, snapshot=self._arrived, receipt=receipt) if receipt.intact else None


def _pin(slots: list[Tensor], device: torch.device) -> torch.cuda.Stream | None:
    """Make the slots reachable for the GPU's copy engines, and give a stream for them."""
    if device.type != "cuda":
        return None
    for slot in slots:
        if len(slot) and not slot.is_pinned():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), slot.nbytes, 0))
    return torch.cuda.Stream(device)
