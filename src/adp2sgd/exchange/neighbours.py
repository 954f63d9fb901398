"""Which sites this one has a link with: it listens, dials, dials again, and keeps one link per pair.

If both sites dial at the same time, both keep the connection that the site with the lower number dialled. A connection
from a peer that has restarted, or that dials again, replaces the old one.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from adp2sgd.errors import RefusedError
from adp2sgd.exchange.handshake import Address, DuplicateError, Identity, Met, Peer, RefusedByPeerError, meet
from adp2sgd.exchange.link import Link
from adp2sgd.exchange.listen import Listener
from adp2sgd.exchange.tls import ClosedError, SecureStream

MEET_S = 5.0  # from the connection to WELCOME
CONNECT_S = 5.0
FIRST_PAUSE_S = 0.2  # between two attempts to dial; doubles, with jitter
LONGEST_PAUSE_S = 30.0
COURTESY_S = 1.0  # for which the site with the higher number lets the other one dial first
LEAVE_S = 5.0  # for all links to send what is queued
MOST_TROUBLES = 1000  # sites and addresses
STEADY_S = 10.0  # a link that stood for so long starts the pauses anew


@dataclass(frozen=True)
class Event:
    """What people should know about a link. `kind`: up, down, refused, unreachable, model refused."""

    kind: str
    site: str  # its name, or its address while the name is not known
    reason: str = ""


class Neighbours:
    """The links of one site, each run by a thread of its own."""

    def __init__(
        self,
        me: int,
        identity: Identity,
        *,
        listen: Sequence[Address],
        make: Callable[[SecureStream, Met], Link],
        lost: Callable[[Link], None],
        tell: Callable[[Event], None],
    ) -> None:
        """`make` wraps a connection that has met; `lost` is told when a link has ended; `tell` of all that happens."""
        self.links: dict[int, Link] = {}
        self.troubles: dict[str, str] = {}  # site → why there is no link with it
        self.closing = threading.Event()
        self._me, self._identity = me, identity
        self._make, self._lost, self._tell = make, lost, tell
        self._session = secrets.token_hex(8)
        self._peers: dict[str, Peer] = {}
        self._diallers: dict[str, Dialler] = {}
        self._mutex = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self.listener = Listener(listen, self._incoming)

    def set_peers(self, peers: Iterable[Peer]) -> None:
        """Replace the sites that this one may have links with. Links with any other end."""
        wanted = {peer.name: peer for peer in peers}
        with self._mutex:
            numbers = {name: peer.number for name, peer in wanted.items()}
            gone = [link for link in self.links.values() if numbers.get(link.met.peer.name) != link.number]
            stopped = [each for name, each in self._diallers.items() if wanted.get(name) != each.peer]
            kept = {name: each for name, each in self._diallers.items() if each not in stopped}
            new = [peer for peer in wanted.values() if peer.addresses and peer.name not in kept]
            self._peers = wanted
            self._diallers = kept | {peer.name: Dialler(peer, self, polite=peer.number < self._me) for peer in new}
        for dialler in stopped:
            dialler.stopping.set()
        for link in gone:
            refused = RefusedError(f"site {link.met.peer.name} is no longer a neighbour of site {self._identity.name}")
            link.close(str(refused), refused)

    def verify(self) -> None:
        """Check the certificates of open links again, for instance after a revocation."""
        for link in list(self.links.values()):
            try:
                self._identity.verify(link.met.certificate)
            except RefusedError as refused:
                link.close(str(refused), refused)

    def close(self) -> None:
        """Send what is queued, end all links and threads."""
        self.closing.set()
        self.listener.close()
        with self._mutex:
            diallers, links = list(self._diallers.values()), list(self.links.values())
        for dialler in diallers:
            dialler.stopping.set()
        for link in links:
            link.close("this site leaves")
        until = time.monotonic() + LEAVE_S
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))

    # --- In the threads of connections ---

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """`close` waits for the calling thread."""
        thread = threading.current_thread()
        self._threads.add(thread)
        try:
            yield
        finally:
            self._threads.discard(thread)

    def dial(self, peer: Peer) -> float:
        """Try the peer's addresses one after the other; run the link until it ends. Returns the seconds it stood."""
        for address in peer.addresses:
            if self.closing.is_set():
                break
            try:
                context = self._identity.client_context()  # a site that finds fault with itself does not dial
                connection = socket.create_connection(address, CONNECT_S)
            except RefusedError as refused:
                self.trouble("refused", peer.name, str(refused))
                continue
            except OSError as error:
                self.trouble("unreachable", peer.name, f"{address[0]}:{address[1]}: {error.strerror or error}")
                continue
            link = self._meet(connection, context, peer)
            if link is not None:
                return self._hold(link)
        return 0.0

    def linked(self, peer: Peer) -> bool:
        return peer.number in self.links

    def trouble(self, kind: str, site: str, reason: str) -> None:
        """Tell it once, until it changes."""
        if self.troubles.get(site) != reason and not self.closing.is_set():
            if len(self.troubles) >= MOST_TROUBLES:
                self.troubles.clear()
            self.troubles[site] = reason
            self._tell(Event(kind, site, reason))

    def _incoming(self, connection: socket.socket, address: Address) -> None:
        with self.thread():
            try:
                context = self._identity.server_context()
                link = self._meet(connection, context, None, address[0])
            except RefusedError as refused:
                self.trouble("refused", self._identity.name, str(refused))
                connection.close()
                link = None
            finally:
                self.listener.limits.leave(address[0])
            if link is not None:
                self._hold(link)

    def _meet(
        self, connection: socket.socket, context: ssl.SSLContext, dialled: Peer | None, where: str = ""
    ) -> Link | None:
        """None if one side refuses the other; both have been told why."""
        site = where if dialled is None else dialled.name

        def known(name: str) -> Peer:
            nonlocal site
            site = name
            if name not in self._peers:
                raise RefusedError(f"site {name} is no neighbour of site {self._identity.name}")
            return self._peers[name]

        try:
            stream = SecureStream(connection, context, server_side=dialled is None)
            deadline = time.monotonic() + MEET_S
            met = meet(
                stream, self._identity, self._session,
                known=known, admit=self._admit, dialled=dialled, deadline=deadline,
            )  # fmt: skip
            return self._make(stream, met)
        except DuplicateError:
            pass
        except RefusedByPeerError as refused:
            self.trouble("refused", site, f"it refuses this site: {refused}")
        except RefusedError as refused:
            self.trouble("refused", site, str(refused))
        except (ClosedError, OSError) as closed:
            self.trouble("unreachable", site, str(closed))
        except BaseException:
            connection.close()
            raise
        connection.close()
        return None

    def _admit(self, met: Met) -> None:
        """Raises DuplicateError if the link that stands is to be kept."""
        link = self.links.get(met.peer.number)
        if link is None or link.met.session != met.session or link.met.dialled == met.dialled:
            return
        lower = self._me < met.peer.number
        if met.dialled != lower:
            raise DuplicateError("these two sites have a link")

    def _hold(self, link: Link) -> float:
        """Run the link until it ends, unless another one is to be kept; returns the seconds for which it stood."""
        began, reason = time.monotonic(), "a defect of this program"
        if not self._register(link):
            link.abandon()
            return 0.0
        try:
            self._tell(Event("up", link.met.peer.name))
            reason = link.run()
        finally:
            self._end(link, reason)
        return time.monotonic() - began

    def _register(self, link: Link) -> bool:
        """Put the link in place of an older one; False if the older one is to be kept."""
        with self._mutex:
            try:
                self._admit(link.met)
            except DuplicateError:
                return False
            older = self.links.get(link.number)
            if older is not None:
                older.close("a newer connection replaces it")
                self._lost(older)  # before anything is sent over the new one
            self.links[link.number] = link
        self.troubles.pop(link.met.peer.name, None)
        if self.closing.is_set():
            link.close("this site leaves")
        return True

    def _end(self, link: Link, reason: str) -> None:
        with self._mutex:
            if self.links.get(link.number) is not link:
                return
            del self.links[link.number]
            self._lost(link)
        self.troubles[link.met.peer.name] = reason
        self._tell(Event("down", link.met.peer.name, reason))


class Dialler:
    """Dials one peer whenever there is no link with it, with growing pauses."""

    def __init__(self, peer: Peer, neighbours: Neighbours, *, polite: bool) -> None:
        """`polite`: the peer may dial as well, and its connection would be kept; let it try first."""
        self.peer = peer
        self.stopping = threading.Event()
        self._neighbours, self._polite = neighbours, polite
        threading.Thread(target=self._run, name=f"dial {peer.name}", daemon=True).start()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        with self._neighbours.thread():
            self.stopping.wait(COURTESY_S if self._polite else 0.0)
            while not self.stopping.is_set():
                stood = 0.0
                if self._neighbours.linked(self.peer):
                    pause = FIRST_PAUSE_S
                else:
                    stood = self._neighbours.dial(self.peer)
                pause = FIRST_PAUSE_S if stood > STEADY_S else pause
                self.stopping.wait(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, LONGEST_PAUSE_S)
