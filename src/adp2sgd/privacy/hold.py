"""The ledger as a file: opened only if it is a regular one, and held by one process through a kernel lock."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from adp2sgd import files
from adp2sgd.errors import LedgerError

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path, flags: int) -> int:
    """A descriptor of the regular file `path`; anything else is refused, and never waited for.

    Raises LedgerError for what is not a regular file, and OSError for what cannot be opened.
    """
    _refuse_other(path, os.stat(path).st_mode)  # first: to open a device can move it
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _refuse_other(path, os.fstat(descriptor).st_mode)
    except LedgerError:
        os.close(descriptor)
        raise
    return descriptor


def lock(path: Path, descriptor: int) -> bool:
    """Hold the file until the descriptor is closed; False while another process holds it.

    Raises LedgerError where the file system has no locks, or has some that exclude nobody: each open file has its own
    lock, so a second one of this process must be refused.
    """
    try:
        if not files.lock(descriptor):
            return False
        second = open_regular(path, os.O_RDWR)
        try:
            replaced = not os.path.samestat(os.fstat(second), os.fstat(descriptor))  # the caller must look at it anyhow
            if replaced or not files.lock(second):
                return True
        finally:
            os.close(second)
    except OSError as error:
        raise _lockless(path, error.strerror) from None
    raise _lockless(path, "a second lock was granted")


def _refuse_other(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no file")
        raise LedgerError(f"the ledger {path} is {kind}, not a regular file; name a file, or remove what is there")


def _lockless(path: Path, why: str | None) -> LedgerError:
    return LedgerError(
        f"the folder {path.parent} is on a file system without working locks ({why}), where two processes could spend "
        "the same budget at once; keep the ledger on a local disk"
    )
