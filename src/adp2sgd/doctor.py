"""`adp2sgd doctor`: whether this machine can run what it should, tried and not only looked up.

Each check returns one `Finding`: what was found, and what to do if that is not enough.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GOOD, WARNING, BAD = "good", "warning", "bad"
FREE_DISK = 1 << 30  # bytes that a run's folder should have
FREE_MEMORY = 2 << 30
OPEN_FILES = 1024
SLOW_SYNC_S = 0.05  # a private learner waits for its ledger's disk at each new block


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`state`: good, warning (something will be slow or missing), bad (runs will fail)."""

    name: str
    state: str
    found: str
    fix: str = ""


def examine(folder: Path) -> list[Finding]:
    """All checks. `folder` is where runs are to be kept; nothing is left in it."""
    checks: tuple[Callable[[Path], Iterator[Finding]], ...] = (
        _python, _packages, _torch, _gpus, _cores, _memory, _disk, _locks, _shared_memory, _open_files, _browser,
    )  # fmt: skip
    return [finding for check in checks for finding in _tried(check, folder)]


def _tried(check: Callable[[Path], Iterator[Finding]], folder: Path) -> list[Finding]:
    """A check that fails is a finding too."""
    try:
        return list(check(folder))
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        return [Finding(name=name, state=BAD, found=f"{type(error).__name__}: {error}", fix="repair this first")]


def _python(_: Path) -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    state = GOOD if sys.version_info >= (3, 11) else BAD
    yield Finding(
        name="Python",
        state=state,
        found=f"{found} at {sys.executable}",
        fix="" if state == GOOD else "use 3.11 or newer",
    )
    if sys.platform != "linux":
        yield Finding(name="system", state=WARNING, found=sys.platform, fix="train needs Linux; simulate works here")


def _packages(_: Path) -> Iterator[Finding]:
    """What the package declares, extras left out."""
    import re
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        wanted, own = requires("adp2sgd") or [], version("adp2sgd")
    except PackageNotFoundError:
        yield Finding(name="packages", state=WARNING, found="adp2sgd is not installed", fix="pip install adp2sgd")
        return
    missing = []
    names = [found[0] for each in wanted if "extra ==" not in each and (found := re.match(r"[\w.-]+", each))]
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding(name="packages", state=BAD, found=f"missing: {', '.join(missing)}", fix="pip install adp2sgd")
    else:
        yield Finding(name="packages", state=GOOD, found=f"adp2sgd {own} and the {len(names)} packages that it needs")


def _torch(_: Path) -> Iterator[Finding]:
    import torch

    total = float((torch.ones(64, 64) @ torch.ones(64, 64)).sum())
    state = GOOD if total == 64.0**3 else BAD
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    yield Finding(
        name="PyTorch", state=state, found=f"{torch.__version__}, {build}", fix="" if state == GOOD else "reinstall it"
    )


def _gpus(_: Path) -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for k in range(torch.cuda.device_count()):
            yield _gpu(k)
    elif shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        fix = (
            "install a build of PyTorch for CUDA"
            if torch.version.cuda is None
            else "update the driver, or look at nvidia-smi"
        )
        yield Finding(
            name="GPU", state=WARNING, found="there is an NVIDIA driver, but PyTorch does not reach a GPU", fix=fix
        )
    else:
        yield Finding(name="GPU", state=GOOD, found="none; runs use the CPU")


def _gpu(number: int) -> Finding:
    """One device, with a product computed on it."""
    import torch

    device = torch.device("cuda", number)
    total = float((torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)).sum())
    free, whole = torch.cuda.mem_get_info(device)
    found = f"{torch.cuda.get_device_name(device)}, {_size(free)} of {_size(whole)} free"
    if total != 256.0**3:
        return Finding(name=f"GPU {number}", state=BAD, found=f"{found}; a product is wrong", fix="do not use it")
    short = free < FREE_MEMORY
    return Finding(
        name=f"GPU {number}",
        state=WARNING if short else GOOD,
        found=found,
        fix="end what uses its memory" if short else "",
    )


