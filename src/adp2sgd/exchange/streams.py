"""Snapshots on their way over one link: memory that is used again, parts that leave, parts that arrive.

On the wire numbers may be shorter than in the learner (bfloat16). A snapshot is rounded when it is taken, so the
conversion of each part is exact and both sides of an exchange use equal numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adp2sgd.errors import RefusedError
from adp2sgd.exchange import wire
from adp2sgd.exchange.protocol import Message
from adp2sgd.learner import Learner

SNAPSHOTS = 4  # two exchanges at once, a copy for a site that comes back, and one to spare
KEPT = 2  # spare vectors that stay allocated
BLOCK = 1 << 18  # numbers that are rounded at a time


class Vectors:
    """Model-sized vectors in host memory, used again; `most` at a time. Callable from any thread."""

    def __init__(self, like: Tensor, most: int) -> None:
        self.length, self.dtype = len(like), like.dtype
        self._most = most
        self._spare: list[Tensor] = []
        self._lent: list[Tensor] = []
        self._mutex = threading.Lock()

    @property
    def room(self) -> int:
        return self._most - len(self._lent)

    def get(self) -> Tensor | None:
        """None without room."""
        with self._mutex:
            if not self.room:
                return None
            vector = self._spare.pop() if self._spare else torch.empty(self.length, dtype=self.dtype)
            self._lent.append(vector)
            return vector

    def put(self, vector: Tensor) -> None:
        """Give back what `get` gave. Twice would let two models share memory, so that is an error."""
        with self._mutex:
            places = [place for place, each in enumerate(self._lent) if each is vector]
            del self._lent[places[0]]
            if len(self._spare) < KEPT:
                self._spare.append(vector)


@dataclass(eq=False)
class Taken:
    """A snapshot of the learner, where its device has it and where the links read it."""

    state: Tensor
    host: Tensor
    needed: int = 1  # by the exchange, and by each link that still sends it


class Snapshots:
    """The learner's snapshots. One is used again when neither its exchange nor a link needs it."""

    def __init__(self, learner: Learner, dtype: torch.dtype) -> None:
        self._learner, self._dtype = learner, dtype
        self._vectors = Vectors(learner.state, SNAPSHOTS)
        self._taken: list[Taken] = []
        self._mutex = threading.Lock()

    @property
    def room(self) -> int:
        return self._vectors.room

    def take(self) -> Tensor:
        host = self._vectors.get()
        assert host is not None, "look at `room` first"
        on_host = not self._learner.state.is_cuda
        state = self._learner.snapshot(host if on_host else None)
        self._round(state)
        if not on_host:
            host.copy_(state)
        with self._mutex:
            self._taken.append(Taken(state, host))
        return state

    def hold(self, snapshot: Tensor) -> Tensor:
        """One more needs it. Returns the copy that lies in host memory."""
        with self._mutex:
            taken = self._find(snapshot)
            assert taken is not None, "not a snapshot of this carrier"
            taken.needed += 1
        return taken.host

    def done(self, snapshot: Tensor) -> None:
        """One less needs it. Takes what `take` gave, or what `hold` gave."""
        with self._mutex:
            taken = self._find(snapshot)
            if taken is None:
                return
            taken.needed -= 1
            if taken.needed:
                return
            self._taken.remove(taken)
        self._vectors.put(taken.host)

    def _find(self, snapshot: Tensor) -> Taken | None:
        return next((each for each in self._taken if each.state is snapshot or each.host is snapshot), None)

    def _round(self, state: Tensor) -> None:
        if state.dtype != self._dtype:
            for part in state.split(BLOCK):
                part.copy_(part.to(self._dtype))


class Outgoing:
    """A snapshot that leaves in frames."""

    def __init__(self, key: tuple[int, int], number: int, vector: Tensor, dtype: torch.dtype) -> None:
        """`key`: the exchange that it belongs to. `number` tells the link's streams apart."""
        self.key, self.vector = key, vector
        self._number, self._dtype = number, dtype
        self._step = wire.CHUNK // dtype.itemsize
        self._next = 0

    @property
    def ended(self) -> bool:
        return self._next >= len(self.vector)

    def end(self) -> None:
        """Send no further part."""
        self._next = len(self.vector)

    def frame(self) -> tuple[bytes, memoryview]:
        """The next part: the frame up to its body, and the body."""
        part = self.vector[self._next : self._next + self._step]
        offset = self._next * self._dtype.itemsize
        self._next += len(part)
        body = raw(part.to(self._dtype))
        return wire.frame({"kind": wire.CHUNK_KIND, "stream": self._number, "offset": offset}, len(body)), body


class Incoming:
    """A snapshot that arrives in frames, each checked as it comes."""

    def __init__(self, message: Message, dtype: torch.dtype, vector: Tensor) -> None:
        self.message, self.vector = message, vector
        self.key = (message.initiator, message.number)
        self._dtype = dtype
        self._bytes = len(vector) * dtype.itemsize
        self._got = 0

    def place(self, header: Mapping[str, Any], body_bytes: int, scratch: memoryview) -> memoryview:
        """Where the next part goes. Raises RefusedError if it is not the next one."""
        start, end = self._got, self._got + body_bytes
        if header.get("offset") != start or end > self._bytes or body_bytes % self._dtype.itemsize or not body_bytes:
            raise RefusedError("a part of a model that is out of place")
        return raw(self.vector)[start:end] if self._dtype == self.vector.dtype else scratch[:body_bytes]

    def arrived(self, part: memoryview) -> Message | None:
        """Take the part over; returns the message once it is whole. Raises RefusedError for values not finite."""
        size = self._dtype.itemsize
        start, end = self._got // size, (self._got + len(part)) // size
        here = self.vector[start:end]
        if self._dtype != here.dtype:
            here.copy_(torch.frombuffer(part, dtype=self._dtype))
        if not np.isfinite(here.numpy()).all():
            raise RefusedError("its model holds NaN or infinity")
        self._got += len(part)
        return self.whole() if self._got == self._bytes else None

    def whole(self) -> Message:
        return replace(self.message, snapshot=self.vector, receipt=self.vector)


def announced(header: Mapping[str, Any], length: int, dtype: torch.dtype) -> None:
    """Raises RefusedError unless the snapshot that a header announces has this length and type on the wire."""
    shape = header.get("snapshot")
    if not isinstance(shape, dict):
        raise RefusedError("a message without its model")
    if shape.get("length") != length or shape.get("dtype") != wire.NAMES[dtype]:
        got = f"{shape.get('length')!s:.20} numbers of type {shape.get('dtype')!s:.20}"
        raise RefusedError(f"its model has {got}, this run's has {length} of type {wire.NAMES[dtype]}")


def raw(vector: Tensor) -> memoryview:
    """The bytes of a vector in host memory, without a copy."""
    return vector.contiguous().view(torch.uint8).numpy().data
