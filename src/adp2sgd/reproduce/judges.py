"""Verdicts on the paper's claims: each judge reads a study's records, and answers None while cells are missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adp2sgd.reproduce import paper
from adp2sgd.reproduce.cells import Record
from adp2sgd.reproduce.tables import least_slow_down, pairs_of, quality, race, seconds_of, shown, signed

HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
FULL_EPOCHS = 300.0
NOISY = paper.NOISE["cifar10"][1:]
Choose = Callable[[Sequence[Record]], list[Record]]
"""Which of a study's records a claim is about."""


@dataclass(frozen=True)
class Finding:
    """Our figure for a claim, the verdict, and the files that both were read off."""

    ours: str
    verdict: str
    files: Sequence[Record] = ()


def _verdict(right: Sequence[bool]) -> str:
    return HOLDS if all(right) else PARTLY if any(right) else FAILS


def full(records: Sequence[Record], model: str | None = None) -> list[Record]:
    """The paper's recipe at its own size, of all models or of one."""
    return _as_published(records, "", model)


def small(records: Sequence[Record], model: str | None = None) -> list[Record]:
    return _as_published(records, "quick", model)


def _as_published(records: Sequence[Record], form: str, model: str | None, momentum: float = 0.0) -> list[Record]:
    chosen = [r for r in records if r["cell"].get("form", "") == form and not {"z", "epsilon"} & set(r["cell"])]
    chosen = [r for r in chosen if r["cell"].get("momentum", 0.0) == momentum]
    return [r for r in chosen if model in (None, r["cell"].get("model"))]


@dataclass
class Gap:
    """Asynchronous − SYNC at one noise, for each seed, and the records."""

    values: list[float]
    files: list[Record]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


def _gaps(records: Sequence[Record]) -> dict[float, Gap]:
    """By noise, over pairs that are complete."""
    found: dict[float, Gap] = {}
    for key, pair in pairs_of(records).items():
        ours = quality(pair.get("sync")), quality(pair.get("adpsgd"))
        if ours[0] is not None and ours[1] is not None and not key.engine:
            gap = found.setdefault(key.noise, Gap([], []))
            gap.values.append(ours[1] - ours[0])
            gap.files += [pair["sync"], pair["adpsgd"]]
    return found


def _row(records: Sequence[Record], algorithm: str, momentum: float = 0.0) -> dict[float, list[Record]]:
    """ResNet-18 at 300 epochs: its records by noise, one for each seed."""
    found: dict[float, list[Record]] = {}
    for record in _as_published(records, "", "resnet18", momentum):
        if (record["cell"]["algorithm"], record["cell"]["epochs"]) == (algorithm, FULL_EPOCHS):
            found.setdefault(record["cell"]["sigma"], []).append(record)
    return dict(sorted(found.items()))


def _mean(records: Sequence[Record]) -> float:
    """Over seeds; a run that diverged counts as 0."""
    return sum(quality(record) or 0.0 for record in records) / len(records)


def level(algorithm: str, records: Sequence[Record]) -> Finding | None:
    """With noise: at most 1.5 points below the paper."""
    row = {sigma: found for sigma, found in _row(records, algorithm).items() if sigma in NOISY}
    if len(row) < len(NOISY):
        return None
    near = [_published(sigma, algorithm) - _mean(found) <= 1.5 for sigma, found in row.items()]
    text = ", ".join(f"{_mean(found):.2f} at σ = {sigma:g}" for sigma, found in row.items())
    return Finding(text, _verdict(near), [record for found in row.values() for record in found])


def level_with_momentum(momentum: float, records: Sequence[Record]) -> Finding | None:
    """SYNC as in `level`, at every noise that was also trained with momentum; beside it without."""
    plain, fast = _row(records, "sync"), _row(records, "sync", momentum)
    both = [sigma for sigma in NOISY if sigma in plain and sigma in fast]
    if not both:
        return None
    near = [_published(sigma, "sync") - _mean(fast[sigma]) <= 1.5 for sigma in both]
    texts = [f"{_mean(fast[s]):.2f} at σ = {s:g} ({_mean(plain[s]):.2f} without momentum)" for s in both]
    return Finding(", ".join(texts), _verdict(near), [r for s in both for r in (*fast[s], *plain[s])])


