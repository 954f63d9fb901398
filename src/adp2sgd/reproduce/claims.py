"""The paper's claims one by one: its figure, ours, and a verdict read off the finished cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adp2sgd.reproduce import paper
from adp2sgd.reproduce.cells import Record, finished
from adp2sgd.reproduce.tables import Table, least_slow_down, pairs_of, quality, seconds_of

HOLDS, PARTLY, FAILS, OPEN = "holds", "holds in part", "does not hold", "not tested yet"
FULL_EPOCHS = 300.0


@dataclass(frozen=True)
class Finding:
    """Our figure for a claim, the verdict, and the files that both were read off."""

    ours: str
    verdict: str
    files: Sequence[Record] = ()


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`judge` reads the study's records; None while cells are missing, which `command` will fill."""

    text: str
    paper: str
    study: str
    command: str
    judge: Callable[[Sequence[Record]], Finding | None]


def claims_table(out: Path) -> Table:
    """Every claim, judged by what is finished under `out`."""
    rows = []
    for claim in CLAIMS:
        found = claim.judge(finished(out, claim.study))
        if found is None:
            rows.append([claim.text, claim.paper, "–", f"{OPEN}; run `{claim.command}`", "–"])
            continue
        files = ", ".join(f"`{record['study']}/{record['name']}.json`" for record in found.files)
        rows.append([claim.text, claim.paper, found.ours, found.verdict, files])
    return Table(title="Claims", columns=["claim", "the paper's figure", "ours", "verdict", "files"], rows=rows)


def _full(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if not r["cell"].get("form") and "z" not in r["cell"]]


def _small(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["cell"].get("form") == "quick" and "z" not in r["cell"]]


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
        if ours[0] is not None and ours[1] is not None:
            gap = found.setdefault(key[3], Gap([], []))
            gap.values.append(ours[1] - ours[0])
            gap.files += [pair["sync"], pair["adpsgd"]]
    return found


def _sync_level(records: Sequence[Record]) -> Finding | None:
    """ResNet-18, SYNC, 300 epochs: at most 1.5 points below the paper."""
    chosen = [
        r for r in _full(records)
        if (r["cell"]["model"], r["cell"]["algorithm"], r["cell"]["epochs"]) == ("resnet18", "sync", FULL_EPOCHS)
        and r["cell"]["sigma"] in (1, 2, 4)
    ]  # fmt: skip
    if len({r["cell"]["sigma"] for r in chosen}) < 3:
        return None
    short = []
    for record in chosen:
        published = paper.MODELS["resnet18"].result(record["cell"]["sigma"], "sync")
        ours = quality(record)
        short.append(100.0 if ours is None or published is None else published - ours)
    verdict = HOLDS if max(short) <= 1.5 else PARTLY if min(short) <= 1.5 else FAILS
    return Finding(", ".join(f"{quality(r) or 0:.2f} at σ = {r['cell']['sigma']:g}" for r in chosen), verdict, chosen)


def _comparable(records: Sequence[Record]) -> Finding | None:
    """ResNet-18 at 300 epochs: |asynchronous − SYNC| at most 3 points at every noise."""
    chosen = [r for r in _full(records) if (r["cell"]["model"], r["cell"]["epochs"]) == ("resnet18", FULL_EPOCHS)]
    return _compared(_gaps(chosen), 3.0, 3)


def _comparable_small(records: Sequence[Record]) -> Finding | None:
    return _compared(_gaps(_small(records)), 3.0, 4)


def _comparable_loss(records: Sequence[Record]) -> Finding | None:
    return _compared(_gaps(_full(records)), 0.05, 4)


def _compared(gaps: dict[float, Gap], allowed: float, needed: int) -> Finding | None:
    if len(gaps) < needed:
        return None
    within = [abs(gap.mean) <= allowed for gap in gaps.values()]
    verdict = HOLDS if all(within) else PARTLY if any(within) else FAILS
    parts = []
    for noise, gap in gaps.items():
        seeds = f" (mean of {len(gap.values)} seeds)" if len(gap.values) > 1 else ""
        parts.append(f"{gap.mean:+.2f} at σ = {noise:g}{seeds}")
    files = [record for gap in gaps.values() for record in gap.files]
    return Finding("async − SYNC " + ", ".join(parts), verdict, files)


def _slow_down(records: Sequence[Record], form: Callable[[Sequence[Record]], list[Record]], factor: float,
               engine: str = "") -> Finding | None:  # fmt: skip
    """SYNC slows by the slow learner's factor; ADPSGD by at most 1/0.85 of the least possible."""
    chosen = [r for r in form(records) if r["cell"]["engine"] == engine]
    pairs = pairs_of(chosen)
    for key, pair in pairs.items():
        even = pairs.get((*key[:4], "even", *key[5:]), {})
        if key[4] != "slow" or len(pair) < 2 or len(even) < 2:
            continue
        sync, asynchronous = (seconds_of(pair[a]) / seconds_of(even[a]) for a in paper.ALGORITHMS)
        least = least_slow_down(pair["adpsgd"])
        right = [abs(sync - factor) <= 0.05 * factor, asynchronous <= least / 0.85]
        verdict = HOLDS if all(right) else PARTLY if any(right) else FAILS
        text = f"SYNC ×{sync:.2f}, async ×{asynchronous:.2f} (least possible ×{least:.2f})"
        return Finding(text, verdict, [even["sync"], pair["sync"], even["adpsgd"], pair["adpsgd"]])
    return None


