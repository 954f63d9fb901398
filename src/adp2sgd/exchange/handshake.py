"""How two sites meet. Both do the same: TLS, HELLO, then WELCOME or REFUSED with a reason.

    TLS 1.3, both certificates required
    HELLO ──────────────▶  verifies the certificate's site, then compares the HELLO with its own
       ◀────────── HELLO   and so does the other side
    WELCOME ────────────▶  or REFUSED reason
       ◀──────── WELCOME   or REFUSED reason

Under TLS 1.3 a dialler whose certificate is refused sees a successful handshake first. So a link counts as up only
after the peer's WELCOME. Nothing but these small frames is read before that.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from adp2sgd.errors import RefusedError
from adp2sgd.exchange import wire
from adp2sgd.exchange.tls import ClosedError, SecureStream

HELLO, WELCOME, REFUSED = "HELLO", "WELCOME", "REFUSED"

Address = tuple[str, int]


@dataclass(frozen=True)
class Peer:
    """A site that this one may have a link with."""

    number: int  # as a learner of the run's graph
    name: str  # as in the roster and in its certificate
    addresses: tuple[Address, ...] = ()  # none: it only connects outwards, so it dials this site


class Identity(Protocol):
    """Who this site is, whom it trusts, and what both sides must agree on. `engine/peers` implements it.

    All methods are called from several threads. Every method may raise RefusedError, whose text names the reason; both
    ends log it.
    """

    @property
    def name(self) -> str:
        """This site's name in the roster."""
        ...

    def server_context(self) -> ssl.SSLContext:
        """For one incoming connection: TLS 1.3 only, CERT_REQUIRED. Called for each, so renewed files are loaded."""
        ...

    def client_context(self) -> ssl.SSLContext:
        """For one outgoing connection: TLS 1.3 only, CERT_REQUIRED, `check_hostname` off: `verify` checks the name."""
        ...

    def verify(self, peer_certificate_der: bytes) -> str:
        """The name of the site that the certificate belongs to, or RefusedError: unknown name, revoked, expired, wrong
        authority. Called after each handshake, and again for open links by `NetworkCarrier.verify_links`."""
        ...

    def hello(self) -> dict[str, Any]:
        """What the peer compares: protocol version, run text and digest, model shape, initial weights, roster and CRL
        numbers. Plain JSON, at most `wire.LARGEST_HEADER` bytes in all."""
        ...

    def check_hello(self, theirs: Mapping[str, Any]) -> None:
        """Compare the peer's HELLO with the own one. RefusedError names the key that differs."""
        ...


@dataclass(frozen=True)
class Met:
    """Who is at the other end of a connection."""

    peer: Peer
    certificate: bytes  # DER
    session: str  # differs each time that the peer's process starts
    dialled: bool  # by this side


class DuplicateError(RefusedError):
    """The two sites have a link already. Nothing is wrong."""


class RefusedByPeerError(RefusedError):
    """The other side refuses this one; the text is its reason."""


def meet(
    stream: SecureStream,
    identity: Identity,
    session: str,
    *,
    known: Callable[[str], Peer],
    admit: Callable[[Met], None],
    dialled: Peer | None,
    deadline: float,
) -> Met:
    """HELLO and WELCOME, both ways. Raises RefusedError if either side refuses; both know the reason then.

    `known` returns the peer of a name, or raises RefusedError. `admit` raises DuplicateError if there is a link.
    """
    certificate = stream.handshake(deadline)
    try:
        peer = known(identity.verify(certificate))
        if dialled is not None and peer.name != dialled.name:
            raise RefusedError(f"the address of site {dialled.name} is answered by site {peer.name}")
        stream.write_frame({"kind": HELLO, "session": session, "hello": identity.hello()}, deadline)
        theirs = _expect(HELLO, stream, deadline)
        hello, their_session = theirs.get("hello"), theirs.get("session")
        if not isinstance(hello, dict) or not isinstance(their_session, str):
            raise RefusedError("a malformed HELLO")
        identity.check_hello(hello)
        met = Met(peer, certificate, their_session, dialled is not None)
        admit(met)
        stream.write_frame({"kind": WELCOME}, deadline)
        _expect(WELCOME, stream, deadline)
    except RefusedByPeerError:
        raise
    except RefusedError as refused:
        with contextlib.suppress(ClosedError):
            stream.write_frame(refusal(refused), deadline)
            stream.close(reason=True)
        raise
    return met


def refusal(error: RefusedError) -> dict[str, Any]:
    """The frame that tells a peer why."""
    reason = str(error)[: wire.LARGEST_REASON]
    return {"kind": REFUSED, "reason": reason, "duplicate": isinstance(error, DuplicateError)}


def refused_by_peer(frame: Mapping[str, Any]) -> RefusedError:
    kind = DuplicateError if frame.get("duplicate") is True else RefusedByPeerError
    return kind(wire.reason_in(frame))


def _expect(kind: str, stream: SecureStream, deadline: float) -> dict[str, Any]:
    frame = stream.read_frame(deadline)
    if frame["kind"] == REFUSED:
        raise refused_by_peer(frame)
    if frame["kind"] != kind:
        raise RefusedError(f"a frame of kind {str(frame['kind'])[:40]!r} in place of {kind}")
    return frame
