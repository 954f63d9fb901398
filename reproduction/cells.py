"""A cell: one thing that is measured once, kept in one JSON file, and never measured again."""

from __future__ import annotations

import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adp2sgd import files
from adp2sgd.engine.interrupt import Interrupt
from adp2sgd.errors import Adp2sgdError, ConfigError, InterruptedRunError, RunError
from adp2sgd.files import replacing
from adp2sgd.run_folder import versions

RUNNING = ".running"  # below the results: runs that are under way or were interrupted
INTERRUPTED = "interrupted; nothing is lost: the same command goes on from here"
BEGINS_ANEW = "interrupted; finished cells are kept: the same command measures this one anew"
Record = Mapping[str, Any]
"""What a cell's file holds: study, name, cell (its identity), device, versions, seconds, and the figures."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the command line asks for; empty or None means the study's own."""

    quick: bool = False
    models: tuple[str, ...] = ()
    noise: tuple[float, ...] = ()
    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    epochs: float | None = None
    momentum: float | None = None
    private: bool = False
    processes: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        epochs = 1.0 if self.epochs is None else self.epochs
        wrong = [] if 0 < epochs < math.inf else [f"--epochs {epochs:g}: use a positive number"]
        wrong += [f"--noise {n:g}: use a finite number, 0 or more" for n in self.noise if not 0 <= n < math.inf]
        wrong += [f"--seed {n}: use 0 or more" for n in self.seeds if n < 0]
        if wrong:
            raise ConfigError(wrong[0])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`identity` tells it from all others and gives the file's name; `measure(scratch, quiet)` gives its figures.

    `scratch` is a folder that outlives an interruption, so that `measure` can go on where it was, if it `resumes`.
    """

    study: str
    identity: Mapping[str, Any]
    measure: Callable[[Path, bool], dict[str, Any]] = field(compare=False)
    resumes: bool = True

    @property
    def name(self) -> str:
        """Letters, digits, dots and dashes only."""
        parts = (value if isinstance(value, str) else f"{key}{_short(value)}" for key, value in self.identity.items())
        return "-".join(part.replace("_", "").replace("/", "-").replace(" ", "-") for part in parts if part)

    def path(self, out: Path) -> Path:
        return out / self.study / f"{self.name}.json"


def _short(number: float) -> str:
    """Without losing a digit: two numbers are two names."""
    text = f"{number:g}"
    return (text if float(text) == number else repr(number)).replace("+", "")


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
        try:
            figures = cell.measure(scratch, quiet)
        except InterruptedRunError:
            raise InterruptedRunError(INTERRUPTED if cell.resumes else BEGINS_ANEW) from None
        whole = {
            "study": cell.study,
            "name": cell.name,
            "cell": dict(cell.identity),
            "device": device_name(figures.pop("device", "cpu")),
            "versions": versions(),
            "seconds": round(time.perf_counter() - before, 3),
            **figures,
        }
        with replacing(path) as part:
            part.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(scratch, ignore_errors=True)
    return whole


def read(path: Path) -> Record:
    """A finished cell."""
    try:
        found: Record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not {"study", "name", "cell"} <= set(found):
            raise ValueError("it is not a cell's record")
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
    """Measure the cells in `jobs` processes; each is given back when it is finished. An error ends all of it, and so
    does an interruption, once every process has saved its state."""
    from multiprocessing import connection, get_context

    context = get_context("spawn")  # a forked process could not use the GPU
    waiting = list(cells)
    running: dict[Any, Any] = {}  # sentinel → process, the end that its error comes from, cell
    with Interrupt() as interrupt:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    answer, end = context.Pipe(duplex=False)
                    process = context.Process(target=_measure_one, args=(waiting[0], out, end))
                    process.start()
                    end.close()  # else a process that was killed would leave us waiting for its answer
                    running[process.sentinel] = process, answer, waiting.pop(0)
                ended = connection.wait(list(running), timeout=0.2)
                if interrupt.requested:
                    raise InterruptedRunError(INTERRUPTED if all(cell.resumes for cell in cells) else BEGINS_ANEW)
                for sentinel in ended:
                    process, answer, cell = running.pop(sentinel)
                    process.join()
                    if process.exitcode != 0:
                        raise _error(answer, cell)
                    yield cell
        finally:
            for process, _, _ in running.values():
                process.terminate()  # SIGTERM: it saves its state first
            for process, _, _ in running.values():
                process.join()


def _measure_one(cell: Cell, out: Path, end: Any) -> None:
    try:
        measured(cell, out)
    except Adp2sgdError as error:
        end.send(error)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(InterruptedRunError.exit_code) from None


def _error(answer: Any, cell: Cell) -> Adp2sgdError:
    try:
        error: Adp2sgdError = answer.recv()
    except EOFError:
        return RunError(f"the process of {cell.name} died; finished cells are kept: the same command goes on from here")
    return error


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


@contextmanager
def _alone(scratch: Path) -> Iterator[None]:
    """The only process that measures this cell; another one is refused. The kernel frees the lock if we are killed."""
    scratch.mkdir(parents=True, exist_ok=True)
    root = next(parent for parent in scratch.parents if parent.name == RUNNING)
    (root / ".gitignore").write_text("*\n", encoding="utf-8")
    with (scratch / "lock").open("w") as file:
        if not files.lock(file.fileno()):
            raise RunError(f"{scratch.name} is being measured by another process; wait for it")
        yield
