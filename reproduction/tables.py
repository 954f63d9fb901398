"""A study's records → tables of text, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reproduction import paper
from reproduction.cells import Record

SHORT, CLOSE = 0.05, 0.01  # a quality to race to: so much short of what both runs reach, relative to it


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is printed: a title, and cells of text below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def quality(record: Record | None, key: str = "accuracy") -> float | None:
    """Accuracy in %, or the loss where the study is about speech; None where there is none."""
    if record is None or record.get("diverged"):
        return None
    if paper.family(record["cell"]["model"]) == "speech":
        return record.get(key.replace("accuracy", "loss"))
    value = record.get(key)
    return None if value is None else 100 * value


def failed(record: Record) -> bool:
    """It diverged, or its held-out loss ended above that of its first evaluation."""
    losses: list[float] = record["curve"]["loss"] if paper.family(record["cell"]["model"]) == "speech" else []
    return bool(record.get("diverged")) or (len(losses) > 1 and losses[-1] > losses[0])


def _text(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float, digits: int = 2) -> str:
    """With its sign, as print has it."""
    return f"{value:+.{digits}f}".replace("-", "−")


class Setting(NamedTuple):
    """A training cell's identity but for its algorithm. `letter`: σ is the paper's noise, z a multiplier, ε what
    a budget needs."""

    form: str
    model: str
    letter: str
    noise: float
    variant: str
    engine: str
    epochs: float
    seed: int
    momentum: float = 0.0

    @property
    def title(self) -> str:
        """The model, and the momentum of its training: paper mode has one by default, private mode has none."""
        plain = "plain SGD" if self.letter == paper.LETTERS["sigma"] else ""
        return ", ".join(filter(None, (self.model, f"momentum {self.momentum:g}" if self.momentum else plain)))


def pairs_of(records: Iterable[Record]) -> dict[Setting, dict[str, Record]]:
    """setting → algorithm → record, in the order of the paper's table."""
    found: dict[Setting, dict[str, Record]] = {}
    for record in records:
        cell = dict(record["cell"])
        kind, noise = paper.noise_of(cell)
        algorithm = cell.pop("algorithm")
        del cell[kind]
        found.setdefault(Setting(letter=paper.LETTERS[kind], noise=noise, **cell), {})[algorithm] = record
    order = {name: number for number, name in enumerate(paper.MODELS)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0].model, 99), item[0])))


def shown(record: Record | None, key: str = "accuracy") -> str:
    if record is not None and record.get("diverged"):
        return "diverged"
    return _text(
        quality(record, key), 3 if record is not None and paper.family(record["cell"]["model"]) == "speech" else 2
    )


def accuracy_table(title: str, records: Sequence[Record]) -> list[Table]:
    """One row per model, noise, epochs and seed: the paper's SYNC and asynchronous figures, and ours."""
    rows = []
    for key, pair in pairs_of(records).items():
        sync, asynchronous = pair.get("sync"), pair.get("adpsgd")
        family = paper.family(key.model)
        known = paper.MODELS.get(key.model) if not key.form and key.letter == "σ" else None
        published = [known.result(key.noise, a, family) if known else None for a in paper.ALGORITHMS]
        digits = 3 if family == "speech" else 2
        ours = quality(sync), quality(asynchronous)
        gap = None if None in ours else ours[1] - ours[0]  # type: ignore[operator]
        row = [key.title, _noise(key), f"{key.epochs:g}", str(key.seed)]
        row += [_text(each, digits) for each in published]
        row += [shown(sync), shown(asynchronous), "–" if gap is None else signed(gap, digits)]
        row += [_recomputed(sync), _recomputed(asynchronous), _single(asynchronous), _epsilon(asynchronous or sync)]
        rows.append(row)
    columns = ["model", "noise", "epochs", "seed", "paper SYNC", "paper async", "SYNC", "async", "async − SYNC"]
    columns += ["SYNC, statistics recomputed", "async, statistics recomputed", "single async learners", "ε"]
    return [_without_empty(Table(title=title, columns=columns, rows=rows))] if rows else []


