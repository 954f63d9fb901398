"""The paper's claims one by one: its figure, ours, and a verdict read off the finished cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reproduction import cases, judges, paper, theorems
from reproduction.cells import Record, finished
from reproduction.tables import Table

OPEN = "not tested yet"
PROGRAM = "python -m reproduction"
MOMENTUM = paper.MOMENTUM
_RESNET: judges.Choose = partial(judges.full, model="resnet18")
_SMALL_LSTM: judges.Choose = partial(judges.full, model="lstm_small")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`judge` reads the study's records of one `momentum`; None while cells are missing, which `options` of the
    study's command will run. The recipe of paper mode has momentum; nothing else has."""

    text: str
    paper: str
    study: str
    options: str = ""
    momentum: float = 0.0
    judge: Callable[[Sequence[Record]], judges.Finding | None]

    def command(self, further: str = "") -> str:
        return " ".join(filter(None, (PROGRAM, self.study, self.options, further)))


def claims_table(out: Path) -> Table:
    """Every claim, judged by what is finished under `out`."""
    verdicts, rows = Counter[str](), []
    for claim in CLAIMS:
        verdict, row = _judged(claim, finished(out, claim.study))
        verdicts[verdict] += 1
        rows.append(row)
    title = "Claims: " + ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
    return Table(title=title, columns=["claim", "the paper's figure", "ours", "verdict", "files"], rows=rows)


def _judged(claim: Claim, records: Sequence[Record]) -> tuple[str, list[str]]:
    """The verdict and the row. What plain SGD gave stands beside it, and never decides a claim about paper mode."""
    found = claim.judge(judges.of_momentum(records, claim.momentum))
    plain = claim.judge(judges.of_momentum(records, 0.0)) if claim.momentum else None
    beside = "" if plain is None else f"plain SGD, {plain.verdict}: {plain.ours}"
    start = [claim.text, claim.paper]
    if found is None:
        files = "–" if plain is None else _files(plain.files)
        return OPEN, [*start, beside or "–", f"{OPEN}; run `{claim.command()}`", files]
    open_yet = f"; the rest {OPEN}: run `{claim.command(found.missing)}`" if found.missing else ""
    ours = f"{found.ours} ({beside})" if beside else found.ours
    return found.verdict, [*start, ours, found.verdict + open_yet, _files(found.files)]


def _files(records: Sequence[Record]) -> str:
    """Their names; of many, the folder, whose files are listed below the study's tables."""
    if len(records) > 4:
        return f"{len(records)} files in `{records[0]['study']}/`"
    return ", ".join(f"`{record['study']}/{record['name']}.json`" for record in records)


def _speech(
    name: str, options: str, choose: judges.Choose, *, published: bool = False, needed: int = 4,
    momentum: float = MOMENTUM,
) -> list[Claim]:  # fmt: skip
    """The speech study's claims, for one form of the LSTM. The paper's losses are of data that are not public."""
    gaps, losses = "+0.019, +0.010, −0.020, +0.020", "SYNC 1.566, 1.617, 1.752, 1.990; async 1.585, 1.627, 1.732, 2.010"
    return [
        Claim(
            text=f"Speech, {name}: the asynchronous algorithm is as good as SYNC (held-out loss; 0.05 more allowed)",
            paper=f"{gaps} at σ = 0, 0.08, 0.16, 0.32" if published else "–", study="speech", options=options,
            momentum=momentum, judge=partial(judges.comparable, choose, 0.05, needed),
        ),
        Claim(
            text=f"Speech, {name}: the loss grows with the noise", paper=losses if published else "–",
            study="speech", options=options, momentum=momentum, judge=partial(judges.rises, choose, needed),
        ),
    ]  # fmt: skip


def _slow(study: str, case: str, what: str, factor: float) -> list[Claim]:
    """Case I or II for ResNet-18 and the LSTMs as published, and in the small form."""
    judged: list[tuple[str, str, judges.Choose, float]] = [
        (f"{case}: {what} (ResNet-18, 16 learners)", "", _RESNET, MOMENTUM),
        (f"{case} for the LSTM, 16 learners", "--model lstm", partial(judges.full, model="lstm"), MOMENTUM),
        (f"{case} for a small LSTM on the public speech set, 4 learners", "--model lstm_small", _SMALL_LSTM, 0.0),
        (f"{case} in the small form (digits, 4 learners)", "--quick", judges.small, MOMENTUM),
    ]
    return [
        Claim(
            text=words, paper=f"×{factor:g} and about ×1", study=study, options=options, momentum=momentum,
            judge=partial(cases.slow_down, choose, factor),
        )
        for words, options, choose, momentum in judged
    ]  # fmt: skip


