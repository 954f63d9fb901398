"""Verdicts on the three deployment cases, and on the model that collapses; like `judges`, by finished records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduction import paper
from reproduction.cells import Record
from reproduction.judges import (
    DIVERGED,
    FAILS,
    HOLDS,
    NOISY,
    PARTLY,
    SHORTER,
    Choose,
    Finding,
    beside,
    files_of,
    full,
    longest,
    settled,
    verdict_of,
    worth,
)  # fmt: skip
from reproduction.tables import balanced, course, race, seconds_of, shown

ENOUGH = 0.85  # of what perfect balancing would win


def slow_down(choose: Choose, factor: float, records: Sequence[Record], engine: str = "") -> Finding | None:
    """SYNC's round takes `factor` − 1 steps longer (5 % allowed), ADPSGD at most 1/0.85 of perfect balancing; and in
    time to a quality ADPSGD wins at least 85 % of what perfect balancing would."""
    found = beside(choose(records), "even", "slow", 2, engine)
    if found is None:
        return None
    even, slow = found
    files = [even["sync"], slow["sync"], even["adpsgd"], slow["adpsgd"]]
    if any(record.get("diverged") for record in files):
        return Finding(DIVERGED, FAILS, files)
    won = race(slow)
    if won is None:
        return None
    sync, asynchronous = (seconds_of(slow[a]) / seconds_of(even[a]) for a in paper.ALGORITHMS)
    longer, best = _longer(even["sync"], slow["sync"]), balanced(slow["adpsgd"])
    right = [abs(longer - (factor - 1)) <= 0.05 * (factor - 1), asynchronous <= best / ENOUGH, won.share >= ENOUGH]
    text = f"SYNC ×{sync:.2f}, a round {longer:.2f} steps longer; async ×{asynchronous:.2f} (perfect balancing "
    text += (
        f"×{best:.2f}); to {won.quality} {won.speed_up:.2f} times as fast as SYNC, {won.share:.0%} of {won.ideal:.2f}"
    )
    free = _padded(slow["sync"])
    text += f" ({won.share * free:.1%} if SYNC's all-reduce took no time)" if free < 0.995 else ""
    return Finding(text, verdict_of(right), files)


def _padded(slow: Record) -> float:
    """The part of SYNC's time that its padded steps make up; the rest is the all-reduce."""
    rounds, speeds = slow["global_steps"] / slow["config"]["learners"], slow["config"]["speeds"]
    return min(1.0, float(rounds * speeds["step_s"] * speeds["factor"] / seconds_of(slow)))


def _longer(even: Record, slow: Record) -> float:
    """By how many normal steps the slow learner lengthens a round."""
    rounds, step = slow["global_steps"] / slow["config"]["learners"], slow["config"]["speeds"]["step_s"]
    return (seconds_of(slow) - seconds_of(even)) / float(rounds * step)


def collapse(choose: Choose, records: Sequence[Record]) -> Finding | None:
    """With batch and learning rate doubled SYNC collapses, and ADPSGD learns."""
    found = beside(choose(records), "usual", "doubled", 1)
    if found is None:
        return None
    usual, doubled = found
    words = [f"{name} {shown(doubled[a])} ({shown(usual[a])} with the usual ones)" for a, name in paper.NAMES.items()]
    verdict = FAILS  # where the usual runs diverged there is nothing to compare with
    if not any(record.get("diverged") for record in usual.values()):
        verdict = _collapsed({a: _learns(doubled[a], usual[a]) for a in paper.ALGORITHMS})
    files = files_of([doubled, usual])
    return Finding(", ".join(words), settled(verdict, files), files)


def collapse_of_senet(records: Sequence[Record]) -> Finding | None:
    """SENet-18 at large noise: SYNC ends at chance, and ADPSGD learns. In a shorter run SYNC may collapse yet."""
    found = longest(full(records, "senet18")).get(("senet18", NOISY[-1]))
    if found is None:
        return None
    pair, epochs = found[0], found[0]["sync"]["cell"]["epochs"]
    text = f"of {epochs:g} epochs: SYNC {shown(pair['sync'])}, async {shown(pair['adpsgd'])}"
    learns = {a: worth(pair[a]) > limit for a, limit in zip(paper.ALGORITHMS, (15, 50), strict=True)}
    open_yet = epochs < paper.EPOCHS["cifar10"] and learns["sync"] and not pair["adpsgd"].get("diverged")
    return Finding(text, SHORTER if open_yet else _collapsed(learns), files_of([pair]))


def _collapsed(learns: Mapping[str, bool]) -> str:
    """That both learn is no part of the claim."""
    if learns["sync"]:
        return FAILS
    return HOLDS if learns["adpsgd"] else PARTLY


def _learns(record: Record, usual: Record) -> bool:
    """It covers at least half of the way from the usual run's worst evaluation to its end."""
    if record.get("diverged"):
        return False
    start, end = min(course(usual)), course(usual)[-1]
    return course(record)[-1] >= (start + end) / 2
