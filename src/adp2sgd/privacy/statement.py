"""What ledgers say was spent, for a site that asks: of one file, of a folder of them, or of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from adp2sgd import config
from adp2sgd.errors import ConfigError
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.budget import read_plan
from adp2sgd.privacy.ledger import read, require

SEEDED = "the run is seeded: ε describes the mechanism, not this run"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One ledger: steps that were or may have been drawn, in all runs that it covers, and their ε."""

    dataset: str
    site: str
    steps: int
    epsilon: float
    delta: float
    adjacency: str
    ledger: str
    note: str


def statement(path: Path, delta: float | None = None, adjacency: str | None = None) -> list[Row]:
    """Of every learner of the run whose folder `path` is, with its plan's δ and adjacency by default; or of the ledger
    or folder of ledgers `path`, which know of neither. A ledger that is missing or damaged is an error."""
    if (path / "config.toml").is_file():
        return _of_run(path, delta, adjacency)
    files = [path] if path.is_file() else [file for file in sorted(path.glob("*.jsonl")) if not _other(file)]
    if not files:
        raise ConfigError(f"{path} holds no ledger; give a ledger, a folder of ledgers or the folder of a private run")
    if delta is None:
        raise ConfigError("a ledger holds steps, and their ε depends on δ; give --delta")
    return [_row(file, delta, adjacency or "add-remove") for file in files]


def _of_run(path: Path, delta: float | None, adjacency: str | None) -> list[Row]:
    settings = config.load(path / "config.toml")
    if settings.privacy.mode != "private":
        raise ConfigError(f"{path} holds a run without a privacy guarantee; there is no ledger")
    rows = []
    for learner in range(settings.learners):
        kept = read_plan(path / f"learner-{learner}" / "plan.json")
        note = "" if settings.seed is None else SEEDED
        row = _row(kept.ledger, kept.plan.delta if delta is None else delta, adjacency or kept.plan.adjacency, note)
        require(kept.ledger, kept.mark)
        rows.append(row)
    return rows


def _row(ledger: Path, delta: float, adjacency: str, note: str = "") -> Row:
    account = read(ledger)
    spent = epsilon(account.spent(), 1, delta, "pld", adjacency)
    return Row(
        dataset=account.dataset,
        site=account.site,
        steps=sum(count for _, count in account.spent().parts),
        epsilon=spent.epsilon,
        delta=delta,
        adjacency=adjacency,
        ledger=str(ledger),
        note="; ".join(filter(None, (note, spent.note))),
    )


def _other(file: Path) -> bool:
    """Whether this is something else than a ledger; what cannot be read may be a damaged one."""
    if not file.is_file():
        return False  # `read` says why
    try:
        with file.open(encoding="utf-8") as lines:
            return "ledger" not in json.loads(lines.readline())
    except (OSError, ValueError):
        return False
