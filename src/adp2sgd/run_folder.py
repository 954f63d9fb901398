"""A run's folder: the configuration, what each learner did, checkpoints, the result. The same for every engine.

runs/NAME/config.toml                       every field that is set, defaults included
runs/NAME/events.jsonl                      one line per evaluation of θ
runs/NAME/learner-ID/events.jsonl           one line per step; stays at the learner
runs/NAME/learner-ID/ledger.jsonl           privacy spent, unless `privacy.ledger` is set; plan.json: the cap
runs/NAME/learner-ID/checkpoint.safetensors weights, buffers, optimizer state
runs/NAME/status.json                       how the run stands, at most a second old while it goes on
runs/NAME/result.json                       what the run reports; result.before.json: before it was extended
runs/NAME/model/                            θ, the average model, and all that is needed to use it (model_folder.py)

Events, statuses, ledgers, plans and checkpoints can be read by their owner alone. For other files the umask decides.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adp2sgd import config, files
from adp2sgd.errors import ConfigError, RunError
from adp2sgd.files import owner_only, replacing, to_json
from adp2sgd.privacy.mechanism import Guarantee

if TYPE_CHECKING:  # reading a run needs no PyTorch, which takes seconds to load
    from torch import Tensor


EVENTS = "events.jsonl"
SCRATCH = "adp2sgd-scratch-"  # begins the name of the folder of a run that nobody keeps
SESSION, SIMULATION = "session.json", "simulation.safetensors"  # what `train` and `simulate` continue from
RESULT, BEFORE = "result.json", "result.before.json"  # of the run, and of what it extends
STATUS = "status.json"


class Measured:
    """What has `metrics` on held-out records, by name: the loss, and those of the task. None: could not be computed, or
    is not finite."""

    metrics: Mapping[str, float | None]

    @property
    def loss(self) -> float | None:
        return self.metrics.get("loss")

    @property
    def accuracy(self) -> float | None:
        return self.metrics.get("accuracy")


@dataclass(frozen=True, kw_only=True)
class Point(Measured):
    """One evaluation of the average model θ."""

    global_steps: int
    epoch: float
    seconds: float
    metrics: Mapping[str, float | None]
    consensus: float
    learners: int | None = None  # whose models θ averages, where not all answered in time


@dataclass(frozen=True, kw_only=True)
class LearnerResult(Measured):
    """One learner's public figures. `share` is p_k; staleness is in global steps."""

    learner: int
    steps: int
    share: float
    staleness_mean: float
    staleness_max: int
    exchanges: int
    busy: int
    unconfirmed: int
    bytes_sent: int
    metrics: Mapping[str, float | None]  # empty for a learner that was lost before it left a model
    initiated: int = 0  # of the exchanges, begun by this learner
    mixed_before: int = 0  # of these, mixed before the descent of their step
    expired: int = 0  # real engines: asked, and the partner was gone
    halves: int = 0  # real engines: exchanges that changed one side only, as far as is known
    restarts: int = 0
    state: str = "ended"  # or lost
    epsilon: float | None = None
    epsilon_spent: float | None = None
    max_steps: int | None = None
    clip_norm: float | None = None  # private mode: C after the last step
    site: str | None = None  # where each learner has one site's records
    partners: Mapping[int, int] = field(default_factory=dict)  # partner → completed exchanges with it

    def __post_init__(self) -> None:
        object.__setattr__(self, "partners", by_number(self.partners))

    @property
    def name(self) -> str:
        """What people call the learner: its site where it has one, else its number."""
        return self.site or str(self.learner)


@dataclass(frozen=True, kw_only=True)
class Run(Measured):
    """What a run reports; `result.json` holds the same."""

    task: str
    algorithm: str
    metrics: Mapping[str, float | None]  # of the average model θ, on held-out records; a note says why one is None
    monitor: str  # the metric that decides; "-" before it: smaller is better
    seconds: float
    clock: str  # virtual or real
    global_steps: int
    overshoot: int  # global steps beyond those asked for
    epochs: float
    consensus: float  # mean squared distance of the models from θ
    seeded: bool
    guarantee: Guarantee | None  # None: guarantee_why says why
    guarantee_why: str | None
    noise_source: str
    learners: tuple[LearnerResult, ...]
    sites: Mapping[str, Mapping[str, Any]]  # θ on each site's own held-out records, where the data has sites
    curve: tuple[Point, ...]
    notes: tuple[str, ...]
    versions: Mapping[str, str]
    folder: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def plot(self, theme: str = "light") -> Any:
        """The report's figures, for a notebook: a mapping from titles to plotly figures that shows itself."""
        from importlib import import_module

        return import_module("adp2sgd.report.notebook").plot(self, theme)  # by name: the report is a layer above