def noise_free(records: Sequence[Record]) -> Finding | None:
    """Without noise: at most 1.5 points below the paper."""
    found = [_row(records, algorithm).get(0.0, []) for algorithm in paper.ALGORITHMS]
    if not all(found):
        return None
    near = [_published(0.0, a) - _mean(each) <= 1.5 for a, each in zip(paper.ALGORITHMS, found, strict=True)]
    verdict = _verdict(near)
    text = f"SYNC {_mean(found[0]):.2f}, async {_mean(found[1]):.2f}"
    return Finding(text, verdict, [record for each in found for record in each])


def noise_cost(records: Sequence[Record]) -> Finding | None:
    """What noise costs: each loss is within 1.5 points of the paper's."""
    texts, near, files = [], [], []
    for algorithm, name in paper.NAMES.items():
        row = _row(records, algorithm)
        if not {0.0, *NOISY} <= set(row):
            return None
        levels = [_mean(row[sigma]) for sigma in (0.0, *NOISY)]
        lost = [level - levels[0] for level in levels[1:]]
        claimed = [_published(sigma, algorithm) - _published(0.0, algorithm) for sigma in NOISY]
        near += [abs(a - b) <= 1.5 for a, b in zip(lost, claimed, strict=True)]
        texts.append(f"{name} {', '.join(signed(each) for each in lost)}")
        files += [record for sigma in (0.0, *NOISY) for record in row[sigma]]
    verdict = _verdict(near)
    return Finding("; ".join(texts) + " points at σ = 1, 2, 4", verdict, files)


def _published(sigma: float, algorithm: str) -> float:
    value = paper.MODELS["resnet18"].result(sigma, algorithm)
    assert value is not None  # the paper's table has all of them
    return value


def comparable(records: Sequence[Record]) -> Finding | None:
    """ResNet-18 at 300 epochs: |asynchronous − SYNC| at most 3 points at every noise."""
    chosen = [r for r in full(records, "resnet18") if r["cell"]["epochs"] == FULL_EPOCHS]
    return _compared(_gaps(chosen), 3.0, 3)


def comparable_small(records: Sequence[Record]) -> Finding | None:
    return _compared(_gaps(small(records)), 3.0, 4)


def comparable_others(records: Sequence[Record]) -> Finding | None:
    """The eight other CNNs at 20 epochs or more: |asynchronous − SYNC| at most 3 points."""
    gaps, files = {}, []
    for key, pair in pairs_of(full(records)).items():
        if key.model in paper.CNNS and key.model != "resnet18" and key.epochs >= 20 and len(pair) == 2:
            sync, asynchronous = (quality(pair[a]) or 0.0 for a in paper.ALGORITHMS)
            gaps[key] = asynchronous - sync
            files += list(pair.values())
    if len({(key.model, key.noise) for key in gaps}) < 4 * (len(paper.CNNS) - 1):
        return None
    within = [abs(gap) <= 3 for gap in gaps.values()]
    far = max(gaps, key=lambda key: abs(gaps[key]))
    text = f"{sum(within)} of {len(gaps)} pairs; the farthest {signed(gaps[far])} ({far.title}, σ = {far.noise:g})"
    return Finding(text, _verdict(within), files)


def collapse_of_senet(records: Sequence[Record]) -> Finding | None:
    """SENet-18 at large noise: SYNC ends at chance, and ADPSGD learns."""
    for key, pair in pairs_of(full(records, "senet18")).items():
        if key.noise == NOISY[-1] and len(pair) == 2:
            right = [(quality(pair["sync"]) or 0) < 15, (quality(pair["adpsgd"]) or 0) > 50]
            text = f"SYNC {shown(pair['sync'])}, async {shown(pair['adpsgd'])} after {key.epochs:g} epochs"
            return Finding(text, _verdict(right), list(pair.values()))
    return None


def comparable_loss(choose: Choose, needed: int, records: Sequence[Record]) -> Finding | None:
    return _compared(_gaps(choose(records)), 0.05, needed, loss=True)


