"""The privacy that one site has spent on one data set, over all its runs: a durable file of JSON lines.

    {"ledger":2,"dataset":…,"site":…,"block":32,"id":…,"sum":…}   the header, whole before the file gets its name
    {"start":3,"run":…,"pid":…,"host":…,"sum":…}           a process holds the lock; 3 is its fencing token
    {"policy":{…},"token":3,"sum":…}                       what holds over all runs; synced before the first step
    {"mechanism":{…},"token":3,"sum":…}                    what the steps that follow are
    {"reserve":32,"token":3,"sum":…}                       synced before the first of these steps is drawn
    {"return":12,"token":3,"sum":…}                        a clean close: steps of that block that were never drawn
    {"torn":32,"token":3,"sum":…}                          in place of a last line that was found damaged

Each line is synced before the next one is written, so a crash can tear only the last. All lines after the header
have one width, so damage cannot hide how many there were. `sum` covers the line and the sum before it: an altered,
lost or moved line is noticed. What no file can notice is that it was deleted, or replaced by an older copy of itself:
a run that goes on does, by the `Mark` that its plan keeps. `id` is random, so that no two files are taken for one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from adp2sgd.errors import LedgerError, PrivacyError
from adp2sgd.files import owner_only
from adp2sgd.privacy.hold import lock, open_regular
from adp2sgd.privacy.ledger_format import decode as _decode
from adp2sgd.privacy.ledger_format import encode as _encode
from adp2sgd.privacy.ledger_format import plain as _plain
from adp2sgd.privacy.ledger_format import sum_of as _sum_of
from adp2sgd.privacy.mechanism import RECORD, Composed, SampledGaussian
from adp2sgd.privacy.policy import Policy, parse

VERSION = 2
KNOWN = (1, VERSION)  # the first one had no policy
WIDTH = 256  # bytes of every line but the header
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_RESTORE = "restore the copy made after the last run; without it nobody can say what this data set has spent"


@dataclass(frozen=True)
class Mark:
    """How far a ledger had come: the bytes of its lines, and the last one's sum, which covers all before it."""

    size: int = 0
    sum: str = ""


@dataclass(kw_only=True)
class Account:
    """A ledger's lines, added up. Reserved steps count as spent until they are returned."""

    dataset: str
    site: str
    block: int  # the most steps that one line reserves, and what a damaged last line counts as
    sum: str
    size: int  # bytes of the sound lines
    unit: str = RECORD  # what the steps protect
    token: int = 0
    holder: str = "no process"
    policy: Policy | None = None
    mechanism: SampledGaussian | None = None
    steps: dict[SampledGaussian, int] = field(default_factory=dict)
    damaged: bool = False  # there is a last line that is torn or altered

    def add(self, entry: dict[str, Any], line: bytes) -> None:
        """Take in one sound line. Raises an exception for one that no ledger writes here."""
        if "start" in entry:
            self.token = entry["start"]
            self.holder = f"process {entry['pid']} on {entry['host']}"
        elif entry["token"] != self.token:
            raise ValueError("written by a process that had lost the ledger")
        elif "mechanism" in entry:
            self.mechanism = SampledGaussian(**entry["mechanism"])
        elif "policy" in entry:
            if not self.open_to(policy := parse(entry["policy"])):
                raise ValueError("a policy that was changed after the first step")
            self.policy = policy
        else:
            self._count(entry.get("reserve", 0) + entry.get("torn", 0) - entry.get("return", 0))
        self.sum, self.size = _sum_of(line), self.size + len(line)

    def _count(self, steps: int) -> None:
        # Without a mechanism on record nothing was ever reserved: a torn line then counts nothing.
        if self.mechanism is not None:
            self.steps[self.mechanism] = self.steps.get(self.mechanism, 0) + steps

    def open_to(self, policy: Policy) -> bool:
        """Whether `policy` may be adopted: there is none, or no step was ever drawn under another one."""
        return self.policy in (None, policy) or not any(count for _, count in self.spent().parts)

    def spent(self) -> Composed:
        """Every step that was or may have been drawn from the data set, by mechanism."""
        steps = dict(self.steps)
        if self.damaged and self.mechanism is not None:
            steps[self.mechanism] = steps.get(self.mechanism, 0) + self.block
        return Composed(tuple(steps.items()))


def require(path: Path, mark: Mark) -> None:
    """Refuse a ledger that lacks what stood in it up to `mark`: an older copy of it, or one that was begun anew."""
    read(path)  # other damage is told first
    before = _content(path)[: mark.size]
    if mark.size and (len(before) < mark.size or not before.rstrip().endswith(f'"sum":"{mark.sum}"}}'.encode())):
        why = "it is an older copy, or its end is damaged"
        raise LedgerError(f"the ledger {path} lacks steps that the run has charged to it: {why}; {_RESTORE}")


