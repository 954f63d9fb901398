"""A carrier over stream sockets, written against `exchange/carrier.py` alone: what a network carrier needs at least.

A message is a length, a small JSON header and the snapshot as raw numbers; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from adp2sgd.exchange.protocol import MESSAGES, Message
from adp2sgd.learner import Learner
from adp2sgd.progress import from_rows, to_rows

HEAD = struct.Struct("<II")  # bytes of the header, bytes of the snapshot
KINDS = {**MESSAGES, "Message": Message}


class SocketCarrier:
    def __init__(self, learner: Learner, links: dict[int, socket.socket], wire: torch.dtype | None = None) -> None:
        self._learner, self._links, self._wire = learner, links, wire or learner.state.dtype
        self._taken: dict[int, Tensor] = {}
        self._out = {peer: b"" for peer in links}
        self._in = {peer: b"" for peer in links}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        for link in links.values():
            link.setblocking(False)

    @property
    def room(self) -> int:
        return 4 - len(self._taken)

    def take(self) -> Tensor:
        rounded = self._learner.snapshot().to(self._wire).to(self._learner.state.dtype)
        self._taken[id(rounded)] = rounded
        return rounded

    def free(self, snapshot: Tensor) -> None:
        self._taken.pop(id(snapshot), None)

    def send(self, message: Message) -> bool:
        if message.receiver not in self._links:
            return False
        fields = {name: getattr(message, name) for name in ("sender", "receiver", "initiator", "number")}
        header = {**fields, "kind": type(message).__name__, "progress": to_rows(message.progress)}
        packed, body = json.dumps(header).encode(), b""
        if message.snapshot is not None:
            body = message.snapshot.to(self._wire).contiguous().view(torch.uint8).numpy().tobytes()
        self._out[message.receiver] += HEAD.pack(len(packed), len(body)) + packed + body
        return self._flush(message.receiver)

    def receive(self, timeout_s: float) -> Sequence[Message]:
        ready, _, _ = select.select([*self._links.values(), self._bell], [], [], timeout_s)
        if self._bell in ready:
            os.eventfd_read(self._bell)
        for peer, link in list(self._links.items()):
            if link in ready:
                self._read(peer, link)
            if peer in self._links:
                self._flush(peer)
        return [message for peer in list(self._in) for message in self._complete(peer)]

    def release(self, message: Message) -> None:
        """A received snapshot is this side's own copy."""

    def expose(self, exposed: bool) -> None:
        """The peer notices a broken connection."""

    def deadline_s(self, partner: int) -> float:
        return 1.0

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        os.close(self._bell)

    def _flush(self, peer: int) -> bool:
        try:
            while self._out[peer]:
                self._out[peer] = self._out[peer][self._links[peer].send(self._out[peer]) :]
        except BlockingIOError:
            return True
        except OSError:
            self._drop(peer)
            return False
        return True

    def _read(self, peer: int, link: socket.socket) -> None:
        try:
            while data := link.recv(1 << 16):
                self._in[peer] += data
            self._drop(peer)
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)

    def _drop(self, peer: int) -> None:
        self._links.pop(peer).close()
        self._out[peer] = b""

    def _complete(self, peer: int) -> list[Message]:
        found = []
        while len(self._in[peer]) >= HEAD.size:
            header, body = HEAD.unpack_from(self._in[peer])
            end = HEAD.size + header + body
            if len(self._in[peer]) < end:
                break
            data, self._in[peer] = self._in[peer][HEAD.size : end], self._in[peer][end:]
            message = self._decoded(peer, data[:header], data[header:])
            found += [message] if message is not None else []
        return found

    def _decoded(self, peer: int, header: bytes, body: bytes) -> Message | None:
        fields = json.loads(header)
        size = len(self._learner.state) * self._wire.itemsize
        if fields["sender"] != peer or fields["receiver"] != self._learner.number or len(body) not in (0, size):
            return None
        kind, progress = KINDS[fields.pop("kind")], from_rows(fields.pop("progress"))
        snapshot = None
        if body:
            snapshot = torch.frombuffer(bytearray(body), dtype=self._wire).to(self._learner.state.dtype)
        return kind(**fields, progress=progress, snapshot=snapshot)
