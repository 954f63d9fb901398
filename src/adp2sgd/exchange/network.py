"""Carries exchange messages between machines: one TLS 1.3 connection per pair of neighbours, dialled by whoever can.

    exchange thread ── send ──▶ link's queue ──▶ link's thread ══ TLS ══ peer
                    ◀─ receive ── inbox ◀──────┘

`handshake.py` says how two sites meet, `neighbours.py` which links there are, `link.py` what one link does, and
`duplex.py` what the messages mean. Nothing travels in plaintext and nothing is unpickled.
"""

from __future__ import annotations

import queue
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adp2sgd.errors import ConfigError
from adp2sgd.exchange import wire
from adp2sgd.exchange.deadlines import Pace
from adp2sgd.exchange.duplex import Accept, Cancel, Gone
from adp2sgd.exchange.handshake import Address, Identity, Met, Peer
from adp2sgd.exchange.link import Link
from adp2sgd.exchange.neighbours import Event, Neighbours
from adp2sgd.exchange.protocol import Copy, Message, Request
from adp2sgd.exchange.streams import SNAPSHOTS, Snapshots, Vectors
from adp2sgd.exchange.tls import SecureStream
from adp2sgd.learner import Learner

ANSWERED_BY = {Request: "Answer", Accept: "Offer", Copy: "Model"}  # what was sent → which snapshot may come for it
Handler = Callable[[int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class LinkStatus:
    """One neighbour, for status pages."""

    peer: Peer
    up: bool
    since: float | None = None  # seconds since the epoch
    trouble: str = ""  # why it is not up
    bytes_sent: int = 0
    bytes_received: int = 0
    exchange_s: float | None = None  # the median of its exchanges


class NetworkCarrier:
    """One site's way to its neighbours. Close it to end all links and threads."""

    def __init__(
        self,
        learner: Learner,
        me: int,
        identity: Identity,
        peers: Iterable[Peer] = (),
        *,
        listen: Sequence[Address] = (),
        dtype: torch.dtype | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """`dtype`: of the numbers on the wire, by default the model's. `on_event` is called in links' threads."""
        if sys.byteorder != "little":
            raise ConfigError("sites need a little-endian machine: weights travel as little-endian numbers")
        state = learner.state
        self.wire_dtype = dtype or state.dtype
        self.length = len(state)
        self._device = state.device
        self._me = me
        self._snapshots = Snapshots(learner, self.wire_dtype)
        self._vectors = Vectors(state, SNAPSHOTS)
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._expected: dict[tuple[int, str], tuple[int, int]] = {}  # peer, kind → initiator, number
        self._paces: dict[int, Pace] = {}
        self._handlers: dict[str, Handler] = {}
        self._peers: tuple[Peer, ...] = ()
        self._tell = on_event or (lambda _: None)
        self.neighbours = Neighbours(me, identity, listen=listen, make=self._make, lost=self._lost, tell=self._tell)
        self.set_peers(peers)

    # --- The contract of `carrier.py` and `duplex.py` ---

    @property
    def room(self) -> int:
        return self._snapshots.room

    def take(self) -> Tensor:
        return self._snapshots.take()

    def free(self, snapshot: Tensor) -> None:
        self._snapshots.done(snapshot)

    def send(self, message: Message) -> bool:
        link = self.neighbours.links.get(message.receiver)
        if link is None:
            return False
        awaited = ANSWERED_BY.get(type(message))
        if awaited is not None:
            self._expected[message.receiver, awaited] = (message.initiator, message.number)
            self._pace(message.receiver).begin()
        if isinstance(message, Cancel):
            link.cancel((message.initiator, message.number))
        return self._queue(link, message)

    def receive(self, timeout_s: float) -> Sequence[Message]:
        found: list[Message | None] = []
        try:
            found.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return [self._on_device(message) for message in found if message is not None]

    def release(self, message: Message) -> None:
        if isinstance(message.receipt, Tensor):
            self._vectors.put(message.receipt)

    def expose(self, exposed: bool) -> None:
        """The peer notices a broken connection and counts."""

    def deadline_s(self, partner: int) -> float:
        return self._pace(partner).deadline_s

    def slow(self, partner: int) -> bool:
        known = [pace.typical_s for pace in list(self._paces.values()) if pace.typical_s is not None]
        typical = self._pace(partner).typical_s
        return typical is not None and len(known) > 2 and typical > statistics.median(known)

    def concluded(self, partner: int, completed: bool) -> None:
        self._pace(partner).end(completed)
        for kind in ANSWERED_BY.values():
            self._expected.pop((partner, kind), None)

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self.neighbours.close()

    # --- For the engine above ---

    @property
    def addresses(self) -> list[Address]:
        """Where this site listens; a port 0 in `listen` has become the one that was given."""
        return self.neighbours.listener.addresses

    def set_peers(self, peers: Iterable[Peer]) -> None:
        """Replace the sites that this one may have links with, as after a new roster. Links with others end."""
        self._peers = tuple(peers)
        self.neighbours.set_peers(self._peers)

    def verify_links(self) -> None:
        """Check the certificates of open links again, as after a new revocation list."""
        self.neighbours.verify()

    def on_control(self, kind: str, handler: Handler) -> None:
        """Call `handler(peer, body)`, in a link's thread, for each control message of this kind. It must not wait.

        A RefusedError that it raises ends the link, and both ends say why.
        """
        self._handlers[kind] = handler

    def control_to(self, peer: int, kind: str, body: Mapping[str, Any]) -> bool:
        """Send a small JSON object to a neighbour; False as with `send`."""
        link = self.neighbours.links.get(peer)
        return link is not None and link.send({**body, "kind": kind})

    def status(self) -> list[LinkStatus]:
        return [self._status(peer) for peer in self._peers]

    # --- Called by links' threads ---

    def deliver(self, message: Message) -> None:
        self._inbox.put(message)

    def control(self, peer: int, kind: str, body: Mapping[str, Any]) -> None:
        handler = self._handlers.get(kind)
        if handler is not None:  # a newer release may send what this one does not know
            handler(peer, body)

    def expects(self, message: Message) -> bool:
        expected = self._expected.get((message.sender, type(message).__name__))
        return expected == (message.initiator, message.number)

    def vector(self) -> Tensor | None:
        return self._vectors.get()

    def put_back(self, vector: Tensor) -> None:
        self._vectors.put(vector)

    def sent(self, vector: Tensor) -> None:
        self._snapshots.done(vector)

    def model_refused(self, message: Message, reason: str, *, by_peer: bool) -> None:
        """A model is not acceptable: the exchange ends without mixing, and both sides say why."""
        name = next((peer.name for peer in self._peers if peer.number == message.sender), str(message.sender))
        self._tell(Event("model refused", name, f"it refuses this site's model: {reason}" if by_peer else reason))
        if by_peer:
            return
        cancel = Cancel(sender=self._me, receiver=message.sender, initiator=message.initiator, number=message.number)
        link = self.neighbours.links.get(message.sender)
        if link is not None:
            link.send(wire.encode(cancel, self.wire_dtype, reason))
        self.deliver(replace(cancel, sender=message.sender, receiver=self._me))

    def _make(self, stream: SecureStream, met: Met) -> Link:
        return Link(stream, met, self._me, self)

    def _lost(self, link: Link) -> None:
        self.deliver(Gone(sender=link.number, receiver=self._me, initiator=link.number, number=0))

    def _queue(self, link: Link, message: Message) -> bool:
        header = wire.encode(message, self.wire_dtype)
        if message.snapshot is None:
            return link.send(header)
        host = self._snapshots.hold(message.snapshot)
        if link.send(header, host):
            return True
        self._snapshots.done(host)
        return False

    def _on_device(self, message: Message) -> Message:
        if message.snapshot is None or self._device.type == "cpu":
            return message
        return replace(message, snapshot=message.snapshot.to(self._device))

    def _pace(self, partner: int) -> Pace:
        if partner not in self._paces:
            self._paces[partner] = Pace(self.length * self.wire_dtype.itemsize)
        return self._paces[partner]

    def _status(self, peer: Peer) -> LinkStatus:
        link = self.neighbours.links.get(peer.number)
        typical = self._pace(peer.number).typical_s
        if link is None:
            return LinkStatus(peer, False, trouble=self.neighbours.troubles.get(peer.name, ""), exchange_s=typical)
        return LinkStatus(
            peer, True, link.since, "", bytes_sent=link.bytes_out, bytes_received=link.reader.bytes, exchange_s=typical
        )
