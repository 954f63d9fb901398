"""A cell: one thing that is measured once, kept in one JSON file, and never measured again."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adp2sgd.errors import ConfigError, RunError
from adp2sgd.record import versions

RUNNING = ".running"  # below the results: runs that are under way or were interrupted
Record = Mapping[str, Any]
"""What a cell's file holds: study, name, cell (its identity), device, versions, seconds, and the figures."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the command line asks for; empty means the study's own."""

    quick: bool = False
    models: tuple[str, ...] = ()
    noise: tuple[float, ...] = ()
    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    epochs: float | None = None
    momentum: float = 0.0
    private: bool = False
    processes: bool = False
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`identity` tells it from all others and gives the file's name; `measure(scratch, quiet)` gives its figures.

    `scratch` is a folder that outlives an interruption, so that `measure` can go on where it was.
    """

    study: str
    identity: Mapping[str, Any]
    measure: Callable[[Path, bool], dict[str, Any]] = field(compare=False)

    @property
    def name(self) -> str:
        """Letters, digits, dots and dashes only."""
        parts = (value if isinstance(value, str) else f"{key}{value:g}" for key, value in self.identity.items())
        return "-".join(part.replace("_", "").replace("/", "-").replace(" ", "-") for part in parts if part)

    def path(self, out: Path) -> Path:
        return out / self.study / f"{self.name}.json"


def measured(cell: Cell, out: Path, *, quiet: bool = True) -> Record:
    """The cell's record: read where it is finished, else measured (or resumed) and written in one piece."""
    path = cell.path(out)
    if path.exists():
        return read(path)
    scratch = out / RUNNING / cell.study / cell.name
    with _alone(scratch):
        if path.exists():
            return read(path)
        before = time.perf_counter()
        figures = cell.measure(scratch, quiet)
        whole = {
            "study": cell.study,
            "name": cell.name,
            "cell": dict(cell.identity),
            "device": device_name(figures.pop("device", "cpu")),
            "versions": versions(),
            "seconds": round(time.perf_counter() - before, 3),
            **figures,
        }
        _write(path, whole)
    shutil.rmtree(scratch, ignore_errors=True)
    return whole


def read(path: Path) -> Record:
    """A finished cell."""
    try:
        found: Record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it and run its cell again") from None
    return found


def finished(out: Path, study: str) -> list[Record]:
    """Every finished cell of a study, in the order of their names."""
    return [read(path) for path in sorted((out / study).glob("*.json"))]


def run_all(cells: Sequence[Cell], out: Path, *, jobs: int = 1, quiet: bool = False, say: Say = print) -> list[Record]:
    """All cells' records, in order. Missing ones are measured, `jobs` at a time in processes of their own if > 1."""
    missing = [cell for cell in cells if not cell.path(out).exists()]
    if jobs > 1 and len(missing) > 1:
        for number, cell in enumerate(_in_processes(missing, out, jobs), 1):
            say(f"{number} of {len(missing)}: {cell.study} {cell.name}")
    for number, cell in enumerate(missing, 1):
        if not cell.path(out).exists():
            say(f"{number} of {len(missing)}: {cell.study} {cell.name}")
            measured(cell, out, quiet=quiet)
    return [read(cell.path(out)) for cell in cells]


def _in_processes(cells: Sequence[Cell], out: Path, jobs: int) -> Iterator[Cell]:
    """Measure the cells in `jobs` processes; each is given back when it is finished. An error ends all of it."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        waiting = {pool.submit(measured, cell, out): cell for cell in cells}
        try:
            for done in as_completed(waiting):
                done.result()
                yield waiting[done]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def device_name(device: str) -> str:
    """The device in words: the GPU's name, or the processor's."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    return f"CPU ({name}), {torch.get_num_threads()} thread(s)"


def _write(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)


@contextmanager
def _alone(scratch: Path) -> Iterator[None]:
    """The only process that measures this cell; another one is refused. The kernel frees the lock if we are killed."""
    import fcntl

    scratch.mkdir(parents=True, exist_ok=True)
    root = next(parent for parent in scratch.parents if parent.name == RUNNING)
    (root / ".gitignore").write_text("*\n", encoding="utf-8")
    with (scratch / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{scratch.name} is being measured by another process; wait for it") from None
        yield
