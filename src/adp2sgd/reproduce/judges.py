"""Verdicts on the paper's experiments: each judge reads a study's records, and answers None while cells are missing.

A claim is judged by the longest runs of one length that both algorithms made with the same seeds, at the paper's noise.
A run that diverged is finished: it is comparable to none, and its accuracy counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from adp2sgd.reproduce import paper
from adp2sgd.reproduce.cells import Record
from adp2sgd.reproduce.tables import Setting, balanced, course, pairs_of, quality, race, seconds_of, shown, signed

HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
SHORTER = "not tested at the paper's length"
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


def _settled(verdict: str, files: Sequence[Record]) -> str:
    """The verdict; but runs of the paper's recipe that saw fewer records than the paper's settle nothing."""
    cell = files[0]["cell"]
    if cell.get("form") or "sigma" not in cell or cell["model"] not in paper.MODELS:
        return verdict
    data, whole = paper.family(cell["model"]), [record for record in files if not record.get("diverged")]
    seen = [record["global_steps"] * record["config"]["batch_size"] for record in whole]
    return SHORTER if seen and max(seen) < 0.99 * paper.EPOCHS[data] * paper.SAMPLES[data] else verdict


def full(records: Sequence[Record], model: str | None = None, momentum: float = 0.0) -> list[Record]:
    """The paper's recipe at its own size, of all models or of one."""
    return _chosen(records, form="", model=model, momentum=momentum)


def small(records: Sequence[Record], model: str | None = None) -> list[Record]:
    return _chosen(records, form="quick", model=model)


def private(form: str, model: str, records: Sequence[Record]) -> list[Record]:
    """The runs with clipping and an accountant in place of the paper's bare noise."""
    return _chosen(records, form=form, model=model, noise="z")


def _chosen(
    records: Sequence[Record], *, form: str, model: str | None, momentum: float = 0.0, noise: str = "sigma"
) -> list[Record]:
    kinds = {"sigma", "z", "epsilon"} - {noise}
    chosen = [r for r in records if r["cell"].get("form", "") == form and not kinds & set(r["cell"])]
    chosen = [r for r in chosen if r["cell"].get("momentum", 0.0) == momentum]
    return [r for r in chosen if model in (None, r["cell"].get("model"))]


def whole_row(records: Sequence[Record], momentum: float = 0.0) -> list[Record]:
    """ResNet-18 at the paper's number of epochs, simulated."""
    chosen = full(records, "resnet18", momentum)
    return [r for r in chosen if r["cell"]["epochs"] == paper.EPOCHS["cifar10"] and not r["cell"]["engine"]]


def _complete(records: Iterable[Record], engine: str = "") -> Iterator[tuple[Setting, Mapping[str, Record]]]:
    """What both algorithms have run at a noise of the paper's."""
    for key, pair in pairs_of(records).items():
        if key.engine == engine and len(pair) == 2 and key.noise in paper.NOISE[paper.family(key.model)]:
            yield key, pair


def _by_noise(records: Iterable[Record], needed: int) -> dict[float, Pairs] | None:
    """noise → the pairs of all seeds, at the largest number of epochs that `needed` noises have in common."""
    lengths: dict[float, dict[float, Pairs]] = {}
    for key, pair in _complete(records):
        lengths.setdefault(key.epochs, {}).setdefault(key.noise, []).append(pair)
    enough = [epochs for epochs, found in lengths.items() if len(found) >= needed]
    return dict(sorted(lengths[max(enough)].items())) if enough else None


def _beside(
    records: Iterable[Record], usual: str, other: str, level: int, engine: str = ""
) -> tuple[Mapping[str, Record], Mapping[str, Record]] | None:
    """The longest pairs of two variants, alike in all else, at the paper's noise of this level; of the lowest seed."""
    found: dict[tuple[float, int], dict[str, Mapping[str, Record]]] = {}
    for key, pair in _complete(records, engine):
        if key.noise == paper.NOISE[paper.family(key.model)][level]:
            found.setdefault((key.epochs, -key.seed), {})[key.variant] = pair
    whole = [at for at, variants in found.items() if {usual, other} <= set(variants)]
    return (found[max(whole)][usual], found[max(whole)][other]) if whole else None


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


