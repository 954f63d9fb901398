"""Carries exchange messages between processes of one machine. Linux only.

What is small goes as datagrams between Unix sockets in a folder that only its owner can enter; snapshots go through
anonymous shared memory that the supervisor makes and every learner inherits. No other user of the machine can reach
either: names in Linux's abstract namespace would be visible to all, and free to bind while a learner restarts. The
memory vanishes with the processes; the folder is removed by the supervisor or, after its death, by the nursery.
Nothing is ever unpickled, and datagrams from other users are dropped (the kernel says who sent them).

A learner's memory: one page of words, then its slots, then the two vectors that SYNC's all-reduce uses in turn.
`sequence` says which snapshot a slot holds, and only its owner writes it; the receiver writes the same number to
`release` when it has read the slot. A slot that was never released (its reader died) is used again after a while; a
reader that was merely asleep sees that the sequence has moved on.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from adp2sgd.errors import ConfigError
from adp2sgd.exchange.protocol import MESSAGES, Message
from adp2sgd.learner import Learner
from adp2sgd.progress import from_rows, to_rows

# one exchange at a time, one whose reader has not released it yet, one for a learner that comes back, one for a look
# at θ; pages are taken only when they are written
SLOTS = 4
ROUNDS = 2
PAGE = 4096
KINDS = (*MESSAGES.values(), Message)  # a plain Message is news: step counts and nothing else
HEAD = struct.Struct("<BHHHQBQ")  # kind, sender, receiver, initiator, number, slot, sequence
COUNT = struct.Struct("<HIQ?")  # learner, start, steps, stopped
NO_SLOT = 255
LARGEST = 1 << 16  # bytes of a datagram


def require_linux() -> None:
    if sys.platform != "linux":
        raise ConfigError(f"train needs Linux (memfd, eventfd), not {sys.platform}; use simulate here")


def make_mail() -> str:
    """A new folder for a run's sockets, which no other user can enter."""
    return tempfile.mkdtemp(prefix="adp2sgd-")


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
        return PAGE + (SLOTS + ROUNDS) * self.stride

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
            for i in range(SLOTS + ROUNDS)
        ]
        self.slots, self.rounds = vectors[:SLOTS], vectors[SLOTS:]

    def sequence(self, slot: int) -> int:
        return self._words[1 + 2 * slot]

    def set_sequence(self, slot: int, value: int) -> None:
        self._words[1 + 2 * slot] = value

    def released(self, slot: int) -> int:
        return self._words[2 + 2 * slot]

    def release(self, slot: int, sequence: int) -> None:
        self._words[2 + 2 * slot] = sequence

    @property
    def open(self) -> bool:
        """Whether the owner's death now may leave a half-exchange behind."""
        return bool(self._words[0])

    @open.setter
    def open(self, value: bool) -> None:
        self._words[0] = int(value)