def read(path: str | Path) -> Account:
    """What the ledger holds now, without taking its lock (for status and reports).

    A damaged last line counts as a whole block; damage anywhere else is a LedgerError, never a fresh start.
    """
    data = _content(path)
    account = _read_header(path, data)
    start = account.size
    for offset in range(start, len(data), WIDTH):
        line = data[offset : offset + WIDTH]
        entry = _decode(line, account.sum, WIDTH)
        if entry is None and offset + WIDTH >= len(data):
            account.damaged = True
            break
        try:
            account.add(entry or {}, line)
        except (KeyError, TypeError, ValueError, PrivacyError):
            number = 2 + (offset - start) // WIDTH
            raise LedgerError(f"the ledger {path} is damaged at line {number}; {_RESTORE}") from None
    return account


class Ledger:
    """The right to draw noise against one site's data set; at most one process has it.

    Guarantee: a step that `draw` allowed is in the file, synced, before it is allowed, and stays counted whatever
    happens to the process or the machine. Counted steps exceed drawn ones by at most one block per start, and one more
    for a torn line.

    The kernel lock goes with the process, so nothing stale is left by kill -9. It can fail to exclude a second process
    only where it does not reach: file systems that keep locks per host, or a file replaced under its holder. The
    fencing token covers those: every draw sees whether the file is still the one this process wrote last. (A network
    file system may show that some seconds late; the steps drawn until then are of a block that already counts.)
    """

    def __init__(self, path: Path, descriptor: int, account: Account) -> None:
        self.path = path
        self.remaining = 0  # steps reserved and not yet drawn
        self._descriptor = descriptor
        self._account = account

    @classmethod
    def open(
        cls, path: str | Path, *, dataset: str, site: str, unit: str = RECORD, run: str = "", block: int = 32
    ) -> Ledger:
        """Take the ledger of `site` for the data set of the name `dataset`; made where there is none yet.

        `unit` is what its steps protect. Steps that protect single records say nothing about a patient with several,
        so a ledger is for one unit.

        `block` is for a new file; an existing one keeps its own. Raises LedgerError while another process has it.
        """
        path = Path(path).absolute()
        with _told(path, "opened"):
            if not os.path.lexists(path):
                header: dict[str, Any] = {"ledger": VERSION, "dataset": dataset, "site": site, "block": block}
                header |= {"unit": unit} if unit != RECORD else {}
                _create(path, header | {"id": secrets.token_hex(8)})
            descriptor = open_regular(path, os.O_RDWR | os.O_APPEND)
        try:
            _lock(path, descriptor)
            account = read(path)
            for name, here, there in (("data set", dataset, account.dataset), ("site", site, account.site)):
                if here != there:
                    raise LedgerError(
                        f'the ledger {path} is for {name} "{there}", not "{here}"; give each its own ledger'
                    )
            if unit != account.unit:
                raise LedgerError(
                    f'the ledger {path} counts what was spent per "{account.unit}", not per "{unit}", and one says '
                    "nothing of the other; keep to its unit, or use other records"
                )
            ledger = cls(path, descriptor, account)
            ledger._start(run)
        except BaseException:
            os.close(descriptor)
            raise
        _open_ledgers.add(ledger)
        return ledger

    @classmethod
    def closed(cls, path: str | Path) -> Ledger:
        """One that only tells what is spent: it takes no lock, writes nothing, and allows no draw."""
        return cls(Path(path).absolute(), -1, read(path))

    @property
    def unit(self) -> str:
        """What its steps protect: a "record", or a unit of several records."""
        return self._account.unit

    @property
    def block(self) -> int:
        """The most steps that can be reserved at once."""
        return self._account.block

    @property
    def token(self) -> int:
        """Grows with every start."""
        return self._account.token

    @property
    def mark(self) -> Mark:
        """After the last line that this process has read or written."""
        return Mark(self._account.size, self._account.sum)

    @property
    def policy(self) -> Policy | None:
        """What holds over all runs, once it is fixed."""
        return self._account.policy

    def adopt(self, policy: Policy) -> None:
        """Fix what holds over all runs, on disk, before the first step is drawn. No later step can change it."""
        if not self._account.open_to(policy):
            raise LedgerError(f"the policy of the ledger {self.path} is fixed since its first step; keep to it")
        self._refuse_fenced()
        self._append({"policy": policy.entry(), "token": self.token})

    def spent(self) -> Composed:
        """Every step that was or may have been drawn from the data set in any run; what is reserved counts."""
        return self._account.spent()

    def reserve(self, steps: int, mechanism: SampledGaussian) -> None:
        """Count `steps` as spent, on disk, before any is drawn. If that fails, no step is reserved."""
        if not 1 <= steps <= self.block:
            raise LedgerError(f"steps = {steps} cannot be reserved at once; use 1 to {self.block}, the ledger's block")
        if self.remaining:
            raise LedgerError(f"{self.remaining} reserved steps are left; draw them first")
        self._refuse_fenced()
        if mechanism != self._account.mechanism:
            self._append({"mechanism": asdict(mechanism), "token": self.token})
        self._append({"reserve": steps, "token": self.token})
        self._refuse_fenced()
        self.remaining = steps

    def draw(self) -> None:
        """Use one reserved step: call it before each gradient and its noise."""
        if not self.remaining:
            raise LedgerError("no reserved step is left; reserve a block first")
        self._refuse_fenced()
        self.remaining -= 1

    def close(self) -> None:
        """Return what was reserved and not drawn, and release the lock. May be called twice."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(LedgerError):  # a return that cannot be written counts too much, which is safe
            self._refuse_fenced()
            if self.remaining:
                self._append({"return": self.remaining, "token": self.token})
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, run: str) -> None:
        account, token = self._account, self.token + 1
        if account.damaged:
            self._replace_damaged()
            token += 1  # the damaged line may have held a token
        entry = {"start": token, "run": _plain(run), "pid": os.getpid(), "host": _plain(socket.gethostname())}
        self._append(entry)

    def _replace_damaged(self) -> None:
        """Write a `torn` line over the damaged one. Interrupted at any point, the last line still counts as a block."""
        account = self._account
        entry = {"torn": account.block, "token": account.token}
        line = _encode(entry, account.sum, WIDTH)
        with _told(self.path, "mended"), open(open_regular(self.path, os.O_RDWR), "r+b", buffering=0) as file:
            file.seek(account.size)
            if file.write(line) != WIDTH:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        account.damaged = False
        account.add(entry, line)

    def _append(self, entry: dict[str, Any]) -> None:
        """Write and sync one line; if that fails, leave the file as it was."""
        size, line = self._account.size, _encode(entry, self._account.sum, WIDTH)
        with _told(self.path, "written"):
            try:
                written = 0
                while written < WIDTH:
                    written += os.write(self._descriptor, line[written:])
                os.fsync(self._descriptor)
            except OSError:
                if os.fstat(self._descriptor).st_size == size + written:  # never cut off what a successor wrote
                    os.ftruncate(self._descriptor, size)
                raise
        self._account.add(entry, line)

    def _refuse_fenced(self) -> None:
        if self._descriptor < 0:
            raise LedgerError(f"the ledger {self.path} is closed in this process; open it again")
        try:
            found = os.stat(self.path)
        except OSError:
            found = None
        own = os.fstat(self._descriptor)
        if found is None or (found.st_dev, found.st_ino, found.st_size) != (own.st_dev, own.st_ino, self._account.size):
            self.remaining = 0
            raise LedgerError(f"the ledger {self.path} changed hands ({_holder(self.path)}); stop this process")

    def _forget(self) -> None:
        os.close(self._descriptor)
        self._descriptor, self.remaining = -1, 0


_open_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked child must neither draw nor keep the lock alive after its parent.
    for ledger in list(_open_ledgers):
        if ledger._descriptor >= 0:
            ledger._forget()


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def _told(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "free disk space and start again" if error.errno in _FULL else "check the folder and its rights"
        raise LedgerError(f"the ledger {path} cannot be {action} ({error.strerror}); {fix}") from None


def _create(path: Path, header: dict[str, Any]) -> None:
    """Give the file its name only when the header is on disk, where locks work. If another process was quicker, its
    file stays."""
    if header["block"] < 1:
        raise LedgerError(f"block = {header['block']} reserves nothing; use at least 1 step")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=owner_only) as file:
            lock(draft, file.fileno())
            file.write(_encode(header, "", 0))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(path: Path, descriptor: int) -> None:
    if not lock(path, descriptor):
        raise LedgerError(f"the ledger {path} is in use by {_holder(path)}; stop it or wait for it to end")
    if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
        raise LedgerError(f"the ledger {path} was replaced while it was opened; start again")


def _content(path: str | Path) -> bytes:
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            return file.read()
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read ({error.strerror}); name the site's own ledger") from None


def _holder(path: Path) -> str:
    try:
        return read(path).holder
    except LedgerError:
        return "another process"


def _read_header(path: str | Path, data: bytes) -> Account:
    line = data[: data.find(b"\n") + 1]
    header = _decode(line, "", 0)
    if header is None or "ledger" not in header:
        raise LedgerError(f"the ledger {path} is damaged at line 1; {_RESTORE}")
    if header["ledger"] not in KNOWN:
        raise LedgerError(f"the ledger {path} has version {header['ledger']}; install an adp2sgd that knows it")
    names = {name: header[name] for name in ("dataset", "site", "block")}
    return Account(**names, unit=header.get("unit", RECORD), sum=_sum_of(line), size=len(line))