def summary_table(records: Sequence[Record]) -> Table:
    """ResNet-18 after the paper's 300 epochs, seed 0: the paper's accuracies, and ours with and without momentum."""
    found = {
        (cell["algorithm"], cell["sigma"], cell.get("momentum", 0.0)): record
        for record in records
        if (cell := record["cell"])["model"] == "resnet18" and "sigma" in cell and not cell["form"] + cell["engine"]
        if (cell["epochs"], cell["seed"]) == (paper.EPOCHS["cifar10"], 0)
    }
    momenta = {"momentum 0.9": paper.MOMENTUM, "plain SGD": 0.0}
    rows = []
    for noise in paper.NOISE["cifar10"]:
        row = [f"σ = {noise:g}"] + [_text(paper.MODELS["resnet18"].result(noise, a)) for a in paper.ALGORITHMS]
        rows.append(row + [shown(found.get((a, noise, m))) for m in momenta.values() for a in paper.ALGORITHMS])
    columns = [f"{words}{name}" for words in ("paper, ", *(f"{m}, " for m in momenta)) for name in paper.NAMES.values()]
    return Table(title="ResNet-18 after 300 epochs: accuracy in % of θ", columns=["noise", *columns], rows=rows)


def _without_empty(table: Table) -> Table:
    """Less the columns that say nothing in any row."""
    kept = [i for i in range(len(table.columns)) if {row[i] for row in table.rows} - {"–", "none"}]
    rows = [[row[i] for i in kept] for row in table.rows]
    return replace(table, columns=[table.columns[i] for i in kept], rows=rows)


def _recomputed(record: Record | None) -> str:
    """With BatchNorm statistics of the records as they are; and as training sees them, where that was taken."""
    plain, augmented = (shown(record, f"accuracy_recomputed{which}") for which in ("", "_augmented"))
    return plain if augmented in ("–", plain) else f"{plain} (augmented {augmented})"


def _single(record: Record | None) -> str:
    if record is None or record.get("diverged"):
        return "–"
    by_loss = paper.family(record["cell"]["model"]) == "speech"
    single = record["single_learners"]["loss" if by_loss else "accuracy"]
    factor, digits = (1, 3) if by_loss else (100, 2)
    return f"{factor * min(single):.{digits}f} … {factor * max(single):.{digits}f}"


def _epsilon(record: Record | None) -> str:
    guarantee: Any = None if record is None else record.get("guarantee")
    return "none" if guarantee in (None, "none") else _text(guarantee["epsilon"])


def slow_table(records: Sequence[Record]) -> list[Table]:
    """Time with the slow learner over time without it and the least that any method can take; time to a quality."""
    rows = []
    pairs = pairs_of(records)
    for key, pair in pairs.items():
        if key.variant != "slow":
            continue
        even = pairs.get(key._replace(variant="even"), {})
        for algorithm, record in pair.items():
            if algorithm not in even:
                continue
            times = [None if each.get("diverged") else seconds_of(each) for each in (even[algorithm], record)]
            slow_down = None if None in times else times[1] / times[0]  # type: ignore[operator]
            row = [*_start(key), algorithm, *(_text(each, 1) for each in times), _text(slow_down, 3)]
            row += [f"{balanced(record):.3f}", shown(even[algorithm]), shown(record), _shares(record)]
            rows.append(row)
    columns = ["model", "learners", "noise", "epochs", "seed", "algorithm", "seconds, all equal", "seconds, one slow"]
    columns += ["slow-down", "perfect balancing", "quality, all equal", "quality, one slow", "steps: slow one, others"]
    steps = Table(title="A slow learner: time for the same number of steps", columns=columns, rows=rows)
    return [_without_empty(steps), *_race_table(pairs)] if rows else []


def _shares(record: Record) -> str:
    """The steps of the learner that is always slow, and the mean of the others'."""
    speeds, steps = record["config"]["speeds"], list(record.get("steps", ()))
    if speeds["kind"] != "one-slow" or not steps:
        return "–"
    slow = steps.pop(speeds["learner"])
    return f"{slow}, {sum(steps) / len(steps):.0f}"


def _start(key: Setting) -> list[str]:
    return [key.title, key.engine or "simulated", _noise(key), f"{key.epochs:g}", str(key.seed)]


def _noise(key: Setting) -> str:
    return f"{key.letter} = {key.noise:g}"


