"""TLS over one socket, through buffers in memory: encrypted bytes cross the kernel in large pieces.

An `ssl.SSLSocket` reads and writes every record of 16 KiB with system calls of its own. Here OpenSSL works on memory,
and the socket moves 256 KiB at a time; that halves the time of a large transfer (benchmarks/network.py).
One thread uses a stream at a time.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from typing import Any

from adp2sgd.errors import RefusedError
from adp2sgd.exchange import wire

WINDOW = 1 << 18  # bytes that are encrypted, sent or received at a time
LINGER_S = 1.0  # for the peer to read why it was refused

ALERTS = {  # OpenSSL's name of an alert that the peer sent → what the peer means
    "CERTIFICATE_EXPIRED": "it refuses this site's certificate, which has expired or is not yet valid by its clock",
    "CERTIFICATE_REVOKED": "it refuses this site's certificate, which was revoked",
    "UNKNOWN_CA": "it does not know the authority that signed this site's certificate",
    "CERTIFICATE_REQUIRED": "it requires a certificate and got none",
    "BAD_CERTIFICATE": "it refuses this site's certificate",
    "CERTIFICATE_UNKNOWN": "it refuses this site's certificate",
    "UNSUPPORTED_CERTIFICATE": "it refuses the purpose or the key type of this site's certificate",
    "DECRYPT_ERROR": "it cannot verify this site's certificate or key",
    "PROTOCOL_VERSION": "it does not speak TLS 1.3",
    "ACCESS_DENIED": "it denies access",
}


class ClosedError(Exception):
    """The connection ended; the text says how."""


class SecureStream:
    """One end of a TLS connection over a connected socket."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self.socket = connection
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server_side)
        self._received = memoryview(bytearray(WINDOW))
        self._unsent = memoryview(b"")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    # --- While two sites meet: blocking, with a deadline ---

    def handshake(self, deadline: float) -> bytes:
        """The peer's certificate (DER). Raises RefusedError with the reason why one side refuses the other's."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._push(deadline)
                self._pull(deadline)
            except ssl.SSLError as error:
                self.close(reason=True)
                raise RefusedError(_explained(error)) from None
            else:
                self._push(deadline)
                return self._tls.getpeercert(binary_form=True) or b""

    def write_frame(self, header: dict[str, Any], deadline: float) -> None:
        self.encrypt(memoryview(wire.frame(header)))
        self._push(deadline)

    def read_frame(self, deadline: float) -> dict[str, Any]:
        """The next frame; only frames without a body are read here."""
        header, body = wire.lengths(self._read_whole(wire.HEAD.size, deadline))
        if body:
            raise RefusedError("a model before the two sites have agreed")
        return wire.parse(self._read_whole(header, deadline))

    def _read_whole(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        got = 0
        while got < count:
            read = self.read_into(memoryview(data)[got:])
            if not read:
                self._pull(deadline)
            got += read
        return data

    def _push(self, deadline: float) -> None:
        self.socket.settimeout(_left(deadline))
        try:
            self.socket.sendall(self._leaving.read())
        except OSError as error:
            raise ClosedError(_words(error)) from None

    def _pull(self, deadline: float) -> None:
        self.socket.settimeout(_left(deadline))
        self.fill()

    # --- While a link stands: non-blocking ---

    def start(self) -> None:
        """From here on nothing waits."""
        self.socket.setblocking(False)

    @property
    def unsent(self) -> bool:
        return bool(len(self._unsent) or self._leaving.pending)

    def encrypt(self, data: memoryview) -> None:
        """Prepare `data` for `flush`."""
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            raise ClosedError(_explained(error)) from None

    def flush(self) -> int:
        """Hand the kernel what it takes now; returns bytes."""
        if not len(self._unsent):
            self._unsent = memoryview(self._leaving.read())
        if not len(self._unsent):
            return 0
        try:
            sent = self.socket.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise ClosedError(_words(error)) from None
        self._unsent = self._unsent[sent:]
        return sent

    def fill(self) -> int:
        """Take what the kernel has, at most one window; returns bytes."""
        try:
            count = self.socket.recv_into(self._received)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise ClosedError(_words(error)) from None
        if not count:
            raise ClosedError("the peer closed the connection")
        self._arrived.write(self._received[:count])
        return count

    def read_into(self, target: memoryview) -> int:
        """Decrypted bytes into `target`; 0 if more must arrive first."""
        try:
            count = self._tls.read(len(target), target)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLZeroReturnError:
            raise ClosedError("the peer closed the connection") from None
        except ssl.SSLError as error:
            raise RefusedError(_explained(error)) from None
        if not count:
            raise ClosedError("the peer closed the connection")
        return int(count)

    def close(self, *, reason: bool = False) -> None:
        """End the connection. `reason`: something that the peer must still read is under way, an alert or a frame.

        A socket that is closed with unread bytes resets the connection, and the peer loses what it has not read.
        """
        with contextlib.suppress(OSError, ssl.SSLError, ValueError):
            self.socket.settimeout(LINGER_S)
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.socket.sendall(bytes(self._unsent) + self._leaving.read())
            if reason:
                self._linger()
        self.socket.close()

    def _linger(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)
        until = time.monotonic() + LINGER_S
        while (left := until - time.monotonic()) > 0:
            self.socket.settimeout(left)
            if not self.socket.recv_into(self._received):
                return


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ClosedError("the peer did not answer in time")
    return left


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "the peer did not answer in time"
    return error.strerror or type(error).__name__


def _explained(error: ssl.SSLError) -> str:
    """What a failed handshake means, in words: this side refuses, or the peer's alert."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    name = (error.reason or "").upper()
    if "_ALERT_" in name:
        alert = name.partition("_ALERT_")[2]
        return ALERTS.get(alert, f"it sent the TLS alert {alert.lower().replace('_', ' ')}")
    if name == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it sent no certificate"
    if name in {"UNSUPPORTED_PROTOCOL", "WRONG_VERSION_NUMBER", "HTTP_REQUEST", "WRONG_SSL_VERSION"}:
        return "it does not speak TLS 1.3"
    return f"TLS failed: {name.lower().replace('_', ' ') or type(error).__name__}"