def by_number(counts: Mapping[Any, int]) -> dict[int, int]:
    """Counts whose keys are numbers again: in JSON every key is text."""
    return {int(number): count for number, count in counts.items()}


def read_result(folder: str | Path, name: str = "result.json") -> Run:
    """The result of a finished run."""
    try:
        raw = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no result.json; give the folder of a finished run") from None
    raw["guarantee"] = None if raw["guarantee"] is None else Guarantee(**raw["guarantee"])
    raw["learners"] = tuple(LearnerResult(**each) for each in raw["learners"])
    raw["curve"] = tuple(Point(**each) for each in raw["curve"])
    return Run(**{**raw, "notes": tuple(raw["notes"])})


class Folder:
    """A run's folder on disk. Files appear whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: dict[int, list[str]] = {}

    @classmethod
    def create(cls, path: str | Path, settings: config.Config) -> Folder:
        """A new folder; one that already holds a run is refused."""
        folder = cls(Path(path))
        if (folder.path / "config.toml").exists():
            raise ConfigError(f"{path} already holds a run; choose another --out, or go on with --resume {path}")
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            with folder.replacing("config.toml") as part:
                part.write_text(settings.to_toml(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}; choose another --out") from None
        return folder

    @classmethod
    def open(cls, path: str | Path) -> Folder:
        if not (Path(path) / "config.toml").is_file():
            raise ConfigError(f"{path} holds no run (no config.toml); give a run's folder")
        return cls(Path(path))

    @classmethod
    def reopen(cls, path: str | Path, settings: config.Config) -> Folder:
        """To continue its run, whose configuration `settings` must be; they may only ask for more epochs. A folder that
        cannot be written is refused."""
        folder = cls.open(path)
        if not os.access(folder.path, os.W_OK):
            raise ConfigError(f"cannot write to {path}, so its run cannot go on; change its permissions")
        before = folder.settings
        longer = settings.epochs > before.epochs
        wanted = before.replace(epochs=settings.epochs) if longer else before
        if (other := config.difference(settings, wanted)) is not None:
            key, given, kept = other
            raise ConfigError(f"{key} = {given}, but {path} holds a run with {key} = {kept}; use that")
        if longer:
            folder._extend(settings)
        return folder

    def _extend(self, settings: config.Config) -> None:
        """Take the longer configuration. The result so far is kept as result.before.json."""
        if settings.privacy.mode == "private":
            raise ConfigError(
                f"epochs = {settings.epochs:g}: the noise of a private run is planned for its epochs, so it cannot be "
                f'extended; start a new run with init_from = "{self.path}" on the same privacy.ledger'
            )
        if (self.path / RESULT).exists():  # first: a run with a result and the longer configuration would be finished
            (self.path / RESULT).replace(self.path / BEFORE)
        with self.replacing("config.toml") as part:
            part.write_text(settings.to_toml(), encoding="utf-8")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other runs. The kernel releases the lock if this process is killed."""
        with (self.path / "config.toml").open("rb") as file:
            try:
                if not _locked(file.fileno()):
                    raise ConfigError(f"{self.path} is in use: its run is still running; wait for it, or stop it")
            except (ImportError, OSError):  # a system or a file system without locks
                yield
                return
            try:
                yield
            finally:
                files.unlock(file.fileno())

    @property
    def running(self) -> bool:
        """Whether a process runs here; False also where the file system has no locks."""
        with suppress(ImportError, OSError), (self.path / "config.toml").open("rb") as file:
            return not files.lock(file.fileno(), shared=True)
        return False

    @property
    def unstarted(self) -> bool:
        """Whether its run was killed before it left anything to continue from."""
        left = (SESSION, SIMULATION, RESULT, BEFORE)
        return not any((self.path / name).exists() for name in left)

    @property
    def settings(self) -> config.Config:
        return config.load_config(self.path / "config.toml")

    def learner(self, number: int) -> Path:
        """The learner's own folder."""
        path = self.path / f"learner-{number}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def log(self, learner: int, event: Mapping[str, Any]) -> None:
        """Append an event to the learner's file; written with the next `flush`."""
        self._pending.setdefault(learner, []).append(to_json(event))

    def flush(self) -> None:
        for learner, lines in self._pending.items():
            self.append_events(learner, lines)
        self._pending.clear()

    def append_events(self, learner: int, lines: Sequence[str]) -> None:
        with open(self.learner(learner) / EVENTS, "a", encoding="utf-8", opener=owner_only) as file:
            file.write("\n".join(lines) + "\n")

    def append_point(self, point: Point) -> None:
        """Append an evaluation of θ to the run's own events."""
        with open(self.path / EVENTS, "a", encoding="utf-8", opener=owner_only) as file:
            file.write(to_json(asdict(point)) + "\n")

    def write_points(self, points: Sequence[Point]) -> None:
        """Replace the run's own events, because what came after a checkpoint will happen again."""
        with self.replacing(EVENTS, private=True) as part:
            part.write_text("".join(to_json(asdict(point)) + "\n" for point in points), encoding="utf-8")

    def points(self) -> list[Point]:
        """The evaluations of θ so far; a line that is not whole is left out."""
        found: list[Point] = []
        path = self.path / EVENTS
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(ValueError, TypeError):
                found.append(Point(**json.loads(line)))
        return found

    def log_sizes(self, name: str) -> dict[int, int]:
        """Each learner's size in bytes of the log `name`, for `truncate_logs` when a run resumes."""
        self.flush()
        found = self.path.glob(f"learner-*/{name}")
        return {int(path.parent.name.removeprefix("learner-")): path.stat().st_size for path in found}

    def truncate_logs(self, name: str, sizes: Mapping[int, int]) -> None:
        """Forget what was logged after a checkpoint, because it will happen again."""
        for path in self.path.glob(f"learner-*/{name}"):
            os.truncate(path, sizes.get(int(path.parent.name.removeprefix("learner-")), 0))

    def remove_logs(self, *names: str) -> None:
        for name in names:
            for path in self.path.glob(f"learner-*/{name}"):
                path.unlink()

    def save_tensors(
        self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], *, private: bool = False
    ) -> None:
        """`private`: a checkpoint, for its owner alone."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        whole = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
        with self.replacing(name, private=private) as part:
            try:
                save_file(whole, part, metadata={"adp2sgd": json.dumps(metadata, default=str)})
            except SafetensorError as error:  # its way to tell of a full disk
                raise OSError(errno.EIO, str(error)) from None

    def load_tensors(self, name: str, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path / name, framework="pt", device=device) as file:
                return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["adp2sgd"])  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.path / name} cannot be read ({error}); it is damaged or not a checkpoint") from None

    def write_result(self, run: Run) -> None:
        with self.replacing("result.json") as part:
            part.write_text(to_json(run.to_dict(), indent=1) + "\n", encoding="utf-8")

    @contextmanager
    def telling_of_full_disks(self) -> Iterator[None]:
        """An error of the file system ends the run with one line. The last checkpoint stays whole."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            reason = error.strerror or str(error)
            raise RunError(
                f"{self.path} cannot be written ({reason}); mend that, then --resume goes on from its last checkpoint"
            ) from None

    def replacing(self, name: str, *, private: bool = False, durable: bool = True) -> AbstractContextManager[Path]:
        """A temporary file that takes the place of `name` in one step; `private`: for its owner alone."""
        return replacing(self.path / name, private=private, durable=durable)


def _locked(descriptor: int) -> bool:
    """Whether the file's lock is ours now. Tries a few times, because `Folder.running` locks the file for a moment."""
    for _ in range(5):
        if files.lock(descriptor):
            return True
        time.sleep(0.02)
    return False


def versions() -> dict[str, str]:
    """What a result depends on beside its configuration."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    try:
        own = version("adp2sgd")
    except PackageNotFoundError:
        own = "source tree, not installed"
    return {"adp2sgd": own, "python": platform.python_version(), "torch": torch.__version__}
