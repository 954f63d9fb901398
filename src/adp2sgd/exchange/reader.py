"""The reading half of a link: bytes → frames → messages, with every limit that a peer must keep to.

What cannot come from a site of this version ends the link with a reason (RefusedError). A model that is not acceptable
ends its exchange only. A snapshot that nobody asked for, or that comes too late, is read and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from adp2sgd.errors import RefusedError
from adp2sgd.exchange import wire
from adp2sgd.exchange.duplex import KINDS, Cancel, Offer
from adp2sgd.exchange.handshake import REFUSED, refused_by_peer
from adp2sgd.exchange.protocol import Answer, Message, Model
from adp2sgd.exchange.streams import Incoming, announced
from adp2sgd.exchange.tls import SecureStream

WITH_SNAPSHOT = (Answer, Offer, Model)


class Host(Protocol):
    """What a link tells its carrier. Called by the link's thread; nothing here may wait."""

    wire_dtype: torch.dtype
    length: int  # numbers of a model

    def deliver(self, message: Message) -> None: ...

    def control(self, peer: int, kind: str, body: Mapping[str, Any]) -> None: ...

    def expects(self, message: Message) -> bool:
        """Whether this side asked for the snapshot of this message."""
        ...

    def vector(self) -> Tensor | None:
        """Memory for a snapshot that arrives; None if all of it is in use."""
        ...

    def put_back(self, vector: Tensor) -> None: ...

    def sent(self, vector: Tensor) -> None:
        """A snapshot has left, or will not."""
        ...

    def model_refused(self, message: Message, reason: str, *, by_peer: bool) -> None: ...


class Reader:
    """Owned and called by the link's thread."""

    def __init__(
        self, stream: SecureStream, host: Host, me: int, peer: int, cancelled: Callable[[tuple[int, int]], None]
    ) -> None:
        """`cancelled`: called with the exchange that the peer ends."""
        self.frames = self.bytes = self.dropped = 0
        self.heard = time.monotonic()
        self._stream, self._host, self._me, self._peer = stream, host, me, peer
        self._on_cancel = cancelled
        self._incoming: dict[int, Incoming] = {}
        self._head = memoryview(bytearray(wire.HEAD.size))
        self._scratch = memoryview(b"")  # for what is converted or dropped
        self._filling: Incoming | None = None  # the snapshot that the body belongs to
        self._body_bytes = 0
        self._await(self._head, self._headed)

    def read(self) -> bool:
        """Take what has arrived; False if nothing has."""
        count = self._stream.fill()
        if not count:
            return False
        self.bytes += count
        self.heard = time.monotonic()
        self.drain()
        return True

    def drain(self) -> None:
        """Work through what was received and decrypted."""
        while read := self._stream.read_into(self._target[self._filled :]):
            self._filled += read
            if self._filled == len(self._target):
                self._whole()

    def forget(self, key: tuple[int, int]) -> None:
        """Drop what arrives for an exchange."""
        for number, incoming in list(self._incoming.items()):
            if incoming.key == key:
                self._drop(number)

    def end(self) -> None:
        for number in list(self._incoming):
            self._drop(number)

    def _await(self, target: memoryview, then: Callable[[], None]) -> None:
        self._target, self._filled, self._whole = target, 0, then

    def _headed(self) -> None:
        header, self._body_bytes = wire.lengths(self._head)
        self._await(memoryview(bytearray(header)), self._announced)

    def _announced(self) -> None:
        header = wire.parse(bytes(self._target))
        if header["kind"] == wire.CHUNK_KIND:
            self._open_part(header)
            return
        if self._body_bytes:
            raise RefusedError(f"a body in a frame of kind {header['kind'][:40]!r}")
        if header["kind"] == REFUSED:
            raise refused_by_peer(header)
        if header["kind"] in KINDS:
            self._receive(wire.decode(header), header)
        elif header["kind"] != wire.BEAT:
            self._host.control(self._peer, header["kind"], header)
        self._done()

    def _done(self) -> None:
        """The frame is dealt with; the next one begins."""
        self.frames += 1
        self._filling = None
        self._await(self._head, self._headed)

    def _open_part(self, header: Mapping[str, Any]) -> None:
        if not self._body_bytes:
            raise RefusedError("a part of a model without numbers")
        if len(self._scratch) < self._body_bytes:
            self._scratch = memoryview(bytearray(wire.CHUNK))
        number = header.get("stream")
        self._filling = self._incoming.get(number) if isinstance(number, int) else None
        if self._filling is None:
            self._await(self._scratch[: self._body_bytes], self._done)
        else:
            self._await(self._filling.place(header, self._body_bytes, self._scratch), self._part)

    def _part(self) -> None:
        incoming, self._filling = self._filling, None
        assert incoming is not None
        try:
            whole = incoming.arrived(self._target)
            if whole is not None:
                self._incoming = {n: each for n, each in self._incoming.items() if each is not incoming}
                self._host.deliver(whole)
        except RefusedError as refused:
            self.forget(incoming.key)
            self._host.model_refused(incoming.message, str(refused), by_peer=False)
        self._done()

    def _receive(self, message: Message, header: Mapping[str, Any]) -> None:
        if (message.sender, message.receiver) != (self._peer, self._me):
            raise RefusedError(f"a message from {message.sender} to {message.receiver} on the link of {self._peer}")
        if isinstance(message, WITH_SNAPSHOT):
            self._begin(message, header)
            return
        if "snapshot" in header:
            raise RefusedError(f"a model in a {type(message).__name__}")
        if isinstance(message, Cancel):
            self._on_cancel((message.initiator, message.number))
            if "reason" in header:
                self._host.model_refused(message, wire.reason_in(header), by_peer=True)
        self._host.deliver(message)

    def _begin(self, message: Message, header: Mapping[str, Any]) -> None:
        """A snapshot is announced: find memory for it, or drop it as it comes."""
        if not self._host.expects(message):
            self.dropped += 1
            return
        try:
            announced(header, self._host.length, self._host.wire_dtype)
        except RefusedError as refused:
            self._host.model_refused(message, str(refused), by_peer=False)
            return
        number, vector = header["snapshot"].get("stream"), self._host.vector()
        if vector is None or not isinstance(number, int):
            self._host.model_refused(message, "no memory for one more model", by_peer=False)
            return
        incoming = Incoming(message, self._host.wire_dtype, vector)
        if len(vector):
            self._incoming[number] = incoming
        else:
            self._host.deliver(incoming.whole())

    def _drop(self, number: int) -> None:
        incoming = self._incoming.pop(number)
        if self._filling is incoming:  # the rest of the part goes elsewhere, as its memory may be used again
            self._target, self._whole = self._scratch[: self._body_bytes], self._done
        self._host.put_back(incoming.vector)