class Outbox:
    """The own memory: where snapshots are taken to. On a GPU `take` also keeps a copy there, for the own half."""

    def __init__(
        self, memory: Memory, learner: Learner, patience_s: float, snapshot: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """`snapshot` copies into a given tensor what is to be sent; by default the learner's state."""
        self.memory = memory
        self.slot = NO_SLOT  # of the last snapshot
        self.kept = NO_SLOT  # the own half of the exchange under way still needs this one, even if it was released
        self._state = learner.state
        self._snapshot = snapshot or learner.snapshot
        self._patience_s = patience_s
        self._taken = [-math.inf] * SLOTS
        self._device = learner.state.device
        self._staged: dict[int, Tensor] = {}
        self._stream = _pin(memory.slots, self._device)

    @property
    def free(self) -> list[int]:
        """The slots that nobody reads any more."""
        old = time.monotonic() - self._patience_s
        memory, others = self.memory, (i for i in range(SLOTS) if i != self.kept)
        return [i for i in others if self._taken[i] < old or memory.released(i) == memory.sequence(i)]

    def take(self) -> Tensor:
        """The learner's snapshot in a free slot. Look at `free` first."""
        self.slot = slot = self.free[0]
        self._taken[slot] = time.monotonic()
        self.memory.set_sequence(slot, self.memory.sequence(slot) + 1)  # a late reader notices before the first byte
        if self._stream is None:
            return self._snapshot(self.memory.slots[slot])
        return self._through_gpu(slot, self._stream)

    def take_back(self) -> None:
        """Nobody was told of the last snapshot: its slot is free at once."""
        self.memory.release(self.slot, self.memory.sequence(self.slot))

    def _through_gpu(self, slot: int, stream: torch.cuda.Stream) -> Tensor:
        """All work on the state is queued behind the training's; only this thread waits for the copy to the host."""
        if slot not in self._staged:
            self._staged[slot] = torch.empty_like(self._state)
        staged = self._snapshot(self._staged[slot])
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(stream):
            self.memory.slots[slot].copy_(staged, non_blocking=True)
        stream.synchronize()
        return staged


class Inbox:
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

    def open(self, message: Message, slot: int, sequence: int) -> Message | None:
        """The message with its snapshot; None if that has been overwritten."""
        memory = self.memory(message.sender)
        if memory.sequence(slot) != sequence:
            return None
        if self._stream is None:
            return replace(message, snapshot=memory.slots[slot], intact=lambda: memory.sequence(slot) == sequence)
        if self._arrived is None:
            self._arrived = torch.empty(self._layout.length, dtype=self._layout.dtype, device=self._device)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))  # the last exchange may still read it
        with torch.cuda.stream(self._stream):
            self._arrived.copy_(memory.slots[slot], non_blocking=True)
        self._stream.synchronize()
        return replace(message, snapshot=self._arrived) if memory.sequence(slot) == sequence else None


def _pin(slots: list[Tensor], device: torch.device) -> torch.cuda.Stream | None:
    """Make the slots reachable for the GPU's copy engines, and give a stream for them."""
    if device.type != "cuda":
        return None
    for slot in slots:
        if len(slot) and not slot.is_pinned():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), slot.nbytes, 0))
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class Datagram:
    """What arrived: an exchange message with its slot, or a note (JSON) from the supervisor."""

    message: Message | None
    slot: int = NO_SLOT
    sequence: int = 0
    note: bytes = b""


class Post:
    """This process's socket. Sending never waits: what cannot be delivered at once is lost, and the sender told."""

    def __init__(self, mail: str | Path, name: str) -> None:
        """`mail`: the folder of the run's sockets. What a process that died has left under `name` is replaced."""
        self._mail = str(mail)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        try:
            Path(self._address(name)).unlink(missing_ok=True)
            self._socket.bind(self._address(name))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"{mail} cannot hold sockets ({why}); set TMPDIR to a short path on a local disk"
            ) from None

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, to: str, data: bytes) -> bool:
        """Whether the datagram is in the receiver's queue."""
        try:
            self._socket.sendto(data, self._address(to))
        except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            if error.errno in {104, 105}:  # the receiver went away, or the kernel is short of buffers
                return False
            raise
        return True

    def receive(self) -> Iterator[bytes]:
        """All datagrams that wait, if they come from this user or root."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data, ancillary, _, _ = self._socket.recvmsg(LARGEST, socket.CMSG_SPACE(12))
                senders = [struct.unpack("3i", value)[1] for _, kind, value in ancillary if kind == 2]
                if senders and senders[0] in {0, os.getuid()}:
                    yield data

    def close(self) -> None:
        self._socket.close()

    def _address(self, name: str) -> str:
        return f"{self._mail}/{name}"


def encode(message: Message, slot: int = NO_SLOT, sequence: int = 0) -> bytes:
    """A fixed head and the step counts; the snapshot stays in its slot."""
    kind = KINDS.index(type(message))
    head = HEAD.pack(kind, message.sender, message.receiver, message.initiator, message.number, slot, sequence)
    return head + b"".join(COUNT.pack(*row) for row in to_rows(message.progress))


def decode(data: bytes) -> Datagram:
    """The reverse; whatever is not a message is a note."""
    if data[:1] == b"{":
        return Datagram(None, note=data)
    kind, sender, receiver, initiator, number, slot, sequence = HEAD.unpack_from(data)
    progress = from_rows(COUNT.iter_unpack(data[HEAD.size :]))
    message = KINDS[kind](sender=sender, receiver=receiver, initiator=initiator, number=number, progress=progress)
    return Datagram(message, slot, sequence)
