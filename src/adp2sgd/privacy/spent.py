"""What was spent according to one ledger, a folder of ledgers, or a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from adp2sgd import config
from adp2sgd.errors import ConfigError, LedgerError
from adp2sgd.privacy.ledger import read, require
from adp2sgd.privacy.plan import read_plan
from adp2sgd.privacy.policy import RenyiFilter, if_fixed

SEEDED = "the run is seeded: ε describes the mechanism, not this run"
NO_POLICY = "no policy was fixed before the first step: ε holds only if nobody chose a run after another one's result"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One ledger: the steps that were or may have been drawn in all its runs, and their ε by its `composition`.

    `epsilon_limit` is what its policy lets all runs spend. `epsilon_if_fixed` is what the same steps would have spent,
    had all runs been fixed beforehand: the difference is the price of choosing each run after the results before.
    """

    dataset: str
    site: str
    unit: str
    steps: int
    epsilon: float
    epsilon_limit: float | None
    epsilon_if_fixed: float
    composition: str
    delta: float
    adjacency: str
    ledger: str
    note: str


def spent_in(path: Path, delta: float | None = None, adjacency: str | None = None) -> list[Row]:
    """One row per ledger. `path` is a run's folder, a folder of ledgers, or a ledger. δ and adjacency are those of the
    ledger's policy by default. A missing or damaged ledger is an error."""
    if (path / "config.toml").is_file():
        return _of_run(path, delta, adjacency)
    files = [path] if path.is_file() else [file for file in sorted(path.glob("*.jsonl")) if not _other(file)]
    if not files:
        raise ConfigError(f"{path} holds no ledger; give a ledger, a folder of ledgers or the folder of a private run")
    return [_row(file, delta, adjacency) for file in files]


def _of_run(path: Path, delta: float | None, adjacency: str | None) -> list[Row]:
    settings = config.load_config(path / "config.toml")
    if settings.privacy.mode != "private":
        raise ConfigError(f"{path} holds a run without a privacy guarantee; there is no ledger")
    rows = []
    joined = (path / "session.json").exists()  # by `adp2sgd join`: the folder holds the site's own learner alone
    folders = sorted(path.glob("learner-*")) if joined else [path / f"learner-{k}" for k in range(settings.learners)]
    if not folders:
        raise LedgerError(f"{path} holds no folder learner-N with this site's plan; restore it, or give the ledger")
    for folder in folders:
        kept = read_plan(folder / "plan.json")
        own, note = kept.plan.policy, "" if settings.seed is None else SEEDED
        row = _row(kept.ledger, own.delta if delta is None else delta, adjacency or own.adjacency, note)
        require(kept.ledger, kept.mark)
        rows.append(row)
    return rows


def _row(ledger: Path, delta: float | None, adjacency: str | None, note: str = "") -> Row:
    account = read(ledger)
    steps, policy = account.spent(), account.policy
    if policy is not None:
        delta, adjacency = policy.delta if delta is None else delta, adjacency or policy.adjacency
    if delta is None:
        raise ConfigError("a ledger without a policy holds steps, and their ε depends on δ; give --delta")
    fixed = spent = if_fixed(steps, delta, adjacency or "add-remove")
    if isinstance(policy, RenyiFilter):
        spent = replace(policy, delta=delta, adjacency=fixed.adjacency).spent(steps)
    adaptive = policy is None and len(steps.parts) > 1
    why = f"had all runs been fixed: {fixed.note}" if fixed.note and spent is not fixed else fixed.note
    return Row(
        dataset=account.dataset,
        site=account.site,
        unit=account.unit,
        steps=sum(count for _, count in steps.parts),
        epsilon=spent.epsilon,
        epsilon_limit=None if policy is None else policy.epsilon,
        epsilon_if_fixed=fixed.epsilon,
        composition=spent.accountant if policy is None else policy.composition,
        delta=delta,
        adjacency=fixed.adjacency,
        ledger=str(ledger),
        note="; ".join(filter(None, (note, NO_POLICY if adaptive else "", why))),
    )


def _other(file: Path) -> bool:
    """Whether this is not a ledger. A file that cannot be parsed may be a damaged ledger, so it is not excluded."""
    if not file.is_file():
        return False  # `read` says why
    try:
        with file.open(encoding="utf-8") as lines:
            return "ledger" not in json.loads(lines.readline())
    except (OSError, ValueError):
        return False