def _collapse(records: Sequence[Record]) -> Finding | None:
    """With batch and learning rate doubled SYNC ends at chance (10 %) or diverges, and ADPSGD learns."""
    for key, pair in pairs_of(_full(records)).items():
        if key[4] != "doubled" or paper.family(key[1]) == "speech" or len(pair) < 2:
            continue
        ours = quality(pair["sync"]), quality(pair["adpsgd"])
        right = [ours[0] is None or ours[0] < 15, ours[1] is not None and ours[1] > 50]
        verdict = HOLDS if all(right) else PARTLY if right[0] else FAILS
        words = ["diverged" if value is None else f"{value:.2f}" for value in ours]
        return Finding(f"SYNC {words[0]}, async {words[1]}", verdict, list(pair.values()))
    return None


def _sizes(records: Sequence[Record]) -> Finding | None:
    chosen = {r["cell"]["model"]: r for r in _full(records)}
    if len(chosen) < len(paper.MODELS):
        return None
    equal = [chosen[name]["parameters"] == known.parameters for name, known in paper.MODELS.items()]
    return Finding(f"{sum(equal)} of {len(equal)} equal", HOLDS if all(equal) else PARTLY, list(chosen.values()))


def _rows(records: Sequence[Record], table: str) -> Record | None:
    return next((r for r in records if table in (r["cell"].get("table"), r["cell"].get("part"))), None)


def _theorem_2(records: Sequence[Record]) -> Finding | None:
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


def _on_sum(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "theorem-2")
    if found is None:
        return None
    worst = min(row["neighbour_noise_on_sum"] for row in found["rows"])
    return Finding(f"ε of at least {worst:,.0f} at every worked point", FAILS, [found])


def _remark(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "remark")
    if found is None:
        return None
    first = found["rows"][0]
    text = f"first step: claimed {first['claimed_epsilon']:.3f}, truly {first['neighbour_replace_one']:.2f}"
    return Finding(text, FAILS if first["neighbour_replace_one"] > first["claimed_epsilon"] else HOLDS, [found])


def _sigma(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "paper-scale")
    if found is None:
        return None
    text = ", ".join(f"{row['epsilon_pld']:.2f} at {row['noise_multiplier']:g}" for row in found["rows"])
    return Finding(
        f"with clipping and Poisson batches ε would be {text}; the paper's runs have neither", FAILS, [found]
    )


def _even_shares(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "shares")
    if found is None:
        return None
    row = next(r for r in found["rows"] if "faster" in r["case"] and r["learner"] == "that one")
    text = f"a learner 10 times faster spends ε = {row['epsilon']:.1f} where {row['epsilon_planned']:.1f} was planned"
    return Finding(text, FAILS, [found])


def _proposition_steps(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "propositions")
    if found is None:
        return None
    row = next(r for r in found["rows"] if r["model"] == "resnet18" and r["epsilon"] == 9)
    asked, least = row["steps_proposition_2"], row["least_steps_proposition_1"]
    text = f"Proposition 2 asks for T = {asked:.0f}, Proposition 1 for at least {least:.2g}"
    return Finding(text, FAILS, [found])


def _theorem_1_covers(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "conditions")
    if found is None:
        return None
    row = found["rows"][-1]
    largest = row["largest_smoothness_theorem_1"]["0.4"]
    return Finding(f"only if the loss is smoother than L = {largest:.1e} at lr 0.4", FAILS, [found])


def _rate_bound(records: Sequence[Record]) -> Finding | None:
    rates = sorted(
        (r for r in _full(records) if r["cell"].get("part") == "rate"), key=lambda r: float(r["global_steps"])
    )
    if len(rates) < 3:
        return None
    below = all(r["bound"] is not None and r["measured"] <= r["bound"] for r in rates)
    text = ", ".join(f"{r['measured']:.2e} ≤ {r['bound']:.2e} at T = {r['global_steps']:,}" for r in rates)
    return Finding(text, HOLDS if below else FAILS, rates)


def _consensus_bound(records: Sequence[Record]) -> Finding | None:
    found = [r for r in _full(records) if r["cell"].get("part") == "consensus"]
    bounded = [r for r in found if r["bound"] is not None]
    if not bounded:
        return None
    below = all(r["measured"] <= r["bound"] for r in bounded)
    share = ", ".join(f"{r['bound'] / r['measured']:.0f}" for r in bounded)
    unbounded = len(found) - len(bounded)
    text = f"bound over measured: {share}; in {unbounded} of {len(found)} settings its condition C1 > 0 fails"
    return Finding(text, HOLDS if below else FAILS, found)


