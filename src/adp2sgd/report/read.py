"""From a run's folder, or a `Run`, to `RunData`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from adp2sgd import config
from adp2sgd.errors import Adp2sgdError, ConfigError
from adp2sgd.report.logs import StepLogs, column, lines
from adp2sgd.report.run_data import Curve, Edge, Floats, LearnerData, RunData, StepLog
from adp2sgd.report.statement import statement
from adp2sgd.run_folder import EVENTS, STATUS, Folder, Run, by_number

FIELDS = ("accuracy", "loss")  # metrics that have a field of their own
OWN = ("steps", "share", "exchanges", "busy", "expired", "halves", "restarts", "bytes_sent", "staleness_max", "state",
       "site", "epsilon", "epsilon_spent", "max_steps")  # fmt: skip


def read_run(path: str | Path, logs: StepLogs | None = None) -> RunData:
    """The run in a folder: finished, under way or broken off. `logs` are kept between looks at a run that goes on."""
    folder = Folder.open(path)
    running = folder.running  # first: what ends while it is read is read as finished
    text = (folder.path / "config.toml").read_text(encoding="utf-8")
    raw = _json(folder.path / "result.json")
    finished = raw is not None
    raw = raw or _json(folder.path / STATUS) or {}
    raw = {**raw, "curve": raw.get("curve") or _points(folder.path / EVENTS)}
    logs = logs or StepLogs()
    paths = {int(each.parent.name.removeprefix("learner-")): each for each in folder.path.glob(f"learner-*/{EVENTS}")}
    steps = {number: logs.read(path) for number, path in sorted(paths.items())}
    name = folder.path.resolve().name
    run = _run(name, folder.path, raw, text, steps, finished=finished, running=running and not finished)
    with suppress(Adp2sgdError):
        return run if run.guarantee is None else replace(run, statement=statement(folder.path))
    return run


def of_run(run: Run) -> RunData:
    """A run in memory, with its folder's events where it has a folder."""
    if run.folder is not None and (Path(run.folder) / "config.toml").is_file():
        return read_run(run.folder)
    return _run(f"{run.task} {run.algorithm}", None, run.to_dict(), "", {}, finished=True, running=False)


def named_apart(runs: Iterable[RunData]) -> list[RunData]:
    """The same runs, with names that differ."""
    found: list[RunData] = []
    for run in runs:
        name, parent = run.name, run.folder.resolve().parent if run.folder else None
        while name in {each.name for each in found}:
            name = f"{parent.name}/{name}" if parent and parent.name else f"{name} ({len(found) + 1})"
            parent = parent.parent if parent and parent.name else None
        found.append(replace(run, name=name))
    return found


def _run(
    name: str,
    folder: Path | None,
    raw: Mapping[str, Any],
    config_text: str,
    logs: Mapping[int, StepLog],
    *,
    finished: bool,
    running: bool,
) -> RunData:
    settings = _settings(config_text)
    curve = _curve(raw["curve"])
    steps = raw.get("global_steps") or sum(map(len, logs.values()))
    guarantee = raw.get("guarantee")
    return RunData(
        name=name,
        folder=folder,
        task=raw.get("task") or settings.get("task", "unknown task"),
        algorithm=raw.get("algorithm") or settings.get("algorithm", "unknown"),
        clock=raw.get("clock", "real"),
        finished=finished,
        running=running,
        seconds=raw.get("seconds") or _last(curve.seconds) or 0.0,
        global_steps=steps,
        target_steps=raw.get("target_steps") or (steps - raw["overshoot"] if "overshoot" in raw else None),
        epoch=(raw.get("epochs") if finished else raw.get("epoch")) or _last(curve.epoch) or 0.0,
        epochs=settings.get("epochs"),
        left_s=raw.get("left_s") if running else None,
        written_at=raw.get("written_at"),
        consensus=raw.get("consensus", _last(curve.consensus)),
        seeded="seed" in settings if settings else bool(raw.get("seeded")),
        metrics=_metrics(raw) or {key: float(values[-1]) for key, values in curve.metrics.items()},
        monitor=(raw.get("monitor") or "").removeprefix("-") or None,
        curve=curve,
        learners=_learners(raw.get("learners", ()), logs, steps),
        edges=_edges(config_text) if settings.get("algorithm") != "sync" else (),
        guarantee=guarantee if isinstance(guarantee, dict) else None,
        guarantee_why=raw.get("guarantee_why"),
        noise_source=raw.get("noise_source"),
        sites=raw.get("sites") or {},
        notes=_notes(raw),
        versions=raw.get("versions") or {},
        config=settings,
    )