def _real(study: str, form: str, factor: float, options: str, choose: judges.Choose) -> Claim:
    """Case I or II measured: every learner is a process, each step is padded to one nominal time."""
    return Claim(
        text=f"{form}, each step padded to one nominal time", paper=f"×{factor:g} and about ×1", study=study,
        options=f"--processes{options}", momentum=MOMENTUM,
        judge=partial(cases.slow_down, choose, factor, engine="processes"),
    )  # fmt: skip


def _noisy(algorithm: str) -> list[tuple[str, float]]:
    return [(algorithm, sigma) for sigma in judges.NOISY]


_TABLE_1 = [
    Claim(
        text="SYNC with noise reaches Table 1's accuracy (ResNet-18, 300 epochs; 1.5 points below allowed)",
        paper="91.67, 89.08, 83.40 at σ = 1, 2, 4", study="table1", options="--model resnet18", momentum=MOMENTUM,
        judge=partial(judges.level, _noisy("sync")),
    ),
    Claim(
        text="The asynchronous algorithm with noise does (ResNet-18, 300 epochs; 1.5 points below allowed)",
        paper="91.64, 88.43, 81.01 at σ = 1, 2, 4", study="table1", options="--model resnet18", momentum=MOMENTUM,
        judge=partial(judges.level, _noisy("adpsgd")),
    ),
    Claim(
        text="Without noise both do (ResNet-18, 300 epochs; 1.5 points below allowed)",
        paper="SYNC 94.01, async 94.97", study="table1", options="--model resnet18", momentum=MOMENTUM,
        judge=partial(judges.level, [("sync", 0.0), ("adpsgd", 0.0)]),
    ),
    Claim(
        text="What noise costs, in points (ResNet-18, 300 epochs; a difference of 1.5 allowed)",
        paper="SYNC −2.34, −4.93, −10.61; async −3.33, −6.54, −13.96 at σ = 1, 2, 4",
        study="table1", options="--model resnet18", momentum=MOMENTUM, judge=judges.noise_cost,
    ),
    Claim(
        text="The asynchronous algorithm is as accurate as SYNC (ResNet-18, 300 epochs; 3 points allowed)",
        paper="+0.96, −0.03, −0.65, −2.39 points at σ = 0, 1, 2, 4",
        study="table1", options="--model resnet18", momentum=MOMENTUM,
        judge=partial(judges.comparable, judges.whole_row, 3.0, 1, wanted=paper.NOISE["cifar10"]),
    ),
    Claim(
        text="Asynchronous as accurate as SYNC for the eight other CNNs (3 points allowed)",
        paper="all but SENet-18 at σ = 4, after 300 epochs",
        study="table1", momentum=MOMENTUM, judge=judges.comparable_others,
    ),
    Claim(
        text="SENet-18 at σ = 4: SYNC collapses and the asynchronous algorithm does not",
        paper="SYNC 10.00, async 82.90", study="table1", options="--model senet18 --noise 4", momentum=MOMENTUM,
        judge=cases.collapse_of_senet,
    ),
    Claim(
        text="Asynchronous as accurate as SYNC in the small form (digits, 4 learners; 3 points allowed)",
        paper="–", study="table1", options="--quick", momentum=MOMENTUM,
        judge=partial(judges.comparable, judges.small, 3.0, 4),
    ),
]  # fmt: skip
_PRIVATE = [
    *(
        Claim(
            text=f"With clipping and an accountant (at z = 0 without) asynchronous as accurate as SYNC ({name}; 3 "
            "points allowed)",
            paper="–", study="table1", options=f"--private {options}",
            judge=partial(judges.comparable, partial(judges.private, form, model), 3.0, 4),
        )
        for name, options, form, model in (
            ("ResNet-18, CIFAR-10", "--model resnet18 --epochs 40", "", "resnet18"),
            ("small CNN, CIFAR-10", "--model cnn --epochs 40", "", "cnn"),
            ("small CNN, digits, 4 learners", "--quick", "quick", "cnn"),
        )
    ),
    Claim(
        text="In place of noise without a budget: a recipe made for privacy (WRN-16-4, large batches, copies of each "
        "record), ε = 8 at each of 16 learners; asynchronous as accurate as SYNC (3 points allowed)",
        paper="–", study="table1", options="--private --model wrn16_4", judge=judges.recipe,
    ),
]  # fmt: skip
_CASES = [
    *_slow("case1", "Case I", "a random learner 2× slower slows SYNC by 2, and hardly the asynchronous algorithm", 2.0),
    _real("case1", "Case I with 16 real learner processes (ResNet-18)", 2.0, "", _RESNET),
    *_slow("case2", "Case II", "one learner 10× slower slows SYNC by 10; the asynchronous algorithm rebalances", 10.0),
    _real("case2", "Case II with 16 real learner processes (ResNet-18)", 10.0, "", _RESNET),
    _real("case2", "Case II in the small form, with 4 real processes", 10.0, " --quick", judges.small),
    *(
        Claim(
            text=f"Case III{form}", paper=published, study="case3", options=options, momentum=momentum,
            judge=partial(cases.collapse, choose),
        )
        for form, published, options, choose, momentum in (
            (": with batch and learning rate doubled SYNC collapses and the asynchronous algorithm converges",
             "SYNC at chance, asynchronous converges (EfficientNet-B0)", "--model efficientnet_b0",
             partial(judges.full, model="efficientnet_b0"), MOMENTUM),
            (" for the LSTM", "SYNC collapses, asynchronous converges", "--model lstm",
             partial(judges.full, model="lstm"), MOMENTUM),
            (" for a small LSTM on the public speech set, 4 learners", "–", "--model lstm_small", _SMALL_LSTM, 0.0),
            (" in the small form (digits, 4 learners)", "–", "--quick", partial(judges.small, model="cnn"), MOMENTUM),
        )
    ),
]  # fmt: skip
_COMPUTED = [
    Claim(text="Model sizes", paper="ten models, 4.82 to 164.62 MiB", study="sizes", judge=judges.sizes),
    Claim(
        text="Theorem 1's conditions cover the experiments", paper="implied", study="theory",
        judge=theorems.theorem_1_covers,
    ),
    Claim(
        text="Proposition 1's bound on the mean ‖∇F(θ)‖² (quadratic, 2 learners)", paper="O(1/√T)", study="theory",
        judge=theorems.rate_bound,
    ),
    Claim(
        text="The consensus lemma's bound (quadratic)", paper="bound on T₃", study="theory",
        judge=theorems.consensus_bound,
    ),
    Claim(
        text="Proposition 1's T makes C₃ of Theorem 1 at most 1 (L = ς² = υ² = 1, three graphs)", paper="C₃ ≤ 1",
        study="theory", judge=theorems.third_constant,
    ),
    Claim(
        text="Propositions 1 and 2 hold together (ResNet-18, ε = 9, and L = ς² = υ² = G = 1)",
        paper="implied", study="theory", judge=theorems.proposition_steps,
    ),
    Claim(
        text="Theorem 2's σ gives its ε, noise on the mean, against a neighbour", paper="the ε that is asked for",
        study="privacy", judge=theorems.theorem_2,
    ),
    Claim(
        text="Theorem 2's σ gives its ε with the noise where Algorithm 1 puts it, on the sum",
        paper="the ε that is asked for", study="privacy", judge=theorems.on_sum,
    ),
    Claim(
        text="The Remark: ε√(t/T) for the models at step t, against a neighbour", paper="ε√(t/T)",
        study="privacy", judge=theorems.remark,
    ),
    Claim(
        text="Noise of σ = 1, 2, 4 as in the experiments makes training private", paper="implied; no ε is stated",
        study="privacy", judge=theorems.sigma,
    ),
    Claim(
        text="All learners spend alike (p_k = 1/K), also in Case II", paper="assumed",
        study="privacy", judge=theorems.even_shares,
    ),
]  # fmt: skip
CLAIMS = [
    *_TABLE_1,
    *_PRIVATE,
    *_speech("LSTM", "", partial(judges.full, model="lstm"), published=True),
    *_speech("small LSTM, 4 learners", "--model lstm_small", _SMALL_LSTM, momentum=0.0),
    *_speech("small form (digits, 4 learners)", "--quick", judges.small, needed=2),
    *_CASES,
    *_COMPUTED,
]
