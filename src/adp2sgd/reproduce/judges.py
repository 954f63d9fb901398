"""Verdicts on the paper's experiments: each judge reads a study's records, and answers None while cells are missing.

A claim is judged by the longest runs that both algorithms made with the same seeds, at the paper's noise. A run that
diverged is finished: its accuracy counts as 0, its loss as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from adp2sgd.reproduce import paper
from adp2sgd.reproduce.cells import Record
from adp2sgd.reproduce.tables import balanced, course, pairs_of, quality, race, seconds_of, shown, signed

HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
NOISY = paper.NOISE["cifar10"][1:]
DIVERGED = "a run diverged"
ENOUGH = 0.85  # of what perfect balancing would win
Choose = Callable[[Sequence[Record]], list[Record]]
"""Which of a study's records a claim is about."""
Pairs = list[Mapping[str, Record]]
"""Algorithm → record, for each seed."""


@dataclass(frozen=True)
class Finding:
    """Our figure for a claim, the verdict, and the files that both were read off."""

    ours: str
    verdict: str
    files: Sequence[Record] = ()


def _verdict(right: Sequence[bool]) -> str:
    return HOLDS if all(right) else PARTLY if any(right) else FAILS


def full(records: Sequence[Record], model: str | None = None, momentum: float = 0.0) -> list[Record]:
    """The paper's recipe at its own size, of all models or of one."""
    return _as_published(records, "", model, momentum)


def small(records: Sequence[Record], model: str | None = None) -> list[Record]:
    return _as_published(records, "quick", model, 0.0)


def _as_published(records: Sequence[Record], form: str, model: str | None, momentum: float) -> list[Record]:
    chosen = [r for r in records if r["cell"].get("form", "") == form and not {"z", "epsilon"} & set(r["cell"])]
    chosen = [r for r in chosen if r["cell"].get("momentum", 0.0) == momentum]
    return [r for r in chosen if model in (None, r["cell"].get("model"))]


def whole_row(records: Sequence[Record], momentum: float = 0.0) -> list[Record]:
    """ResNet-18 at the paper's number of epochs."""
    chosen = full(records, "resnet18", momentum)
    return [r for r in chosen if r["cell"]["epochs"] == paper.EPOCHS["cifar10"]]


def longest(records: Iterable[Record], engine: str = "") -> dict[tuple[str, float, str], Pairs]:
    """(model, noise, variant) → the pairs of the longest runs at the paper's noises, one for each seed."""
    found: dict[tuple[str, float, str], dict[float, Pairs]] = {}
    for key, pair in pairs_of(records).items():
        if key.engine == engine and len(pair) == 2 and key.noise in paper.NOISE[paper.family(key.model)]:
            lengths = found.setdefault((key.model, key.noise, key.variant), {})
            lengths.setdefault(key.epochs, []).append(pair)
    return {key: lengths[max(lengths)] for key, lengths in found.items()}


def _files(pairs: Iterable[Mapping[str, Record]]) -> list[Record]:
    return [pair[algorithm] for pair in pairs for algorithm in paper.ALGORITHMS]


def _worth(record: Record) -> float:
    """Its quality; that of a run that diverged is the worst there is."""
    value, by_loss = quality(record), paper.family(record["cell"]["model"]) == "speech"
    return (math.inf if by_loss else 0.0) if value is None else value


def _mean(records: Sequence[Record]) -> float:
    return sum(map(_worth, records)) / len(records)


# --- Table 1 and speech ---


def _row(records: Sequence[Record], momentum: float = 0.0) -> dict[tuple[str, float], list[Record]]:
    """ResNet-18 at 300 epochs: (algorithm, noise) → its records, one for each seed."""
    found: dict[tuple[str, float], list[Record]] = {}
    for record in whole_row(records, momentum):
        found.setdefault((record["cell"]["algorithm"], record["cell"]["sigma"]), []).append(record)
    return found


def level(cells: Sequence[tuple[str, float]], records: Sequence[Record], momentum: float = 0.0) -> Finding | None:
    """Each (algorithm, noise): at most 1.5 points below the paper."""
    row = _row(records, momentum)
    if not set(cells) <= set(row):
        return None
    near = [_published(*cell) - _mean(row[cell]) <= 1.5 for cell in cells]
    text = ", ".join(f"{paper.NAMES[a]} {_mean(row[a, sigma]):.2f} at σ = {sigma:g}" for a, sigma in cells)
    return Finding(text, _verdict(near), [record for cell in cells for record in row[cell]])


