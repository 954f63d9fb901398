"""Verdicts on accuracies, losses and sizes. A judge reads a study's records and answers None while cells are missing.

A claim is judged by the longest runs of one length that both algorithms made with the same seeds, at the paper's noise.
All records that a judge is given have the same momentum (`of_momentum`). A run that diverged is finished: it is
comparable to none, and its accuracy counts as 0. A run whose loss ended above its first one is comparable to none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from reproduction import paper
from reproduction.cells import Record
from reproduction.tables import Setting, failed, pairs_of, quality, signed

HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
SO_FAR = "holds where tested"
SHORTER = "not tested at the paper's length"
NOISY = paper.NOISE["cifar10"][1:]
DIVERGED, UNLEARNED = "a run diverged", "a run diverged or ended above its first loss"
Choose = Callable[[Sequence[Record]], list[Record]]
"""Which of a study's records a claim is about."""
Pairs = list[Mapping[str, Record]]
"""Algorithm → record, for each seed."""


@dataclass(frozen=True)
class Finding:
    """Our figure for a claim, the verdict, and the files that both were read off.

    `missing`: the options that run the cells of the claim that are not finished; empty where all are.
    """

    ours: str
    verdict: str
    files: Sequence[Record] = ()
    missing: str = ""


def verdict_of(right: Sequence[bool], missing: str = "") -> str:
    if all(right):
        return SO_FAR if missing else HOLDS
    return PARTLY if any(right) else FAILS


def _options(cells: Sequence[tuple[str, float]]) -> str:
    """What runs these cells, (algorithm, noise) each. Cells that are finished are not run again."""
    algorithms, noises = {algorithm for algorithm, _ in cells}, sorted({noise for _, noise in cells})
    only = [f"--algorithm {name}" for name in algorithms] if len(algorithms) == 1 else []
    return " ".join(only + [f"--noise {noise:g}" for noise in noises])


def of_momentum(records: Iterable[Record], momentum: float) -> list[Record]:
    """A cell that names no momentum has none: plain SGD, or nothing is trained."""
    return [record for record in records if record["cell"].get("momentum", 0.0) == momentum]


def settled(verdict: str, files: Sequence[Record]) -> str:
    """The verdict; but runs of the paper's recipe that saw fewer records than the paper's settle nothing."""
    cell = files[0]["cell"]
    if cell.get("form") or "sigma" not in cell or cell["model"] not in paper.MODELS:
        return verdict
    data, whole = paper.family(cell["model"]), [record for record in files if not record.get("diverged")]
    seen = [record["global_steps"] * record["config"]["batch_size"] for record in whole]
    return SHORTER if seen and max(seen) < 0.99 * paper.EPOCHS[data] * paper.SAMPLES[data] else verdict


def full(records: Sequence[Record], model: str | None = None) -> list[Record]:
    """The paper's recipe at its own size, of all models or of one."""
    return _chosen(records, form="", model=model)


def small(records: Sequence[Record], model: str | None = None) -> list[Record]:
    return _chosen(records, form="quick", model=model)


def private(form: str, model: str, records: Sequence[Record]) -> list[Record]:
    """The runs with clipping and an accountant in place of the paper's bare noise."""
    return _chosen(records, form=form, model=model, noise="z")


def _chosen(records: Sequence[Record], *, form: str, model: str | None, noise: str = "sigma") -> list[Record]:
    kinds = {"sigma", "z", "epsilon"} - {noise}
    chosen = [r for r in records if r["cell"].get("form", "") == form and not kinds & set(r["cell"])]
    return [r for r in chosen if model in (None, r["cell"].get("model"))]


def whole_row(records: Sequence[Record]) -> list[Record]:
    """ResNet-18 at the paper's number of epochs, simulated."""
    chosen = full(records, "resnet18")
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


def beside(
    records: Iterable[Record], usual: str, other: str, level: int, engine: str = ""
) -> tuple[Mapping[str, Record], Mapping[str, Record]] | None:
    """The longest pairs of two variants, alike in all else, at the paper's noise of this level; of the lowest seed."""
    found: dict[tuple[float, int], dict[str, Mapping[str, Record]]] = {}
    for key, pair in _complete(records, engine):
        if key.noise == paper.NOISE[paper.family(key.model)][level]:
            found.setdefault((key.epochs, -key.seed), {})[key.variant] = pair
    whole = [at for at, variants in found.items() if {usual, other} <= set(variants)]
    return (found[max(whole)][usual], found[max(whole)][other]) if whole else None


def files_of(pairs: Iterable[Mapping[str, Record]]) -> list[Record]:
    return [pair[algorithm] for pair in pairs for algorithm in paper.ALGORITHMS]


def worth(record: Record) -> float:
    """Its quality; that of a run that diverged is the worst there is."""
    value, by_loss = quality(record), paper.family(record["cell"]["model"]) == "speech"
    return (math.inf if by_loss else 0.0) if value is None else value


def _mean(records: Sequence[Record]) -> float:
    return sum(map(worth, records)) / len(records)


def _row(records: Sequence[Record]) -> dict[tuple[str, float], list[Record]]:
    """ResNet-18 at 300 epochs: (algorithm, noise) → its records, one for each seed."""
    found: dict[tuple[str, float], list[Record]] = {}
    for record in whole_row(records):
        found.setdefault((record["cell"]["algorithm"], record["cell"]["sigma"]), []).append(record)
    return found


