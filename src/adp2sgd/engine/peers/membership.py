"""Who takes part: links follow the roster, and newer rosters and revocation lists spread from site to site.

A site passes on only what is signed and newer than what its peer has. After a change it looks at its open links again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from adp2sgd.engine.peers.introduction import Introduction
from adp2sgd.exchange.handshake import Peer
from adp2sgd.exchange.network import NetworkCarrier
from adp2sgd.identity.credentials import Credentials
from adp2sgd.identity.roster import Roster, read_text, split_address

NEWS = "roster and revocations"  # the kind of control message that carries them


def peers_of(roster: Roster, number: int, neighbours: set[int]) -> list[Peer]:
    """The neighbours of site `number`, with the addresses at which it may dial them."""
    found = []
    for place, entry in enumerate(roster.sites):
        if place in neighbours and place != number:
            addresses = () if entry.outward else tuple(split_address(each) for each in entry.addresses)
            found.append(Peer(place, entry.name, addresses))
    return found


class Membership:
    """Keeps the carrier's peers as the roster says."""

    def __init__(
        self, credentials: Credentials, introduction: Introduction, carrier: NetworkCarrier, number: int,
        neighbours: set[int],
    ) -> None:  # fmt: skip
        self._credentials, self._introduction, self._carrier = credentials, introduction, carrier
        self._number, self._neighbours = number, neighbours
        self._numbers = credentials.numbers
        self._mutex = threading.Lock()
        carrier.on_control(NEWS, self._heard)
        carrier.set_peers(peers_of(credentials.roster, number, neighbours))

    @property
    def names(self) -> tuple[str, ...]:
        return self._credentials.roster.names

    def look(self) -> None:
        """Act on files that have changed, and on what peers lack. Called once a second; cheap where nothing changed."""
        with self._mutex:
            numbers = self._credentials.numbers
            if numbers != self._numbers:
                self._numbers = numbers
                self._carrier.set_peers(peers_of(self._credentials.roster, self._number, self._neighbours))
            self._carrier.verify_links()  # also for a certificate that has expired meanwhile
            for link in self._carrier.status():
                if link.up:
                    self._pass_on(link.peer, numbers)

    def _pass_on(self, peer: Peer, numbers: Mapping[str, int]) -> None:
        theirs = self._introduction.numbers.get(peer.name, {})
        newer = [key for key, number in numbers.items() if number > theirs.get(key, 0)]
        if not newer:
            return
        lists = self._credentials.lists
        body: dict[str, Any] = {"lists": [lists[key].pem for key in newer if key in lists]}
        if "roster" in newer:
            body["roster"] = read_text(self._credentials.paths.roster)
        if self._carrier.control_to(peer.number, NEWS, body):
            self._introduction.numbers[peer.name] = {**theirs, **{key: numbers[key] for key in newer}}

    def _heard(self, peer: int, body: Mapping[str, Any]) -> None:
        """In a link's thread, which must not wait for a disk."""
        threading.Thread(target=self._take, args=(dict(body),), name="roster news", daemon=True).start()

    def _take(self, body: dict[str, Any]) -> None:
        text, lists = body.get("roster"), body.get("lists")
        taken = [self._credentials.take_roster(text)] if isinstance(text, str) else []
        taken += [self._credentials.take_list(each) for each in lists or () if isinstance(each, str)]
        if any(taken):
            self.look()
