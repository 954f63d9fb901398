"""Files: whole or not at all, for the owner alone, locked; and JSON that every program reads."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def owner_only(path: str, flags: int) -> int:
    """An `opener` for `open`: a new file can be read by its owner alone, whatever the umask."""
    return os.open(path, flags, 0o600)


@contextmanager
def replacing(target: Path, *, private: bool = False, durable: bool = True) -> Iterator[Path]:
    """A temporary file that takes the place of `target` in one step.

    `private`: its owner alone may read it. Else the umask decides, whatever mode the writer has given it.
    `durable`: its content is on disk first, so that it survives a power failure.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with open(part, "xb", opener=owner_only if private else None) as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
    try:
        yield part
        part.chmod(mode)
        if durable:
            with part.open("rb") as file:
                os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock the open file until it is unlocked or closed; False while another open file has its lock.

    The lock is the kernel's, so a killed process leaves none behind. A forked process shares it.
    Raises OSError where the file system has no locks, and ImportError where the system has none.
    """
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Also for the processes that were forked meanwhile, and have the file open too."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: a number that is not finite, which JSON has no word for, is null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
