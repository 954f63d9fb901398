"""Carries exchange messages between processes of one machine. Linux only.

Small messages go as datagrams between Unix sockets in a folder that only its owner can enter. Snapshots go through
anonymous shared memory that the supervisor makes and every learner inherits (`slots.py`). No other user of the machine
can reach either. The memory vanishes with the processes; the folder is removed by the supervisor or, after its death,
by the fork server. Nothing is ever unpickled. The kernel says which user sent a datagram and from which socket:
datagrams of other users, and those with a false sender, are dropped.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from adp2sgd.errors import ConfigError
from adp2sgd.exchange.protocol import MESSAGES, Message
from adp2sgd.exchange.slots import LOOK, Layout, Memory, Peers, Receipt, Slots
from adp2sgd.learner import Learner
from adp2sgd.progress import from_rows, to_rows

KINDS = (*MESSAGES.values(), Message)
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

    def receive(self) -> Iterator[tuple[str, bytes]]:
        """All datagrams that wait and come from this user or root, each with the name of the socket that sent it."""
        prefix = self._address("")
        with contextlib.suppress(BlockingIOError):
            while True:
                data, ancillary, _, address = self._socket.recvmsg(LARGEST, socket.CMSG_SPACE(12))
                users = [struct.unpack("3i", value)[1] for _, kind, value in ancillary if kind == 2]
                ours = isinstance(address, str) and address.startswith(prefix)
                if ours and users and users[0] in {0, os.getuid()}:
                    yield address[len(prefix) :], data

    def close(self) -> None:
        self._socket.close()

    def _address(self, name: str) -> str:
        return f"{self._mail}/{name}"


class SharedCarrier:
    """One learner's end, in its own process. It holds the learner's socket and maps the memories of its partners."""

    def __init__(
        self,
        learner: Learner,
        post: Post,
        descriptors: list[int],
        *,
        snapshot: Callable[[Tensor], Tensor] | None = None,
        shown: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`snapshot` copies into a given tensor what other learners are to see, and `shown` what the supervisor is to
        evaluate; by default both are the learner's state."""
        self.layout = Layout(len(learner.state), learner.state.dtype)
        self.memory = Memory(descriptors[learner.number], self.layout)
        snapshot = snapshot or learner.snapshot
        self._slots = Slots(self.memory, learner.state, snapshot, 4 * self.layout.deadline_s)
        self._shown = shown or snapshot
        self._peers = Peers(descriptors, self.layout, learner.state.device)
        self._post = post
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for source in (post.fileno(), self._bell):
            self._poll.register(source, select.POLLIN)

    def meet(self, partner: int) -> None:
        """Map the partner's memory now, which takes long on a GPU."""
        self._peers.memory(partner)

    def show(self) -> int:
        """Put the learner's model into the slot that the supervisor reads; returns its sequence number.

        This is no message. It may be called beside the exchange thread, by one thread at a time.
        """
        sequence = self.memory.sequence(LOOK) + 1
        self.memory.set_sequence(LOOK, sequence)
        self._slots.copy_to(LOOK, self._shown)
        return sequence

    @property
    def room(self) -> int:
        return len(self._slots.free)

    def take(self) -> Tensor:
        return self._slots.take()

    def free(self, snapshot: Tensor) -> None:
        self._slots.done(snapshot)

    def send(self, message: Message) -> bool:
        if message.snapshot is None:
            return self._post.send(str(message.receiver), encode(message))
        slot = self._slots.slot_of(message.snapshot)
        sent = self._post.send(str(message.receiver), encode(message, slot, self.memory.sequence(slot)))
        if not sent:
            self._slots.take_back(slot)
        return sent

    def receive(self, timeout_s: float) -> Sequence[Message]:
        ready = {descriptor for descriptor, _ in self._poll.poll(1000 * timeout_s)}
        if self._bell in ready:
            os.eventfd_read(self._bell)
        if self._post.fileno() not in ready:
            return []
        messages = (self._opened(sender, data) for sender, data in self._post.receive())
        return [message for message in messages if message is not None]

    def release(self, message: Message) -> None:
        if isinstance(message.receipt, Receipt):
            message.receipt.memory.release(message.receipt.slot, message.receipt.sequence)

    def expose(self, exposed: bool) -> None:
        self.memory.exposed = exposed

    def deadline_s(self, partner: int) -> float:
        return self.layout.deadline_s

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        self._post.close()
        os.close(self._bell)

    def _opened(self, sender: str, data: bytes) -> Message | None:
        try:
            message, slot, sequence = decode(data)
        except (struct.error, IndexError):
            return None
        if sender != str(message.sender):
            return None
        return message if slot == NO_SLOT else self._peers.opened(message, slot, sequence)


def encode(message: Message, slot: int = NO_SLOT, sequence: int = 0) -> bytes:
    """A fixed head and the step counts; the snapshot stays in its slot."""
    kind = KINDS.index(type(message))
    head = HEAD.pack(kind, message.sender, message.receiver, message.initiator, message.number, slot, sequence)
    return head + b"".join(COUNT.pack(*row) for row in to_rows(message.progress))


def decode(data: bytes) -> tuple[Message, int, int]:
    """The reverse: message, slot, sequence. Raises struct.error or IndexError for anything else."""
    kind, sender, receiver, initiator, number, slot, sequence = HEAD.unpack_from(data)
    progress = from_rows(COUNT.iter_unpack(data[HEAD.size :]))
    message = KINDS[kind](sender=sender, receiver=receiver, initiator=initiator, number=number, progress=progress)
    return message, slot, sequence