def noise_cost(
    records: Sequence[Record], algorithms: Sequence[str] = paper.ALGORITHMS, noises: Sequence[float] = NOISY,
    momentum: float = 0.0,
) -> Finding | None:  # fmt: skip
    """What noise costs: each loss is within 1.5 points of the paper's."""
    texts, near, row = [], [], _row(records, momentum)
    cells = [(algorithm, sigma) for algorithm in algorithms for sigma in (0.0, *noises)]
    if not set(cells) <= set(row):
        return None
    for algorithm in algorithms:
        lost = [_mean(row[algorithm, sigma]) - _mean(row[algorithm, 0.0]) for sigma in noises]
        claimed = [_published(algorithm, sigma) - _published(algorithm, 0.0) for sigma in noises]
        near += [abs(a - b) <= 1.5 for a, b in zip(lost, claimed, strict=True)]
        texts.append(f"{paper.NAMES[algorithm]} {', '.join(signed(each) for each in lost)}")
    levels = ", ".join(f"{sigma:g}" for sigma in noises)
    files = [record for cell in cells for record in row[cell]]
    return Finding(f"{'; '.join(texts)} points at σ = {levels}", _verdict(near), files)


def _published(algorithm: str, sigma: float) -> float:
    value = paper.MODELS["resnet18"].result(sigma, algorithm)
    assert value is not None  # the paper's table has all of them
    return value


def comparable(choose: Choose, allowed: float, needed: int, records: Sequence[Record]) -> Finding | None:
    """Asynchronous against SYNC at `needed` noises: accuracies differ by at most `allowed` either way; a loss may be
    higher by `allowed`, and lower by anything."""
    found = _by_noise(choose(records), needed)
    if found is None:
        return None
    within, parts = [], []
    for noise, pairs in found.items():
        cell, gap = pairs[0]["sync"]["cell"], _gap(pairs)
        by_loss, letter = paper.family(cell["model"]) == "speech", paper.LETTERS[paper.noise_of(cell)[0]]
        within.append(gap is not None and (gap if by_loss else abs(gap)) <= allowed)
        text = DIVERGED if gap is None else signed(gap, 3 if by_loss else 2)
        seeds = f" (mean of {len(pairs)} seeds)" if len(pairs) > 1 else ""
        parts.append(f"{text} at {letter} = {noise:g}{seeds}")
    files = _files(chain(*found.values()))
    return Finding("async − SYNC " + ", ".join(parts), _settled(_verdict(within), files), files)


def recipe(records: Sequence[Record]) -> Finding | None:
    """The private recipe by both algorithms, the longest runs: |asynchronous − SYNC| at most 3 points."""
    whole = [(key.epochs, pair) for key, pair in pairs_of(records).items() if key.letter == "ε" and len(pair) == 2]
    if not whole:
        return None
    longest = max(epochs for epochs, _ in whole)
    pairs: Pairs = [pair for epochs, pair in whole if epochs == longest]
    gap, by = _gap(pairs), {a: _mean([pair[a] for pair in pairs]) for a in paper.ALGORITHMS}
    text = ", ".join(f"{name} {by[a]:.2f}" for a, name in paper.NAMES.items())
    return Finding(text if gap is not None else DIVERGED, _verdict([gap is not None and abs(gap) <= 3]), _files(pairs))


def _gap(pairs: Pairs) -> float | None:
    """Asynchronous − SYNC, the mean over seeds; None where a run diverged."""
    if any(record.get("diverged") for record in _files(pairs)):
        return None
    return _mean([pair["adpsgd"] for pair in pairs]) - _mean([pair["sync"] for pair in pairs])


def comparable_others(records: Sequence[Record]) -> Finding | None:
    """The eight other CNNs at 20 epochs or more, of what is finished: |asynchronous − SYNC| at most 3 points. Where
    SYNC itself has not reached 50 %, nothing is compared, nor at SENet-18's large noise, where the paper's own differ.
    """
    others = set(paper.CNNS) - {"resnet18"}
    found = {
        key: pairs
        for key, pairs in _longest(full(records)).items()
        if key[0] in others and key != ("senet18", NOISY[-1]) and pairs[0]["sync"]["cell"]["epochs"] >= 20
    }
    learned = {key: pairs for key, pairs in found.items() if _mean([pair["sync"] for pair in pairs]) >= 50}
    if not learned:
        return None
    ends = {key: _gap(pairs) for key, pairs in learned.items()}
    gaps = {key: gap for key, gap in ends.items() if gap is not None}
    within = [gap is not None and abs(gap) <= 3 for gap in ends.values()]
    lengths = sorted({pair["sync"]["cell"]["epochs"] for pairs in learned.values() for pair in pairs})
    text = f"after {lengths[0]:g} to {lengths[-1]:g} epochs {sum(within)} of {len(within)} pairs"
    if gaps:
        far = max(gaps, key=lambda key: abs(gaps[key]))
        text += f"; the farthest {signed(gaps[far])} ({far[0]}, σ = {far[1]:g})"
    for count, words in (
        (len(ends) - len(gaps), "of them diverged"),
        (len(found) - len(learned), "more where SYNC stayed below 50%"),
        (len(others) * len(paper.NOISE["cifar10"]) - 1 - len(found), "not run yet"),
    ):
        text += f"; {count} {words}" if count else ""
    verdict = SHORTER if lengths[0] < paper.EPOCHS["cifar10"] else _verdict(within)
    return Finding(text, verdict, _files(chain(*found.values())))