def _learners(told: Iterable[Mapping[str, Any]], logs: Mapping[int, StepLog], steps: int) -> tuple[LearnerData, ...]:
    """From a result, or from a status, whose counts lie one level deeper; else from the events alone."""
    rows = {each["learner"]: {**each, **each.get("counters", {})} for each in told}
    rows |= {number: {"learner": number, "steps": len(log)} for number, log in logs.items() if number not in rows}
    return tuple(_learner(rows[number], logs.get(number, StepLog()), steps) for number in sorted(rows))


def _learner(row: Mapping[str, Any], log: StepLog, steps: int) -> LearnerData:
    own = {key: row[key] for key in OWN if row.get(key) is not None}
    mean = row.get("staleness_mean")
    if mean is None and row.get("steps") and "staleness_total" in row:
        mean = row["staleness_total"] / row["steps"]
    return LearnerData(
        learner=row["learner"],
        **{"share": row.get("steps", 0) / max(1, steps), **own},
        staleness_mean=mean,
        metrics=_metrics(row),
        partners=by_number(row.get("partners", {})),
        log=log,
    )


def _notes(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The run's, then what a status holds of each learner's."""
    own = [f"learner {each['learner']} {note}" for each in raw.get("learners", ()) for note in each.get("notes", ())]
    return tuple(dict.fromkeys([*raw.get("notes", ()), *own]))


def _metrics(raw: Mapping[str, Any]) -> dict[str, float]:
    """Whatever metrics an evaluation, a learner or a run states; those without a value are left out."""
    found = {**{name: raw.get(name) for name in FIELDS}, **(raw.get("metrics") or {})}
    return {name: float(value) for name, value in found.items() if value is not None}


def _curve(points: Iterable[Mapping[str, Any]]) -> Curve:
    rows = [point for point in points if "epoch" in point]
    metrics = [_metrics(point) for point in rows]
    names = dict.fromkeys(name for each in metrics for name in each)
    return Curve(
        epoch=column(rows, "epoch"),
        seconds=column(rows, "seconds"),
        consensus=column(rows, "consensus"),
        metrics={name: column(metrics, name) for name in names},
    )


def _points(path: Path) -> list[dict[str, Any]]:
    try:
        return lines(path.read_bytes())
    except FileNotFoundError:
        return []


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); it is damaged or not written by adp2sgd") from None
    return found


def _settings(text: str) -> dict[str, Any]:
    """Dotted key → value, also of a configuration that another release wrote."""
    try:
        return dict(_leaves(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config.toml is not valid TOML ({error}); give a run's folder") from None


def _leaves(table: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def _edges(text: str) -> tuple[Edge, ...]:
    """The configuration's graph; none where it was drawn at random, or where this release cannot build it."""
    from adp2sgd import topology

    with suppress(Adp2sgdError):
        settings = config.loads_config(text)
        if settings.topology.graph != "random-regular" or settings.seed is not None:
            return tuple(sorted(topology.build(settings.topology, settings.learners, settings.seed or 0).edges))
    return ()


def _last(values: Floats) -> float | None:
    return float(values[-1]) if len(values) and np.isfinite(values[-1]) else None