def _cores(_: Path) -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(name="cores", state=GOOD, found=f"{usable} for this process")


def _memory(_: Path) -> Iterator[Finding]:
    facts = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            key, value = line.split(":")
            facts[key] = int(value.split()[0]) * 1024
    if "MemAvailable" in facts:
        free, short = facts["MemAvailable"], facts["MemAvailable"] < FREE_MEMORY
        fix = "use fewer learners, or end other programs" if short else ""
        found = f"{_size(free)} of {_size(facts['MemTotal'])} free"
        yield Finding(name="memory", state=WARNING if short else GOOD, found=found, fix=fix)


def _disk(folder: Path) -> Iterator[Finding]:
    """Space, and the time of a write that is on disk when it returns."""
    place = _existing(folder)
    free = shutil.disk_usage(place).free
    with tempfile.NamedTemporaryFile(dir=place) as file:
        file.write(bytes(4096))
        file.flush()
        began = time.perf_counter()
        os.fsync(file.fileno())
        took = time.perf_counter() - began
    found = f"{_size(free)} free at {place.resolve()}; a synced write takes {1000 * took:.1f} ms"
    if free < FREE_DISK:
        yield Finding(name="disk", state=WARNING, found=found, fix="make room, or choose another --out")
    elif took > SLOW_SYNC_S:
        yield Finding(
            name="disk", state=WARNING, found=found, fix="keep ledgers on a local disk: private runs wait for it"
        )
    else:
        yield Finding(name="disk", state=GOOD, found=found)


def _locks(folder: Path) -> Iterator[Finding]:
    """Whether a lock on a file keeps a second opener out: ledgers and runs rely on it."""
    import fcntl

    with tempfile.NamedTemporaryFile(dir=_existing(folder)) as one, open(one.name, "rb") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            fix = "keep runs and ledgers on another file system"
            yield Finding(name="file locks", state=BAD, found=f"not supported here ({error.strerror})", fix=fix)
            return
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield Finding(name="file locks", state=GOOD, found="a second process is kept out")
        else:
            fix = "keep runs and ledgers on another file system: here two processes could spend one budget"
            yield Finding(name="file locks", state=BAD, found="a second lock was granted", fix=fix)


def _shared_memory(_: Path) -> Iterator[Finding]:
    """What `train` moves models through: anonymous memory that is written and read back."""
    if not hasattr(os, "memfd_create"):
        yield Finding(name="shared memory", state=WARNING, found="none", fix="train needs Linux; simulate works here")
        return
    descriptor = os.memfd_create("adp2sgd-doctor")
    try:
        os.ftruncate(descriptor, 1 << 20)
        os.pwrite(descriptor, b"adp2sgd", 1 << 19)
        good = os.pread(descriptor, 7, 1 << 19) == b"adp2sgd"
    finally:
        os.close(descriptor)
    fix = "" if good else "allow memfd_create in this container"
    yield Finding(
        name="shared memory", state=GOOD if good else BAD, found="works" if good else "reads back wrong", fix=fix
    )


def _open_files(_: Path) -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    few = hard not in (resource.RLIM_INFINITY, -1) and hard < OPEN_FILES
    fix = f"raise the limit (ulimit -Hn) to {OPEN_FILES:,} for runs of many learners" if few else ""
    yield Finding(name="open files", state=WARNING if few else GOOD, found=f"{soft:,}, at most {most}", fix=fix)


def _browser(_: Path) -> Iterator[Finding]:
    from adp2sgd.errors import ConfigError
    from adp2sgd.report.browser import find_browser

    try:
        yield Finding(name="browser", state=GOOD, found=find_browser())
    except ConfigError:
        yield Finding(name="browser", state=GOOD, found="none; only report --format png and pdf need Chromium")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
