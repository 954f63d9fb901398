"""The lines of a ledger: JSON padded to one width, each with a checksum that also covers the line before it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from adp2sgd.errors import LedgerError


def encode(entry: dict[str, Any], previous: str, width: int) -> bytes:
    """A line of `width` bytes (0: unpadded) that follows the line with checksum `previous`."""
    body = json.dumps(entry, separators=(",", ":"), allow_nan=False)[:-1]
    digest = hashlib.sha256((previous + body).encode()).hexdigest()[:32]
    line = f'{body},"sum":"{digest}"}}'.ljust(width - 1).encode() + b"\n"
    if width and len(line) != width:
        raise LedgerError(f"a ledger line of {len(line)} bytes exceeds {width}; use a shorter sampler name")
    return line


def decode(line: bytes, previous: str, width: int) -> dict[str, Any] | None:
    """The entry; None unless the line is byte for byte what `encode` writes after the line with checksum `previous`."""
    try:
        entry = json.loads(line)
        del entry["sum"]
        return entry if encode(entry, previous, width) == line else None
    except (ValueError, TypeError, KeyError, LedgerError):
        return None


def sum_of(line: bytes) -> str:
    """The checksum of a whole line."""
    return str(json.loads(line)["sum"])


def plain(text: str) -> str:
    """A name reduced to characters that a line may hold."""
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in text)[:60]