def level(cells: Sequence[tuple[str, float]], records: Sequence[Record]) -> Finding | None:
    """Each (algorithm, noise): at most 1.5 points below the paper."""
    row = _row(records)
    there = [cell for cell in cells if cell in row]
    if not there:
        return None
    near = [_published(*cell) - _mean(row[cell]) <= 1.5 for cell in there]
    text = ", ".join(f"{paper.NAMES[a]} {_mean(row[a, sigma]):.2f} at σ = {sigma:g}" for a, sigma in there)
    missing = _options([cell for cell in cells if cell not in row])
    return Finding(text, verdict_of(near, missing), [record for cell in there for record in row[cell]], missing)


def noise_cost(records: Sequence[Record]) -> Finding | None:
    """What noise costs: each loss is within 1.5 points of the paper's."""
    texts, near, files, row = [], list[bool](), list[Record](), _row(records)
    for algorithm, name in paper.NAMES.items():
        noises = [sigma for sigma in NOISY if {(algorithm, 0.0), (algorithm, sigma)} <= set(row)]
        lost = [_mean(row[algorithm, sigma]) - _mean(row[algorithm, 0.0]) for sigma in noises]
        claimed = [_published(algorithm, sigma) - _published(algorithm, 0.0) for sigma in noises]
        near += [abs(a - b) <= 1.5 for a, b in zip(lost, claimed, strict=True)]
        texts += [f"{name} {signed(each)} at σ = {sigma:g}" for each, sigma in zip(lost, noises, strict=True)]
        files += [record for sigma in (0.0, *noises) if noises for record in row[algorithm, sigma]]
    if not texts:
        return None
    missing = _options([(a, sigma) for a in paper.ALGORITHMS for sigma in (0.0, *NOISY) if (a, sigma) not in row])
    return Finding(", ".join(texts), verdict_of(near, missing), files, missing)


def _published(algorithm: str, sigma: float) -> float:
    value = paper.MODELS["resnet18"].result(sigma, algorithm)
    assert value is not None  # the paper's table has all of them
    return value


def comparable(
    choose: Choose, allowed: float, needed: int, records: Sequence[Record], wanted: Sequence[float] = ()
) -> Finding | None:
    """Asynchronous against SYNC at `needed` noises: accuracies differ by at most `allowed` either way; a loss may be
    higher by `allowed`, and lower by anything. Of the noises `wanted`, those not run are named."""
    found = _by_noise(choose(records), needed)
    if found is None:
        return None
    within, parts = [], []
    for noise, pairs in found.items():
        cell, gap = pairs[0]["sync"]["cell"], _gap(pairs)
        by_loss, letter = paper.family(cell["model"]) == "speech", paper.LETTERS[paper.noise_of(cell)[0]]
        within.append(gap is not None and (gap if by_loss else abs(gap)) <= allowed)
        failure = UNLEARNED if by_loss else DIVERGED
        text = failure if gap is None else signed(gap, 3 if by_loss else 2)
        seeds = f" (mean of {len(pairs)} seeds)" if len(pairs) > 1 else ""
        parts.append(f"{text} at {letter} = {noise:g}{seeds}")
    files, missing = files_of(chain(*found.values())), " ".join(f"--noise {n:g}" for n in wanted if n not in found)
    verdict = settled(verdict_of(within, missing), files)
    return Finding("async − SYNC " + ", ".join(parts), verdict, files, missing)


def recipe(records: Sequence[Record]) -> Finding | None:
    """The private recipe by both algorithms, the longest runs: |asynchronous − SYNC| at most 3 points."""
    whole = [(key.epochs, pair) for key, pair in pairs_of(records).items() if key.letter == "ε" and len(pair) == 2]
    if not whole:
        return None
    most = max(epochs for epochs, _ in whole)
    pairs: Pairs = [pair for epochs, pair in whole if epochs == most]
    gap, by = _gap(pairs), {a: _mean([pair[a] for pair in pairs]) for a in paper.ALGORITHMS}
    text = ", ".join(f"{name} {by[a]:.2f}" for a, name in paper.NAMES.items())
    return Finding(
        text if gap is not None else DIVERGED, verdict_of([gap is not None and abs(gap) <= 3]), files_of(pairs)
    )


def _gap(pairs: Pairs) -> float | None:
    """Asynchronous − SYNC, the mean over seeds; None where a run failed."""
    if any(failed(record) for record in files_of(pairs)):
        return None
    return _mean([pair["adpsgd"] for pair in pairs]) - _mean([pair["sync"] for pair in pairs])


def comparable_others(records: Sequence[Record]) -> Finding | None:
    """The eight other CNNs at 20 epochs or more, of what is finished: |asynchronous − SYNC| at most 3 points. Where
    SYNC itself has not reached 50 %, nothing is compared, nor at SENet-18's large noise, where the paper's own differ.
    """
    others = set(paper.CNNS) - {"resnet18"}
    found = {
        key: pairs
        for key, pairs in longest(full(records)).items()
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
    verdict = SHORTER if lengths[0] < paper.EPOCHS["cifar10"] else verdict_of(within)
    return Finding(text, verdict, files_of(chain(*found.values())))


def longest(records: Iterable[Record]) -> dict[tuple[str, float], Pairs]:
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
    files = files_of(chain(*found.values()))
    return Finding("; ".join(texts), settled(verdict_of(steady), files), files)


def sizes(records: Sequence[Record]) -> Finding | None:
    """Every model has the paper's size, within a hundredth of a MiB."""
    chosen = {r["cell"]["model"]: r for r in full(records)}
    if len(chosen) < len(paper.MODELS):
        return None
    equal = [abs(chosen[name]["mib"] - known.mib) < 0.015 for name, known in paper.MODELS.items()]
    return Finding(f"{sum(equal)} of {len(equal)} within 0.01 MiB", verdict_of(equal), list(chosen.values()))
