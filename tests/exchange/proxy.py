"""A network between two sites, for tests and benchmarks: it delays, throttles, swallows and cuts TCP connections.

Each direction of a connection has two threads: one takes bytes in and says when they are due, the other hands them on.
A direction holds at most what fits into its delay plus QUEUE_S, so that the sender feels the throttle.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque

PIECE = 1 << 16
QUEUE_S = 0.1  # of data that waits for its turn
LARGEST_QUEUE = 1 << 22


class Proxy:
    """Listens at `address` and forwards to `target`. All settings may change while connections stand."""

    def __init__(
        self, target: tuple[str, int], *, delay_s: float = 0.0, bytes_per_s: float | None = None
    ) -> None:  # fmt: skip
        """`delay_s` and `bytes_per_s` hold in each direction."""
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self.cuts = 0  # connections that were cut
        self.swallowed = 0  # bytes that were swallowed
        self.passed = 0
        self._target = target
        self._open = True
        self._swallowing = False
        self._cut_after: int | None = None
        self._ends: list[socket.socket] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._door.getsockname()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """End all connections at once and accept none until `mend`."""
        self._open = False
        ends, self._ends = self._ends, []
        for end in ends:
            self.cuts += 1
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut_after(self, count: int) -> None:
        """Cut once so many more bytes have passed, both directions together."""
        self._cut_after = self.passed + count

    def swallow(self) -> None:
        """Keep connections open and hand nothing on, as a firewall does that has forgotten them."""
        self._swallowing = True

    def mend(self) -> None:
        self._open, self._swallowing, self._cut_after = True, False, None

    def close(self) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._door.accept()
            except OSError:
                return
            if not self._open:
                inner.close()
                continue
            try:
                outer = socket.create_connection(self._target)
            except OSError:
                inner.close()
                continue
            for end in (inner, outer):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends += [inner, outer]
            Direction(self, inner, outer)
            Direction(self, outer, inner)

    def took(self, count: int) -> bool:
        """Count bytes; False if they are swallowed."""
        if self._swallowing:
            self.swallowed += count
            return False
        self.passed += count
        if self._cut_after is not None and self.passed >= self._cut_after:
            self._cut_after = None
            self.cut()
        return True


class Direction:
    """From one end of a connection to the other."""

    def __init__(self, proxy: Proxy, source: socket.socket, target: socket.socket) -> None:
        self._proxy, self._source, self._target = proxy, source, target
        self._queue: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._take, name="proxy in", daemon=True).start()
        threading.Thread(target=self._hand_on, name="proxy out", daemon=True).start()

    def _take(self) -> None:
        free_at = 0.0  # when the line has sent what is on it
        while True:
            try:
                data = self._source.recv(PIECE)
            except OSError:
                data = b""
            rate, now = self._proxy.bytes_per_s, time.monotonic()
            free_at = max(free_at, now) + (len(data) / rate if rate else 0.0)
            if data and not self._proxy.took(len(data)):
                continue
            with self._changed:
                self._queue.append((free_at + self._proxy.delay_s, data))
                self._size += len(data)
                self._changed.notify_all()
                while self._size > self._most():
                    self._changed.wait()
            if not data:
                return

    def _most(self) -> float:
        rate = self._proxy.bytes_per_s
        return LARGEST_QUEUE if rate is None else rate * (self._proxy.delay_s + QUEUE_S) + PIECE

    def _hand_on(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                due, data = self._queue.popleft()
            if (early := due - time.monotonic()) > 0:
                time.sleep(early)
            try:
                if data:
                    self._target.sendall(data)
                else:
                    self._target.shutdown(socket.SHUT_WR)
            except OSError:
                data = b""
                with contextlib.suppress(OSError):
                    self._source.shutdown(socket.SHUT_RDWR)
            with self._changed:
                self._size -= len(data)
                self._changed.notify_all()
            if not data:
                with self._changed:  # whoever waits for room goes on, and finds its socket shut
                    self._size = -LARGEST_QUEUE * 1000
                    self._changed.notify_all()
                return


def main() -> None:
    """A proxy in a process of its own: python proxy.py PORT DELAY_S BYTES_PER_S; prints its port."""
    import sys

    port, delay_s, rate = sys.argv[1:]
    proxy = Proxy(("127.0.0.1", int(port)), delay_s=float(delay_s), bytes_per_s=float(rate))
    print(proxy.address[1], flush=True)
    sys.stdin.read()  # until the parent closes it
    proxy.close()


if __name__ == "__main__":
    main()