def rises(choose: Choose, needed: int, records: Sequence[Record]) -> Finding | None:
    """The held-out loss grows with the noise, over at least `needed` levels of it."""
    texts, steady, files = [], [], []
    for algorithm, name in paper.NAMES.items():
        found = {k.noise: pair[algorithm] for k, pair in pairs_of(choose(records)).items() if algorithm in pair}
        values = [quality(found[noise]) or math.inf for noise in sorted(found)]
        if len(values) < needed:
            return None
        steady.append(values == sorted(values))
        texts.append(f"{name} {', '.join(f'{value:.3f}' for value in values)}")
        files += [found[noise] for noise in sorted(found)]
    verdict = _verdict(steady)
    return Finding("; ".join(texts), verdict, files)


def _compared(gaps: dict[float, Gap], allowed: float, needed: int, *, loss: bool = False) -> Finding | None:
    """Accuracies may differ by `allowed` either way; a loss may be higher by `allowed`, and lower by anything."""
    if len(gaps) < needed:
        return None
    within = [(gap.mean if loss else abs(gap.mean)) <= allowed for gap in gaps.values()]
    verdict = _verdict(within)
    parts, digits = [], 3 if loss else 2
    for noise, gap in gaps.items():
        seeds = f" (mean of {len(gap.values)} seeds)" if len(gap.values) > 1 else ""
        parts.append(f"{signed(gap.mean, digits)} at σ = {noise:g}{seeds}")
    files = [record for gap in gaps.values() for record in gap.files]
    return Finding("async − SYNC " + ", ".join(parts), verdict, files)


def slow_down(choose: Choose, factor: float, records: Sequence[Record], engine: str = "") -> Finding | None:
    """SYNC slows by the slow learner's factor; ADPSGD by at most 1/0.85 of the least possible.

    Real processes need time for SYNC's all-reduce also when all are equal, so there the race is judged instead: at
    least 85 % of the ideal speed-up.
    """
    pairs = pairs_of(r for r in choose(records) if r["cell"]["engine"] == engine)
    for key, pair in sorted(pairs.items(), key=lambda item: -item[0].epochs):  # the longest run tells most
        even = pairs.get(key._replace(variant="even"), {})
        if key.variant != "slow" or len(pair) < 2 or len(even) < 2:
            continue
        sync, asynchronous = (seconds_of(pair[a]) / seconds_of(even[a]) for a in paper.ALGORITHMS)
        least = least_slow_down(pair["adpsgd"])
        right = [abs(sync - factor) <= 0.05 * factor, asynchronous <= least / 0.85]
        text = f"SYNC ×{sync:.2f}, async ×{asynchronous:.2f} (least possible ×{least:.2f})"
        won = race(pair)
        if won is not None and engine:
            right[0] = won.speed_up >= 0.85 * won.ideal
        verdict = _verdict(right)
        if won is not None:
            text += f"; to {won.quality} {won.speed_up:.2f} times as fast as SYNC ({won.speed_up / won.ideal:.0%} of "
            text += f"the ideal {won.ideal:.2f})"
        return Finding(text, verdict, [even["sync"], pair["sync"], even["adpsgd"], pair["adpsgd"]])
    return None


def collapse(choose: Choose, records: Sequence[Record]) -> Finding | None:
    """With batch and learning rate doubled SYNC collapses, and ADPSGD learns."""
    pairs = pairs_of(choose(records))
    for key, pair in pairs.items():
        usual = pairs.get(key._replace(variant="usual"), {})
        if key.variant == "doubled" and len(pair) == len(usual) == 2:
            right = [not _learns(pair["sync"], usual["sync"]), _learns(pair["adpsgd"], usual["adpsgd"])]
            words = [
                f"{name} {shown(pair[a])} ({shown(usual[a])} with the usual ones)" for a, name in paper.NAMES.items()
            ]
            return Finding(", ".join(words), _verdict(right), [*pair.values(), *usual.values()])
    return None


def _learns(record: Record, usual: Record) -> bool:
    """It reaches at least half of the usual accuracy, or at most twice the usual loss."""
    reached, expected = quality(record), quality(usual)
    if reached is None or expected is None:
        return False
    return reached < 2 * expected if paper.family(record["cell"]["model"]) == "speech" else reached > expected / 2


