"""The learners' step logs, read once: a second look at a run that goes on reads what was appended since the first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adp2sgd.report.run_data import Floats, StepLog


@dataclass(frozen=True)
class Seen:
    """What was read of a file: so many bytes, always whole lines, and what they hold."""

    bytes: int = 0
    log: StepLog = field(default_factory=StepLog)


class StepLogs:
    """Files of step events, by their paths."""

    def __init__(self) -> None:
        self._seen: dict[Path, Seen] = {}

    def read(self, path: Path) -> StepLog:
        """All whole lines of the file so far."""
        before = self._seen.get(path, Seen())
        with path.open("rb") as file:
            if file.seek(0, 2) < before.bytes:  # a resumed run forgot what came after its checkpoint
                before = Seen()
            file.seek(before.bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        now = Seen(before.bytes + len(whole), _joined(before.log, step_log(lines(whole))))
        self._seen[path] = now
        return now.log


def step_log(rows: list[dict[str, Any]]) -> StepLog:
    """The steps among a learner's events, in the order of their times."""
    steps = [row for row in rows if "seconds" in row and "staleness" in row]
    seconds = column(steps, "seconds")
    order = np.argsort(seconds, kind="stable")  # a session after an abrupt end may repeat some time
    return StepLog(
        seconds=seconds[order],
        staleness=column(steps, "staleness")[order],
        start=column(steps, "start", 0.0)[order],
    )


def column(rows: Sequence[Mapping[str, Any]], name: str, default: float = np.nan) -> Floats:
    values = (row.get(name) for row in rows)
    return np.array([default if value is None else value for value in values], dtype=np.float64)


def lines(text: bytes) -> list[dict[str, Any]]:
    """JSON lines, parsed in one call, which is twice as fast as one by one; a line that is not whole is left out."""
    rows = text.splitlines()
    with suppress(ValueError):
        found: list[dict[str, Any]] = json.loads(b"[" + b",".join(rows) + b"]")
        return found
    found = []
    for row in rows:
        with suppress(ValueError):
            found.append(json.loads(row))
    return found


def _joined(one: StepLog, other: StepLog) -> StepLog:
    if not len(one) or not len(other):
        return one if len(one) else other
    parts = (one.seconds, other.seconds), (one.staleness, other.staleness), (one.start, other.start)
    seconds, staleness, start = map(np.concatenate, parts)
    return StepLog(seconds=seconds, staleness=staleness, start=start)