def _race_table(pairs: dict[Setting, dict[str, Record]]) -> list[Table]:
    rows = []
    for key, pair in pairs.items():
        found, close = (race(pair, short) if key.variant == "slow" else None for short in (SHORT, CLOSE))
        if found is not None and close is not None:
            row = [*_start(key), found.quality]
            row += [f"{found.sync_s:.1f}", f"{found.adpsgd_s:.1f}", f"{found.speed_up:.2f}", f"{found.ideal:.2f}"]
            rows.append([*row, f"{found.share:.0%}", f"{close.share:.0%}"])
    columns = ["model", "learners", "noise", "epochs", "seed", "quality", "SYNC, seconds", "async, seconds", "speed-up"]
    columns += ["ideal speed-up", "share of it", f"share, {CLOSE:.0%} short"]
    title = f"A slow learner: time to a quality {SHORT:.0%} short of the lower of both runs' best"
    return [Table(title=title, columns=columns, rows=rows)] if rows else []


@dataclass(frozen=True, kw_only=True)
class Race:
    """Both algorithms with the slow learner, to the same quality. `ideal`: what perfect balancing would win."""

    quality: str
    sync_s: float
    adpsgd_s: float
    ideal: float

    @property
    def speed_up(self) -> float:
        return self.sync_s / self.adpsgd_s

    @property
    def share(self) -> float:
        return self.speed_up / self.ideal


def race(pair: Mapping[str, Record], short: float = SHORT) -> Race | None:
    """None while a run is missing, diverged or was evaluated only once.

    SYNC's round takes the slow learner's `factor`, so the ideal is `factor` over the least possible slow-down.
    """
    runs = [pair[a] for a in paper.ALGORITHMS if a in pair and not pair[a].get("diverged")]
    if len(runs) < 2 or any(len(run["curve"]["seconds"]) < 2 for run in runs):
        return None
    lower = min(max(course(run)) for run in runs)
    level = lower - short * abs(lower)
    sync_s, adpsgd_s = (time_to(run, level) for run in runs)
    speech = paper.family(runs[0]["cell"]["model"]) == "speech"
    return Race(
        quality=f"loss {-level:.3f}" if speech else f"{level:.1f}% accuracy",
        sync_s=sync_s,
        adpsgd_s=adpsgd_s,
        ideal=runs[1]["config"]["speeds"]["factor"] / balanced(runs[1]),
    )


def course(record: Record) -> list[float]:
    """The curve's quality, more is better: accuracy in %, or the negative loss."""
    if paper.family(record["cell"]["model"]) == "speech":
        return [-value for value in record["curve"]["loss"]]
    return [100 * value for value in record["curve"]["accuracy"]]


def time_to(record: Record, level: float) -> float:
    """Seconds until the quality reaches `level` and does not fall below it again, interpolated between evaluations; if
    it ends below, until it was last there.

    A run that is there from its first evaluation gets the time of that.
    """
    times, values = record["curve"]["seconds"], course(record)
    last = max(i for i, value in enumerate(values) if value >= level)
    after = next(i for i in range(last, -1, -1) if i == 0 or values[i - 1] < level)
    if not after:
        return float(times[0])
    share = (level - values[after - 1]) / (values[after] - values[after - 1])
    return float(times[after - 1] + share * (times[after] - times[after - 1]))


def seconds_of(record: Record) -> float:
    return float(record.get("virtual_seconds") or record["real_seconds"])


def balanced(record: Record) -> float:
    """The slow-down of perfect balancing, in the mean: K over the learners' paces together."""
    speeds, learners = record["config"]["speeds"], record["config"]["learners"]
    if speeds["kind"] == "one-slow":
        return float(learners / (learners - 1 + 1 / speeds["factor"]))
    return float(1 + (speeds["factor"] - 1) / learners)  # a learner's mean step: slow once in K


def case3_table(records: Sequence[Record]) -> list[Table]:
    rows = []
    for key, pair in pairs_of(records).items():
        row = [key.title, key.variant, _noise(key), f"{key.epochs:g}", str(key.seed)]
        rows.append([*row, shown(pair.get("sync")), shown(pair.get("adpsgd"))])
    columns = ["model", "batch and learning rate", "noise", "epochs", "seed", "SYNC", "async"]
    return [Table(title="Batch and learning rate doubled, small noise", columns=columns, rows=rows)]
