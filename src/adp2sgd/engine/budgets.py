"""Where a learner's privacy budget lies on disk, and how it is opened or read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adp2sgd.config import Config
from adp2sgd.data.units import Population
from adp2sgd.engine.plan import Plan
from adp2sgd.errors import ConfigError, LedgerError
from adp2sgd.privacy.budget import Budget
from adp2sgd.privacy.ledger import read as read_ledger


def open_budget(plan: Plan, number: int, site: str | None, own: Population, folder: Path) -> Budget:
    """The budget of learner `number`, whose own folder `folder` is, for batches of its `own` records or units."""
    config = plan.config
    path, owner = _ledger(config, number, site, folder)
    if config.privacy.ledger is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f'privacy.ledger = "{path.parent}" cannot be a folder ({error.strerror}); use another'
            ) from None
    return Budget.open(
        path,
        config.privacy,
        dataset=_dataset(config),
        site=owner,
        records=own.count,
        unit=own.unit,
        batch_size=config.batch_size,
        planned_steps=plan.planned_steps,
        plan_path=folder / "plan.json",
        seeded=config.seed is not None,
    )


def read_budget(plan: Plan, number: int, site: str | None, folder: Path) -> Budget:
    """What learner `number` has spent, for a report: also while another run has the ledger, or the disk is full."""
    path, _ = _ledger(plan.config, number, site, folder)
    seeded = plan.config.seed is not None
    return Budget.read(path, plan.config.privacy, plan_path=folder / "plan.json", seeded=seeded)


def new_ledgers(config: Config, budgets: Sequence[Budget]) -> list[str]:
    """Notes on ledgers that began with this run. A wrong folder or a wrong name would begin a new ledger too."""
    new = [budget.ledger for budget in budgets if config.privacy.ledger is not None and not budget.plan.before.parts]
    if not new:
        return []
    notes = [f"these ledgers began with this run and know of nothing that was spent before: {', '.join(map(str, new))}"]
    own = {budget.ledger for budget in budgets}
    near = [each for each in sorted(new[0].parent.glob(f"{_slug(_dataset(config))}-*.jsonl")) if each not in own]
    others = [each for each in near if _charged(each, _dataset(config))]
    if others:
        notes.append(
            f"the same data set has been charged to other sites too: {', '.join(map(str, others))}; a record that is "
            "theirs as well has spent in both, which no ledger adds up: keep the records of a site together"
        )
    return notes


def _charged(ledger: Path, dataset: str) -> bool:
    try:
        account = read_ledger(ledger)
    except LedgerError:
        return True  # nobody can say what was
    return account.dataset == dataset and bool(account.spent().parts)


def _ledger(config: Config, number: int, site: str | None, folder: Path) -> tuple[Path, str]:
    """Where learner `number` keeps its ledger, and whose it is: in its `folder`, or the site's in `privacy.ledger`."""
    if config.privacy.ledger is None:
        return folder / "ledger.jsonl", str(number)
    assert site is not None  # the partition is by site
    return Path(config.privacy.ledger).expanduser() / f"{_slug(_dataset(config))}-{_slug(site)}.jsonl", site


def _dataset(config: Config) -> str:
    """The data set's name in a ledger. It is the same for every model that is trained on the data."""
    return config.privacy.dataset or config.task.partition("/")[0]


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text)
