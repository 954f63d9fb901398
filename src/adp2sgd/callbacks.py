"""Callbacks: what `on_status` of every engine may be given, alone or in a list.

A callback is called with the run's `RunStatus` several times a second. `status.point` is the last evaluation of θ. A
callback that raises `StopRun` ends the run properly: with model, result and guarantee. Any other error ends the run as
an error of the caller's own.
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adp2sgd.errors import Adp2sgdWarning, ConfigError, StopRun
from adp2sgd.files import replacing

if TYPE_CHECKING:
    from adp2sgd.engine.status import RunStatus


class _Selection:
    """Tells whether a new evaluation of θ is the best so far."""

    def __init__(self, monitor: str | None, least: float) -> None:
        self.best: float | None = None
        self._monitor, self._least = monitor, least
        self._seen = -1

    def look(self, status: RunStatus) -> bool | None:
        """Whether θ has improved; None where nothing new was evaluated."""
        point = status.point
        if point is None or point.global_steps <= self._seen:
            return None
        if self._seen < 0 and status.private:
            warnings.warn(
                "a model that is chosen by held-out records reveals something about them, which ε does not cover; use "
                "public held-out records",
                Adp2sgdWarning,
                stacklevel=2,
            )
        self._seen = point.global_steps
        monitor = self._monitor or status.monitor
        name, sign = monitor.removeprefix("-"), -1.0 if monitor.startswith("-") else 1.0
        if name not in point.metrics:
            known = ", ".join(point.metrics)
            raise ConfigError(f'monitor = "{name}" is not a metric of the run; use one of: {known}')
        value = point.metrics[name]
        if value is None or not math.isfinite(value):
            return False
        better = self.best is None or sign * (value - self.best) > self._least
        if better:
            self.best = value
        return better


class EarlyStopping:
    """Stops the run after `patience` evaluations in a row without an improvement by more than `least`.

    `monitor`: the metric, with "-" before it where smaller is better; by default the task's. ε does not cover the
    held-out records that it looks at. The guarantee of a stopped run is ε at its cap, because when it ended depended on
    what was seen.
    """

    def __init__(self, patience: int = 3, *, monitor: str | None = None, least: float = 0.0) -> None:
        if patience < 1:
            raise ConfigError(f"patience = {patience} is not possible; use at least 1 evaluation")
        self._selection = _Selection(monitor, least)
        self._patience, self._failed = patience, 0

    def __call__(self, status: RunStatus) -> None:
        better = self._selection.look(status)
        if better is None:
            return
        self._failed = 0 if better else self._failed + 1
        if self._failed >= self._patience:
            raise StopRun(f"{self._patience} evaluations without an improvement")


class SaveBest:
    """Keeps the best θ of a run in `path`, a safetensors file with torch's own names.

    `monitor` as for `EarlyStopping`. ε does not cover the held-out records that decide.
    """

    def __init__(self, path: str | Path, *, monitor: str | None = None) -> None:
        self.path = Path(path)
        self._selection = _Selection(monitor, 0.0)

    @property
    def best(self) -> float | None:
        """The metric of the model in `path`; None before the first evaluation."""
        return self._selection.best

    def __call__(self, status: RunStatus) -> None:
        if self._selection.look(status) and status.model is not None:
            from safetensors.torch import save_file

            with replacing(self.path) as part:
                save_file({name: tensor.contiguous().cpu() for name, tensor in status.model().items()}, part)


class TensorBoard:
    """Writes evaluations of θ and the learners' steps for `tensorboard --logdir FOLDER`. Needs the extra
    `tensorboard`."""

    def __init__(self, folder: str | Path) -> None:
        try:
            import tensorboard  # type: ignore[import-untyped]  # noqa: F401
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("TensorBoard is not installed; pip install 'adp2sgd[tensorboard]'") from None
        self._writer: Any = SummaryWriter(str(folder))
        self._seen = -1

    def __call__(self, status: RunStatus) -> None:
        figures = _new_figures(status, self._seen)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, status.point.global_steps if status.point else 0)
        if figures and status.point is not None:
            self._seen = status.point.global_steps
            self._writer.flush()


class MLflow:
    """Writes configuration names and evaluations of θ as a run of MLflow, in files under `folder`: no server is needed.
    Needs the extra `mlflow`."""

    def __init__(self, folder: str | Path, *, experiment: str = "adp2sgd") -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigError("MLflow is not installed; pip install 'adp2sgd[mlflow]'") from None
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 would ask for a database
        self._client: Any = MlflowClient(tracking_uri=Path(folder).absolute().as_uri())
        self._experiment = experiment
        self._run: str | None = None
        self._seen = -1

    def __call__(self, status: RunStatus) -> None:
        if self._run is None:
            self._run = self._begin(status)
        figures = _new_figures(status, self._seen)
        for name, value in figures.items():
            self._client.log_metric(self._run, name, value, step=status.point.global_steps if status.point else 0)
        if figures and status.point is not None:
            self._seen = status.point.global_steps

    def _begin(self, status: RunStatus) -> str:
        known = self._client.get_experiment_by_name(self._experiment)
        number = known.experiment_id if known else self._client.create_experiment(self._experiment)
        run: str = self._client.create_run(number).info.run_id
        for name in ("task", "algorithm", "clock", "epochs"):
            self._client.log_param(run, name, getattr(status, name))
        self._client.log_param(run, "learners", len(status.learners))
        return run


def _new_figures(status: RunStatus, seen: int) -> dict[str, float]:
    """What an evaluation after global step `seen` has to tell; nothing where there is none."""
    point = status.point
    if point is None or point.global_steps <= seen:
        return {}
    figures: dict[str, float | None] = {f"theta/{name}": value for name, value in point.metrics.items()}
    figures |= {"theta/consensus": point.consensus, "run/epoch": point.epoch, "run/seconds": point.seconds}
    for each in status.learners:
        figures[f"learner-{each.learner}/steps"] = each.counters.steps
        figures[f"learner-{each.learner}/epsilon_spent"] = each.epsilon_spent
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}
