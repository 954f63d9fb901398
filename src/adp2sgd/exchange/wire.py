"""What two sites send each other: frames of a small JSON header and, for parts of a snapshot, raw numbers.

    frame  = bytes of the header (uint32), bytes of the body (uint32), header, body      all little-endian
    header = {"kind": …}, with `kind` in capitals while two sites meet, a protocol message's name, or a control's name

A message with a snapshot announces its type and length; the numbers follow in frames of kind `chunk`, so that other
frames pass between them. Nothing is ever unpickled. TLS authenticates every byte, so there is no checksum.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch

from adp2sgd.errors import RefusedError
from adp2sgd.exchange.duplex import KINDS
from adp2sgd.exchange.protocol import Message
from adp2sgd.progress import from_rows, to_rows

HEAD = struct.Struct("<II")
LARGEST_HEADER = 1 << 18  # bytes: a HELLO holds the run's text, a control message may hold a roster
CHUNK = 2 << 20  # bytes of a snapshot in one frame
LARGEST_NUMBER = 1 << 62
LARGEST_REASON = 500  # characters of a reason that a peer may make this site log

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

CHUNK_KIND = "chunk"
BEAT = "beat"  # sent when nothing else was, so that a dead connection is noticed
FIELDS = ("sender", "receiver", "initiator", "number")


def frame(header: Mapping[str, Any], body_bytes: int = 0) -> bytes:
    """The frame up to its body. Raises RefusedError if the header is too large to send."""
    packed = json.dumps(header, separators=(",", ":")).encode()
    if len(packed) > LARGEST_HEADER:
        raise RefusedError(f"a {header['kind']} frame of {len(packed):,} bytes exceeds the limit of {LARGEST_HEADER:,}")
    return HEAD.pack(len(packed), body_bytes) + packed


def lengths(head: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Bytes of the header and of the body that follow. Raises RefusedError beyond the limits."""
    header, body = HEAD.unpack(head)
    if header > LARGEST_HEADER or body > CHUNK or not header:
        raise RefusedError(f"a frame of {header:,} + {body:,} bytes, which no site of this version sends")
    return header, body


def parse(data: bytes | bytearray) -> dict[str, Any]:
    """A frame's header. Raises RefusedError for anything but a JSON object with a `kind`."""
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        raise RefusedError("a frame whose header is not JSON") from None
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise RefusedError("a frame without a kind")
    return header


def encode(message: Message, dtype: torch.dtype, reason: str = "") -> dict[str, Any]:
    """The header of a message, with the announcement of its snapshot if it has one."""
    header: dict[str, Any] = {"kind": type(message).__name__}
    header |= {name: getattr(message, name) for name in FIELDS}
    header["progress"] = to_rows(message.progress)
    if message.snapshot is not None:
        header["snapshot"] = {"dtype": NAMES[dtype], "length": message.snapshot.numel()}
    if reason:
        header["reason"] = reason
    return header


def decode(header: Mapping[str, Any]) -> Message:
    """The message without its snapshot. Raises RefusedError for anything that is not one."""
    kind = KINDS.get(header["kind"])
    values = [header.get(name) for name in FIELDS]
    if kind is None or not all(_whole(value) for value in values):
        raise RefusedError(f"a malformed message of kind {str(header['kind'])[:40]!r}")
    rows = header.get("progress")
    if not isinstance(rows, list) or not all(_count(row) for row in rows):
        raise RefusedError("a message with malformed step counts")
    fields: dict[str, Any] = dict(zip(FIELDS, values, strict=True))
    return kind(**fields, progress=from_rows(rows))


def reason_in(header: Mapping[str, Any]) -> str:
    """The reason that a peer gives, as one printable line of bounded length."""
    text = header.get("reason")
    kept = "".join(character for character in str(text or "") if character.isprintable())
    return kept[:LARGEST_REASON] or "no reason given"


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_NUMBER


def _count(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 4 and all(_whole(value) for value in row)
