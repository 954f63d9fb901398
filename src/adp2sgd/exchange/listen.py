"""Incoming connections, and how many of them may be unauthenticated at a time."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from adp2sgd.errors import ConfigError
from adp2sgd.exchange.handshake import Address

MOST_PENDING = 32  # connections that have not met yet
MOST_PENDING_OF_ONE = 16  # of these, from one address
MOST_IN_WINDOW = 40  # connections from one address within WINDOW_S
WINDOW_S = 10.0
BACKLOG = 64
AGAIN_S = 0.05  # after a connection that could not be accepted


class Limits:
    """Who may try now. A flood is turned away before TLS costs anything."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.turned_away = 0
        self._clock = clock
        self._pending: dict[str, int] = {}
        self._recent: dict[str, deque[float]] = {}
        self._mutex = threading.Lock()

    def enter(self, address: str) -> bool:
        """Whether a connection may begin to meet; if so, call `leave` when it has met or failed."""
        now = self._clock()
        with self._mutex:
            self._forget(now)
            recent = self._recent.setdefault(address, deque())
            own, everybody = self._pending.get(address, 0), sum(self._pending.values())
            if own >= MOST_PENDING_OF_ONE or everybody >= MOST_PENDING or len(recent) >= MOST_IN_WINDOW:
                self.turned_away += 1
                return False
            recent.append(now)
            self._pending[address] = own + 1
            return True

    def leave(self, address: str) -> None:
        with self._mutex:
            self._pending[address] -= 1
            if not self._pending[address]:
                del self._pending[address]

    def _forget(self, now: float) -> None:
        for address, times in list(self._recent.items()):
            while times and now - times[0] > WINDOW_S:
                times.popleft()
            if not times:
                del self._recent[address]


class Listener:
    """Accepts on all addresses in one thread; each connection that may enter gets a thread of its own."""

    def __init__(self, addresses: Sequence[Address], welcome: Callable[[socket.socket, Address], None]) -> None:
        """`welcome` is called in the connection's own thread; it calls `limits.leave` when the two sites have met."""
        self.limits = Limits()
        self._welcome = welcome
        self._bell, self._button = socket.socketpair()
        self._doors: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, name="listen", daemon=True)
        for host, port in addresses:
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._doors.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
            except OSError as error:
                self._end()
                raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror or error})") from None
        self.addresses: list[Address] = [each.getsockname()[:2] for each in self._doors]
        self._thread.start()

    def close(self) -> None:
        self._button.send(b"!")
        self._thread.join()
        self._end()

    def _end(self) -> None:
        for each in (*self._doors, self._bell, self._button):
            each.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (*self._doors, self._bell):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._bell in ready:
                    return
                for door in self._doors:
                    if door in ready:
                        self._accept(door)

    def _accept(self, door: socket.socket) -> None:
        try:
            connection, address = door.accept()
        except OSError:
            time.sleep(AGAIN_S)  # the connection is gone already, or there are no file descriptors left
            return
        if self.limits.enter(address[0]):
            threading.Thread(target=self._welcome, args=(connection, address[:2]), name="link", daemon=True).start()
        else:
            connection.close()
