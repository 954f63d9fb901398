"""A finished run that continues for more epochs, from its learners' last checkpoints.

`Folder.reopen` keeps the earlier result as result.before.json. So an extension that is killed before its first own
checkpoint begins again where the earlier run ended.
"""

from __future__ import annotations

from adp2sgd.config import Config
from adp2sgd.engine import checkpoint
from adp2sgd.engine.status import Counters
from adp2sgd.run_folder import BEFORE, RESULT, Folder, LearnerResult, Run, read_result


def earlier(folder: Folder, config: Config, own_checkpoint: str) -> Run | None:
    """The finished run that `config` extends; None where the run is not finished or no more epochs are asked for.

    `own_checkpoint`: the file that an engine keeps while a run is not finished.
    """
    if (folder.path / RESULT).exists():
        return read_result(folder.path) if config.epochs > folder.settings.epochs else None
    if (folder.path / BEFORE).exists() and not (folder.path / own_checkpoint).exists():
        return read_result(folder.path, BEFORE)
    return None


def seed_of(folder: Folder) -> int | None:
    """The public seed of a run without a seed, which its checkpoints keep."""
    saved = checkpoint.load(folder, 0)
    return None if saved is None else saved.facts.get("seed")


def counters_of(result: LearnerResult) -> Counters:
    """What the learner had done by the end of the earlier run."""
    return Counters(
        steps=result.steps,
        staleness_total=round(result.staleness_mean * result.steps),
        staleness_max=result.staleness_max,
        exchanges=result.exchanges,
        initiated=result.initiated,
        mixed_before=result.mixed_before,
        busy=result.busy,
        expired=result.expired,
        unconfirmed=result.unconfirmed,
        halves=result.halves,
        bytes_sent=result.bytes_sent,
        partners=result.partners,
    )
