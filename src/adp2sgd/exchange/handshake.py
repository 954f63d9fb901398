"""How two sites meet: TLS first, then HELLO from both, then WELCOME or REFUSED from the side that was dialled.

    dialler                                listener
    TLS 1.3, both certificates required ─▶ limits per address, a deadline for all that follows
    HELLO ─────────────────────────────▶   verifies the certificate's site and the HELLO
       ◀────────────────────────── HELLO
    verifies both as well
       ◀──────────────── WELCOME or REFUSED reason

Under TLS 1.3 a dialler whose certificate is refused sees a successful handshake first. A link counts as up only after
WELCOME. Nothing but these small frames is read before that.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
