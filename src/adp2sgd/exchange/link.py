"""One standing connection with a peer. One thread reads and writes it; others only put frames into its queue.

Small frames pass between the parts of a snapshot. The queue is bounded: a peer that stops reading slows nobody but its
own link. Each side sends a beat when it has sent nothing else for a while; a link that brought nothing for DEAD_S is
given up, so a connection that was cut without a word does not stay.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from typing import Any

from torch import Tensor

from adp2sgd.errors import RefusedError
from adp2sgd.exchange import wire
from adp2sgd.exchange.handshake import Met, RefusedByPeerError, refusal
from adp2sgd.exchange.reader import Host, Reader
from adp2sgd.exchange.streams import Outgoing
from adp2sgd.exchange.tls import WINDOW, ClosedError, SecureStream

BEAT_S = 5.0
DEAD_S = 20.0
STALL_S = 60.0  # frames wait, and the peer's machine takes none
FLUSH_S = 2.0  # for what is queued when a link is closed
QUEUE = 64  # small frames
STREAMS = 2  # snapshots under way in one direction: an exchange, and a copy for a site that comes back


class Link:
    """`run` is the link's thread; all other public methods are for other threads."""

    def __init__(self, stream: SecureStream, met: Met, me: int, host: Host) -> None:
        self.met, self.number = met, met.peer.number
        self.since = time.time()
        self.bytes_out = self.frames_out = 0
        self._stream, self._me, self._host = stream, me, host
        self._mutex = threading.Lock()
        self._small: deque[bytes] = deque()
        self._streams: deque[Outgoing] = deque()
        self._cancelled: deque[tuple[int, int]] = deque()
        self._body = memoryview(b"")  # of the frame that is being written
        self._ending: str | None = None
        self._closed = False
        self._opened = 0  # streams that this side began
        self._bell, self._button = socket.socketpair()
        self.reader = Reader(stream, host, me, self.number, self._stop)
        self._spoke = self._moved = time.monotonic()

    # --- Called from other threads ---

    def send(self, header: dict[str, Any], snapshot: Tensor | None = None) -> bool:
        """Queue a frame, and the snapshot that it announces. False if the link is closing or its queue is full."""
        with self._mutex:
            if self._closed or self._ending is not None or len(self._small) >= QUEUE:
                return False
            if snapshot is None:
                self._small.append(wire.frame(header))
            elif len(self._streams) >= STREAMS:
                return False
            else:
                self._opened += 1
                header["snapshot"]["stream"] = self._opened
                self._small.append(wire.frame(header))
                key = (header["initiator"], header["number"])
                self._streams.append(Outgoing(key, self._opened, snapshot, self._host.wire_dtype))
        self._ring()
        return True

    def cancel(self, key: tuple[int, int]) -> None:
        """Stop what is under way for an exchange, in both directions."""
        self._cancelled.append(key)
        self._ring()

    def close(self, reason: str, refused: RefusedError | None = None) -> None:
        """End the link once what is queued has left. `refused`: tell the peer why."""
        with self._mutex:
            if self._ending is None:
                self._ending = reason
                if refused is not None:
                    self._small.append(wire.frame(refusal(refused)))
        self._ring()

    def abandon(self) -> None:
        """End a link whose `run` is never called."""
        self._shut(False)

    @property
    def idle(self) -> bool:
        """Nothing waits to be sent."""
        return not (self._small or self._streams or len(self._body) or self._stream.unsent)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._button.send(b"!")

    # --- The link's thread ---

    def run(self) -> str:
        """Read and write until the link ends; returns why it did."""
        self._stream.start()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        told = False
        try:
            self.reader.drain()  # what came together with WELCOME
            with selectors.DefaultSelector() as selector:
                selector.register(self._stream.socket, selectors.EVENT_READ)
                selector.register(self._bell, selectors.EVENT_READ)
                return self._loop(selector)
        except RefusedByPeerError as refused:
            return f"it refuses this site: {refused}"
        except RefusedError as refused:
            told = self._tell(refused)
            return str(refused)
        except ClosedError as closed:
            return self._ending or str(closed)
        finally:
            self._shut(told or self._ending is not None)

    def _loop(self, selector: selectors.BaseSelector) -> str:
        writing, until = False, None
        while True:
            while self._cancelled:
                self._stop(self._cancelled.popleft())
            progress = self._write()
            progress = self.reader.read() or progress
            if self._ending is not None:
                until = until or time.monotonic() + FLUSH_S
                if not (self._small or len(self._body) or self._stream.unsent) or time.monotonic() > until:
                    return self._ending
            if progress:
                continue
            if writing != self._stream.unsent:
                writing = self._stream.unsent
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
                selector.modify(self._stream.socket, events)
            selector.select(self._keep_time() if until is None else 0.1)
            with contextlib.suppress(BlockingIOError):
                while self._bell.recv(4096):
                    pass

    def _keep_time(self) -> float:
        """Beat when it is time; returns seconds until the next look. Raises ClosedError for a dead link."""
        now = time.monotonic()
        if now - self.reader.heard > DEAD_S:
            raise ClosedError(f"nothing came for {DEAD_S:g} s")
        if self._stream.unsent and now - self._moved > STALL_S:
            raise ClosedError(f"the peer has read nothing for {STALL_S:g} s")
        if now - self._spoke >= BEAT_S and self.idle:
            self.send({"kind": wire.BEAT})
            return 0.0
        beat = self._spoke + BEAT_S - now if self.idle else BEAT_S
        return max(0.0, min(beat, self.reader.heard + DEAD_S + 0.1 - now))

    def _write(self) -> bool:
        if not self._stream.unsent:
            while self._streams and self._streams[0].ended and not len(self._body):  # sent, cancelled or empty
                self._host.sent(self._streams.popleft().vector)
            for piece in self._pieces():
                self._stream.encrypt(piece)
        sent = self._stream.flush()
        if sent:
            self.bytes_out += sent
            self._moved = self._spoke = time.monotonic()
        return sent > 0

    def _pieces(self) -> list[memoryview]:
        """What to encrypt next: the rest of a frame's body, small frames, or the next part of a snapshot."""
        pieces: list[memoryview] = []
        if not len(self._body):
            with self._mutex:
                frames = list(self._small)
                self.frames_out += len(frames)  # first: whoever finds nothing queued finds it counted
                self._small.clear()
            if frames:
                return [memoryview(b"".join(frames))]
            if not self._streams or self._ending is not None:
                return []
            head, self._body = self._streams[0].frame()
            pieces.append(memoryview(head))
        pieces.append(self._body[:WINDOW])
        self.frames_out += len(self._body) <= WINDOW
        self._body = self._body[WINDOW:]
        return pieces

    def _stop(self, key: tuple[int, int]) -> None:
        for outgoing in list(self._streams):
            if outgoing.key == key:
                outgoing.end()
        self.reader.forget(key)

    def _tell(self, refused: RefusedError) -> bool:
        """Send the reason, if the connection still takes it."""
        with contextlib.suppress(ClosedError, OSError):
            if not self._stream.unsent and not len(self._body):
                self._stream.encrypt(memoryview(wire.frame(refusal(refused))))
                return True
        return False

    def _shut(self, told: bool) -> None:
        with self._mutex:
            self._closed = True
        self._stream.close(reason=told)
        self.reader.end()
        while self._streams:
            self._host.sent(self._streams.popleft().vector)
        self._bell.close()
        self._button.close()