def sizes(records: Sequence[Record]) -> Finding | None:
    chosen = {r["cell"]["model"]: r for r in full(records)}
    if len(chosen) < len(paper.MODELS):
        return None
    equal = [chosen[name]["parameters"] == known.parameters for name, known in paper.MODELS.items()]
    return Finding(f"{sum(equal)} of {len(equal)} equal", HOLDS if all(equal) else PARTLY, list(chosen.values()))


def _rows(records: Sequence[Record], table: str) -> Record | None:
    return next((r for r in records if table in (r["cell"].get("table"), r["cell"].get("part"))), None)


def theorem_2(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "theorem-2")
    if found is None:
        return None
    rows = [row for row in found["rows"] if row["mu"] == "least σ"]
    text = ", ".join(
        f"claimed {row['claimed_epsilon']:g} is {row['neighbour_replace_one']:.1f} (K = {row['learners']})"
        for row in rows
    )
    return Finding(
        text, FAILS if any(r["neighbour_replace_one"] > r["claimed_epsilon"] for r in rows) else HOLDS, [found]
    )


def on_sum(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "theorem-2")
    if found is None:
        return None
    worst = min(row["neighbour_noise_on_sum"] for row in found["rows"])
    return Finding(f"ε of at least {worst:,.0f} at every worked point", FAILS, [found])


def remark(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "remark")
    if found is None:
        return None
    first = found["rows"][0]
    text = f"first step: claimed {first['claimed_epsilon']:.3f}, truly {first['neighbour_replace_one']:.2f}"
    return Finding(text, FAILS if first["neighbour_replace_one"] > first["claimed_epsilon"] else HOLDS, [found])


def sigma(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "paper-scale")
    if found is None:
        return None
    text = ", ".join(f"{row['epsilon_pld']:.2f} at {row['noise_multiplier']:g}" for row in found["rows"])
    return Finding(
        f"with clipping and Poisson batches ε would be {text}; the paper's runs have neither", FAILS, [found]
    )


def even_shares(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "shares")
    if found is None:
        return None
    row = next(r for r in found["rows"] if "faster" in r["case"] and r["learner"] == "that one")
    text = f"a learner 10 times faster spends ε = {row['epsilon']:.1f} where {row['epsilon_planned']:.1f} was planned"
    return Finding(text, FAILS, [found])


def proposition_steps(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "propositions")
    if found is None:
        return None
    row = next(r for r in found["rows"] if r["model"] == "resnet18" and r["epsilon"] == 9)
    asked, least = row["steps_proposition_2"], row["least_steps_proposition_1"]
    text = f"Proposition 2 asks for T = {asked:.0f}, Proposition 1 for at least {least:.2g}"
    return Finding(text, FAILS, [found])


def theorem_1_covers(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "conditions")
    if found is None:
        return None
    row = found["rows"][-1]
    largest = row["largest_smoothness_theorem_1"]["0.4"]
    return Finding(f"only if the loss is smoother than L = {largest:.1e} at lr 0.4", FAILS, [found])


def rate_bound(records: Sequence[Record]) -> Finding | None:
    rates = sorted(
        (r for r in full(records) if r["cell"].get("part") == "rate"), key=lambda r: float(r["global_steps"])
    )
    if len(rates) < 3:
        return None
    below = all(r["bound"] is not None and r["measured"] <= r["bound"] for r in rates)
    text = ", ".join(f"{r['measured']:.2e} ≤ {r['bound']:.2e} at T = {r['global_steps']:,}" for r in rates)
    return Finding(text, HOLDS if below else FAILS, rates)


def consensus_bound(records: Sequence[Record]) -> Finding | None:
    found = [r for r in full(records) if r["cell"].get("part") == "consensus"]
    bounded = [r for r in found if r["bound"] is not None]
    if not bounded:
        return None
    below = all(r["measured"] <= r["bound"] for r in bounded)
    share = ", ".join(f"{r['bound'] / r['measured']:.0f}" for r in bounded)
    unbounded = len(found) - len(bounded)
    text = f"bound over measured: {share}; in {unbounded} of {len(found)} settings its condition C1 > 0 fails"
    return Finding(text, HOLDS if below else FAILS, found)
