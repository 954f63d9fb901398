"""What ledgers say was spent, for a site that asks: of one file, of a folder of them, or of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adp2sgd import config
from adp2sgd.errors import ConfigError
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.ledger import read


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


def statement(path: Path, delta: float | None = None, adjacency: str | None = None) -> list[Row]:
    """`delta` and `adjacency` are by default those of the run whose folder `path` is; ledgers know of none."""
    run = path / "config.toml"
    privacy = config.load(run).privacy if run.is_file() else None
    if privacy is not None and privacy.mode != "private":
        raise ConfigError(f"{path} holds a run without a privacy guarantee; there is no ledger")
    files = _files(path, None if privacy is None else privacy.ledger)
    delta = delta if delta is not None or privacy is None else privacy.delta
    if delta is None:
        raise ConfigError("a ledger holds steps, and their ε depends on δ; give --delta")
    adjacency = adjacency or ("add-remove" if privacy is None else privacy.adjacency)
    rows = []
    for file in files:
        account = read(file)
        spent = account.spent()
        rows.append(
            Row(
                dataset=account.dataset,
                site=account.site,
                steps=sum(count for _, count in spent.parts),
                epsilon=epsilon(spent, 1, delta, "pld", adjacency).epsilon if spent.parts else 0.0,
                delta=delta,
                adjacency=adjacency,
                ledger=str(file),
            )
        )
    return rows


def _files(path: Path, shared: str | None) -> list[Path]:
    if path.is_file():
        return [path]
    folder, pattern = (path, "learner-*/ledger.jsonl") if shared is None else (Path(shared).expanduser(), "*.jsonl")
    found = sorted(folder.glob(pattern)) or sorted(folder.glob("*.jsonl"))
    if not found:
        raise ConfigError(
            f"{folder} holds no ledger; give a ledger, a folder of ledgers or the folder of a private run"
        )
    return found