CLAIMS = [
    Claim(
        text="SYNC with noise reaches Table 1's accuracy (ResNet-18, 300 epochs)",
        paper="91.67, 89.08, 83.40 at σ = 1, 2, 4",
        study="table1", command="adp2sgd reproduce table1 --model resnet18", judge=_sync_level,
    ),
    Claim(
        text="The asynchronous algorithm is as accurate as SYNC (ResNet-18, 300 epochs; 3 points allowed)",
        paper="+0.96, −0.03, −0.65, −2.39 points at σ = 0, 1, 2, 4",
        study="table1", command="adp2sgd reproduce table1 --model resnet18", judge=_comparable,
    ),
    Claim(
        text="The same in the small form (digits, 4 learners; 3 points allowed)",
        paper="–", study="table1", command="adp2sgd reproduce table1 --quick", judge=_comparable_small,
    ),
    Claim(
        text="The same for the LSTM (held-out loss; 0.05 allowed)",
        paper="+0.019, +0.010, −0.020, +0.020 at σ = 0, 0.08, 0.16, 0.32",
        study="speech", command="adp2sgd reproduce speech", judge=_comparable_loss,
    ),
    Claim(
        text="Case I: a random learner 2× slower slows SYNC by 2, and hardly the asynchronous algorithm",
        paper="×2 and about ×1", study="case1", command="adp2sgd reproduce case1",
        judge=lambda records: _slow_down(records, _full, 2.0),
    ),
    Claim(
        text="Case I in the small form", paper="×2 and about ×1",
        study="case1", command="adp2sgd reproduce case1 --quick",
        judge=lambda records: _slow_down(records, _small, 2.0),
    ),
    Claim(
        text="Case II: one learner 10× slower slows SYNC by 10; the asynchronous algorithm rebalances",
        paper="×10 and about ×1", study="case2", command="adp2sgd reproduce case2",
        judge=lambda records: _slow_down(records, _full, 10.0),
    ),
    Claim(
        text="Case II in the small form", paper="×10 and about ×1",
        study="case2", command="adp2sgd reproduce case2 --quick",
        judge=lambda records: _slow_down(records, _small, 10.0),
    ),
    Claim(
        text="Case II with real learner processes, each step padded to one nominal time",
        paper="×10 and about ×1", study="case2", command="adp2sgd reproduce case2 --processes",
        judge=lambda records: _slow_down(records, _full, 10.0, "processes"),
    ),
    Claim(
        text="The same in the small form, with 4 processes", paper="×10 and about ×1",
        study="case2", command="adp2sgd reproduce case2 --quick --processes",
        judge=lambda records: _slow_down(records, _small, 10.0, "processes"),
    ),
    Claim(
        text="Case III: with batch and learning rate doubled SYNC collapses and the asynchronous algorithm converges",
        paper="SYNC at chance, asynchronous converges (EfficientNet-B0)",
        study="case3", command="adp2sgd reproduce case3", judge=_collapse,
    ),
    Claim(
        text="Model sizes", paper="ten models, 4.82 to 164.62 MiB", study="sizes",
        command="adp2sgd reproduce sizes", judge=_sizes,
    ),
    Claim(
        text="Theorem 1's conditions cover the experiments", paper="implied", study="theory",
        command="adp2sgd reproduce theory", judge=_theorem_1_covers,
    ),
    Claim(
        text="Proposition 1's bound on the mean ‖∇F(θ)‖² (quadratic, 2 learners)", paper="O(1/√T)", study="theory",
        command="adp2sgd reproduce theory", judge=_rate_bound,
    ),
    Claim(
        text="The consensus lemma's bound (quadratic)", paper="bound on T₃", study="theory",
        command="adp2sgd reproduce theory", judge=_consensus_bound,
    ),
    Claim(
        text="Propositions 1 and 2 hold together (ResNet-18, ε = 9)", paper="implied", study="theory",
        command="adp2sgd reproduce theory", judge=_proposition_steps,
    ),
    Claim(
        text="Theorem 2's σ gives its ε, noise on the mean, against a neighbour", paper="ε = 9, 12 and 5",
        study="privacy", command="adp2sgd reproduce privacy", judge=_theorem_2,
    ),
    Claim(
        text="Theorem 2's σ gives its ε with the noise where Algorithm 1 puts it, on the sum", paper="ε = 1 to 50",
        study="privacy", command="adp2sgd reproduce privacy", judge=_on_sum,
    ),
    Claim(
        text="The Remark: ε√(t/T) for the models at step t", paper="ε√(t/T)",
        study="privacy", command="adp2sgd reproduce privacy", judge=_remark,
    ),
    Claim(
        text="The experiments' σ = 1, 2, 4 stand for a privacy budget", paper="none stated",
        study="privacy", command="adp2sgd reproduce privacy", judge=_sigma,
    ),
    Claim(
        text="All learners spend alike (p_k = 1/K), also in Case II", paper="assumed",
        study="privacy", command="adp2sgd reproduce privacy", judge=_even_shares,
    ),
]  # fmt: skip