def noise_cost(records: Sequence[Record]) -> Finding | None:
    """What noise costs: each loss is within 1.5 points of the paper's."""
    texts, near, row = [], [], _row(records)
    if any((algorithm, sigma) not in row for algorithm in paper.NAMES for sigma in (0.0, *NOISY)):
        return None
    for algorithm, name in paper.NAMES.items():
        lost = [_mean(row[algorithm, sigma]) - _mean(row[algorithm, 0.0]) for sigma in NOISY]
        claimed = [_published(algorithm, sigma) - _published(algorithm, 0.0) for sigma in NOISY]
        near += [abs(a - b) <= 1.5 for a, b in zip(lost, claimed, strict=True)]
        texts.append(f"{name} {', '.join(signed(each) for each in lost)}")
    files = [record for found in row.values() for record in found]
    return Finding("; ".join(texts) + " points at σ = 1, 2, 4", _verdict(near), files)


def _published(algorithm: str, sigma: float) -> float:
    value = paper.MODELS["resnet18"].result(sigma, algorithm)
    assert value is not None  # the paper's table has all of them
    return value


def comparable(choose: Choose, allowed: float, needed: int, records: Sequence[Record]) -> Finding | None:
    """Asynchronous against SYNC at `needed` noises: accuracies differ by at most `allowed` either way; a loss may be
    higher by `allowed`, and lower by anything."""
    found = {noise: pairs for (_, noise, _), pairs in sorted(longest(choose(records)).items())}
    if len(found) < needed:
        return None
    within, parts = [], []
    for noise, pairs in found.items():
        by_loss = paper.family(pairs[0]["sync"]["cell"]["model"]) == "speech"
        gap = _gap(pairs)
        within.append((gap if by_loss else abs(gap)) <= allowed)
        text = signed(gap, 3 if by_loss else 2) if math.isfinite(gap) else "diverged"
        seeds = f" (mean of {len(pairs)} seeds)" if len(pairs) > 1 else ""
        parts.append(f"{text} at σ = {noise:g}{seeds}")
    return Finding("async − SYNC " + ", ".join(parts), _verdict(within), _files(chain(*found.values())))


def _gap(pairs: Pairs) -> float:
    """Asynchronous − SYNC, the mean over seeds; not finite where a loss is not."""
    return _mean([pair["adpsgd"] for pair in pairs]) - _mean([pair["sync"] for pair in pairs])


def comparable_others(records: Sequence[Record]) -> Finding | None:
    """The eight other CNNs at 20 epochs or more, of what is finished: |asynchronous − SYNC| at most 3 points. Where
    SYNC itself has not reached 50 %, nothing is compared."""
    others = {key: pairs for key, pairs in longest(full(records)).items() if key[0] in set(paper.CNNS) - {"resnet18"}}
    found = {key: pairs for key, pairs in others.items() if pairs[0]["sync"]["cell"]["epochs"] >= 20}
    learned = {key: pairs for key, pairs in found.items() if _mean([pair["sync"] for pair in pairs]) >= 50}
    if not learned:
        return None
    gaps = {key: _gap(pairs) for key, pairs in learned.items()}
    within = [abs(gap) <= 3 for gap in gaps.values()]
    far = max(gaps, key=lambda key: abs(gaps[key]))
    text = f"{sum(within)} of {len(gaps)} pairs; the farthest {signed(gaps[far])} ({far[0]}, σ = {far[1]:g})"
    missing, idle = 4 * (len(paper.CNNS) - 1) - len(found), len(found) - len(learned)
    text += f"; {idle} more where SYNC stayed below 50%" if idle else ""
    text += f"; {missing} not run yet" if missing else ""
    return Finding(text, _verdict(within), _files(chain(*found.values())))


def rises(choose: Choose, needed: int, records: Sequence[Record]) -> Finding | None:
    """The held-out loss grows with the noise, over at least `needed` levels of it."""
    found = {noise: pairs for (_, noise, _), pairs in sorted(longest(choose(records)).items())}
    if len(found) < needed:
        return None
    texts, steady = [], []
    for algorithm, name in paper.NAMES.items():
        values = [_mean([pair[algorithm] for pair in pairs]) for pairs in found.values()]
        steady.append(values == sorted(values) and math.isfinite(values[-1]))
        texts.append(f"{name} {', '.join(f'{v:.3f}' if math.isfinite(v) else 'diverged' for v in values)}")
    return Finding("; ".join(texts), _verdict(steady), _files(chain(*found.values())))


# --- The three cases ---