def _longest(records: Iterable[Record]) -> dict[tuple[str, float], Pairs]:
    """(model, noise) → the pairs of the longest runs, one for each seed."""
    found: dict[tuple[str, float], dict[float, Pairs]] = {}
    for key, pair in _complete(records):
        found.setdefault((key.model, key.noise), {}).setdefault(key.epochs, []).append(pair)
    return {key: lengths[max(lengths)] for key, lengths in found.items()}


def rises(choose: Choose, needed: int, records: Sequence[Record]) -> Finding | None:
    """The held-out loss grows with the noise, over at least `needed` levels of it."""
    found = _by_noise(choose(records), needed)
    if found is None:
        return None
    texts, steady = [], []
    for algorithm, name in paper.NAMES.items():
        values = [_mean([pair[algorithm] for pair in pairs]) for pairs in found.values()]
        steady.append(values == sorted(values) and math.isfinite(values[-1]))
        texts.append(f"{name} {', '.join(f'{v:.3f}' if math.isfinite(v) else 'diverged' for v in values)}")
    files = _files(chain(*found.values()))
    return Finding("; ".join(texts), _settled(_verdict(steady), files), files)


# --- The three cases ---


def slow_down(choose: Choose, factor: float, records: Sequence[Record], engine: str = "") -> Finding | None:
    """SYNC's round takes `factor` − 1 steps longer (5 % allowed), ADPSGD at most 1/0.85 of perfect balancing; and in
    time to a quality ADPSGD wins at least 85 % of what perfect balancing would."""
    found = _beside(choose(records), "even", "slow", 2, engine)
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
    return Finding(text, _verdict(right), files)


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
    found = _beside(choose(records), "usual", "doubled", 1)
    if found is None:
        return None
    usual, doubled = found
    words = [f"{name} {shown(doubled[a])} ({shown(usual[a])} with the usual ones)" for a, name in paper.NAMES.items()]
    verdict = FAILS  # where the usual runs diverged there is nothing to compare with
    if not any(record.get("diverged") for record in usual.values()):
        verdict = _collapsed({a: _learns(doubled[a], usual[a]) for a in paper.ALGORITHMS})
    files = _files([doubled, usual])
    return Finding(", ".join(words), _settled(verdict, files), files)


def collapse_of_senet(records: Sequence[Record]) -> Finding | None:
    """SENet-18 at large noise: SYNC ends at chance, and ADPSGD learns. In a shorter run SYNC may collapse yet."""
    found = _longest(full(records, "senet18")).get(("senet18", NOISY[-1]))
    if found is None:
        return None
    pair, epochs = found[0], found[0]["sync"]["cell"]["epochs"]
    text = f"of {epochs:g} epochs: SYNC {shown(pair['sync'])}, async {shown(pair['adpsgd'])}"
    learns = {a: _worth(pair[a]) > limit for a, limit in zip(paper.ALGORITHMS, (15, 50), strict=True)}
    open_yet = epochs < paper.EPOCHS["cifar10"] and learns["sync"] and not pair["adpsgd"].get("diverged")
    return Finding(text, SHORTER if open_yet else _collapsed(learns), _files([pair]))


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


def sizes(records: Sequence[Record]) -> Finding | None:
    """Every model has the paper's size, within a hundredth of a MiB."""
    chosen = {r["cell"]["model"]: r for r in full(records)}
    if len(chosen) < len(paper.MODELS):
        return None
    equal = [abs(chosen[name]["mib"] - known.mib) < 0.015 for name, known in paper.MODELS.items()]
    return Finding(f"{sum(equal)} of {len(equal)} within 0.01 MiB", _verdict(equal), list(chosen.values()))