def slow_down(choose: Choose, factor: float, records: Sequence[Record], engine: str = "") -> Finding | None:
    """SYNC's round takes `factor` − 1 steps longer (5 % allowed), and ADPSGD at most 1/0.85 of perfect balancing."""
    found = _slowed(choose(records), engine)
    if found is None:
        return None
    even, slow = found
    files = [even["sync"], slow["sync"], even["adpsgd"], slow["adpsgd"]]
    if any(record.get("diverged") for record in files):
        return Finding(DIVERGED, FAILS, files)
    sync, asynchronous = (seconds_of(slow[a]) / seconds_of(even[a]) for a in paper.ALGORITHMS)
    longer, best = _longer(even["sync"], slow["sync"]), balanced(slow["adpsgd"])
    right = [abs(longer - (factor - 1)) <= 0.05 * (factor - 1), asynchronous <= best / ENOUGH]
    text = f"SYNC ×{sync:.2f}, a round {longer:.2f} steps longer; async ×{asynchronous:.2f}"
    return Finding(f"{text} (perfect balancing ×{best:.2f})", _verdict(right), files)


def race_won(choose: Choose, records: Sequence[Record], engine: str = "") -> Finding | None:
    """Beside a slow learner ADPSGD wins at least 85 % of what perfect balancing would, in time to a quality."""
    found = _slowed(choose(records), engine)
    if found is None:
        return None
    if any(record.get("diverged") for record in found[1].values()):
        return Finding(DIVERGED, FAILS, _files([found[1]]))
    won = race(found[1])
    if won is None:
        return None
    text = f"to {won.quality} {won.speed_up:.2f} times as fast as SYNC, {won.share:.0%} of {won.ideal:.2f}"
    return Finding(text, HOLDS if won.share >= ENOUGH else FAILS, _files([found[1]]))


def _slowed(records: Sequence[Record], engine: str) -> tuple[Mapping[str, Record], Mapping[str, Record]] | None:
    """The first seed's longest pairs at medium noise: all equal, and one slow."""
    found = longest(records, engine)
    for (model, noise, variant), pairs in found.items():
        even = found.get((model, noise, "even"))
        if variant == "slow" and even and noise == paper.NOISE[paper.family(model)][2]:
            return even[0], pairs[0]
    return None


def _longer(even: Record, slow: Record) -> float:
    """By how many normal steps the slow learner lengthens a round."""
    rounds, step = slow["global_steps"] / slow["config"]["learners"], slow["config"]["speeds"]["step_s"]
    return (seconds_of(slow) - seconds_of(even)) / float(rounds * step)


def collapse(choose: Choose, records: Sequence[Record]) -> Finding | None:
    """With batch and learning rate doubled SYNC collapses, and ADPSGD learns."""
    found = longest(choose(records))
    for (model, noise, variant), pairs in found.items():
        usual = found.get((model, noise, "usual"))
        if variant == "doubled" and usual:
            learns = {a: _learns(pairs[0][a], usual[0][a]) for a in paper.ALGORITHMS}
            words = [
                f"{name} {shown(pairs[0][a])} ({shown(usual[0][a])} with the usual ones)"
                for a, name in paper.NAMES.items()
            ]
            return Finding(", ".join(words), _collapsed(learns), _files([pairs[0], usual[0]]))
    return None


def collapse_of_senet(records: Sequence[Record]) -> Finding | None:
    """SENet-18 at large noise: SYNC ends at chance, and ADPSGD learns."""
    found = longest(full(records, "senet18")).get(("senet18", NOISY[-1], ""))
    if found is None:
        return None
    pair = found[0]
    text = f"SYNC {shown(pair['sync'])}, async {shown(pair['adpsgd'])} after {pair['sync']['cell']['epochs']:g} epochs"
    learns = {a: _worth(pair[a]) > limit for a, limit in zip(paper.ALGORITHMS, (15, 50), strict=True)}
    return Finding(text, _collapsed(learns), _files([pair]))


def _collapsed(learns: Mapping[str, bool]) -> str:
    """That both learn is no part of the claim."""
    if learns["sync"]:
        return FAILS
    return HOLDS if learns["adpsgd"] else PARTLY


def _learns(record: Record, usual: Record) -> bool:
    """It covers at least half of the way from the usual run's worst evaluation to its end."""
    if record.get("diverged") or usual.get("diverged"):
        return False
    start, end = min(course(usual)), course(usual)[-1]
    return course(record)[-1] >= (start + end) / 2


def sizes(records: Sequence[Record]) -> Finding | None:
    """Every model has the paper's size, to the hundredth that it prints."""
    chosen = {r["cell"]["model"]: r for r in full(records)}
    if len(chosen) < len(paper.MODELS):
        return None
    equal = [abs(chosen[name]["mib"] - known.mib) < 0.015 for name, known in paper.MODELS.items()]
    return Finding(f"{sum(equal)} of {len(equal)} within 0.01 MiB", _verdict(equal), list(chosen.values()))
