"""Verdicts on accuracies and losses follow from records by stated rules."""

from __future__ import annotations

import json
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from made_records import chosen, other, resnet_row, slow_record
from reproduction import cases, judges, paper, studies
from reproduction.claims import CLAIMS, Claim, claims_table
from reproduction.studies import STUDIES


def test_the_row_of_resnet_is_judged_by_the_papers_figures() -> None:
    sync_level = partial(judges.level, [("sync", sigma) for sigma in judges.NOISY])
    noise_free = partial(judges.level, [("sync", 0.0), ("adpsgd", 0.0)])
    published = list(zip(*paper.MODELS["resnet18"].results, strict=True))
    same = resnet_row(list(published[0]), list(published[1]))
    for judge in (sync_level, noise_free, judges.noise_cost):
        found = judge(same)
        assert found is not None
        assert (found.verdict, found.missing) == ("holds", ""), judge
        assert judge([]) is None
    ours = resnet_row([90.31, 90.11, 89.77, 87.36], [91.69, 91.02, 89.86, 85.59])
    verdicts = [(judge(ours) or judges.Finding("", "")).verdict for judge in (sync_level, noise_free)]
    assert verdicts == ["holds in part", "does not hold"]
    cost = judges.noise_cost(ours)
    assert cost is not None
    assert cost.verdict == "does not hold"
    assert cost.ours.startswith("SYNC −0.20 at σ = 1, SYNC −0.54 at σ = 2, SYNC −2.95 at σ = 4, async −0.67 at σ = 1")
    partly = judges.noise_cost(resnet_row([90.0, 88.0, 89.0, 87.0], [91.0, 90.0, 89.0, 85.0]))
    assert partly is not None
    assert partly.verdict == "holds in part"  # 2.0 where the paper lost 2.34
    seeds = [*ours, {**ours[1], "cell": {**ours[1]["cell"], "seed": 1}, "accuracy": 0.9125}]
    level = sync_level(seeds)
    assert level is not None
    assert (level.ours.split(",")[0], level.verdict) == ("SYNC 90.68 at σ = 1", "holds")  # the mean of two seeds


def test_what_is_not_run_yet_is_named_with_what_runs_it() -> None:
    """Finished: SYNC at σ = 0, 1 and 4, asynchronous at σ = 0 and 4, with the accuracies of our own files."""
    row = resnet_row([93.47, 91.06, 0.0, 83.0], [93.64, 0.0, 0.0, 81.4])
    there = [row[i] for i in (0, 1, 3, 4, 7)]
    sync = judges.level([("sync", sigma) for sigma in judges.NOISY], there)
    assert sync == judges.Finding(
        "SYNC 91.06 at σ = 1, SYNC 83.00 at σ = 4", "holds where tested", [row[1], row[3]], "--algorithm sync --noise 2"
    )
    cost = judges.noise_cost(there)
    words = "SYNC −2.41 at σ = 1, SYNC −10.47 at σ = 4, async −12.24 at σ = 4"  # the paper's last: −13.96
    assert cost == judges.Finding(words, "holds in part", there, "--noise 1 --noise 2")
    assert judges.noise_cost(there[1:3]) is None  # nothing to compare with yet
    gap = judges.comparable(judges.whole_row, 3.0, 1, there, wanted=paper.NOISE["cifar10"])
    assert gap is not None
    assert (gap.ours, gap.verdict) == ("async − SYNC +0.17 at σ = 0, −1.60 at σ = 4", "holds where tested")
    assert gap.missing == "--noise 1 --noise 2"
    low = [other(record, accuracy=0.5) for record in there]
    assert (judges.level([("sync", sigma) for sigma in judges.NOISY], low) or sync).verdict == "does not hold"


def test_plain_sgd_stands_beside_a_claim_about_paper_mode_and_never_decides_it(tmp_path: Path) -> None:
    def verdict(*records: dict[str, Any]) -> list[str]:
        folder = tmp_path / "table1"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for number, record in enumerate(records):
            (folder / f"{number}.json").write_text(json.dumps(record | {"study": "table1"}))
        return list(claims_table(tmp_path).rows[2])  # "Without noise both do"

    plain = [*resnet_row([94.0] * 4, [95.0] * 4)[::4]]
    fast = [other(record, momentum=0.9, accuracy=0.5) for record in plain]
    words = "plain SGD, holds: SYNC 94.00 at σ = 0, async 95.00 at σ = 0"
    assert verdict(*plain)[2:4] == [words, "not tested yet; run `python -m reproduction table1 --model resnet18`"]
    both = verdict(*plain, *fast)
    assert both[2:4] == [f"SYNC 50.00 at σ = 0, async 50.00 at σ = 0 ({words})", "does not hold"]
    half = verdict(*plain, other(fast[0], accuracy=0.94))[3]
    assert half.startswith("holds where tested; the rest not tested yet: run")
    assert half.endswith("table1 --model resnet18 --algorithm adpsgd --noise 0`")
    assert verdict()[2:4] == ["–", "not tested yet; run `python -m reproduction table1 --model resnet18`"]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text[:40])
def test_the_command_of_a_claim_runs_the_cells_that_it_is_judged_by(claim: Claim) -> None:
    """Their momentum too: else an open claim would stay open whatever is run."""
    words = shlex.split(claim.command())[3:]
    choice = chosen(words)
    studies.check(claim.study, choice)
    momenta = {cell.identity.get("momentum", 0.0) for cell in STUDIES[claim.study].cells(choice)}
    assert momenta == {claim.momentum}


def test_async_is_compared_with_sync_by_the_longest_runs() -> None:
    whole = resnet_row([90.0, 90.0, 89.0, 87.0], [91.0, 91.0, 89.5, 85.5])
    judge = partial(judges.comparable, judges.full, 3.0, 4)
    found = judge(whole)
    assert found is not None
    assert found.ours == "async − SYNC +1.00 at σ = 0, +1.00 at σ = 1, +0.50 at σ = 2, −1.50 at σ = 4"
    assert found.verdict == "holds"
    assert judge(whole[:-1]) is None
    short = [other(record, epochs=20.0, accuracy=0.1) for record in whole]
    odd = [other(record, sigma=3.0, accuracy=0.1) for record in (whole[0], whole[4])]
    real = [other(record, engine="processes", accuracy=0.1) for record in whole]
    assert judge([*short, *odd, *real, *whole]) == found
    seeds = [*whole, other(whole[3], seed=1, accuracy=0.85), other(whole[7], seed=1, accuracy=0.79)]
    assert (judge(seeds) or found).ours.endswith("−3.75 at σ = 4 (mean of 2 seeds)")  # −1.5 and −6
    assert (judge(seeds) or found).verdict == "holds in part"
    fallen = [*whole[:7], other(whole[7], diverged="it did")]
    assert (judge(fallen) or found).verdict == "holds in part"
    assert (judge([other(record, diverged="it did") for record in whole]) or found).verdict == "does not hold"
    longer = [other(record, epochs=400.0, accuracy=0.1) for record in (whole[3], whole[7])]  # of one noise alone
    assert judge([*whole, *longer]) == found
    clipped = [
        {**record, "cell": {("z" if k == "sigma" else k): v for k, v in record["cell"].items()}} for record in whole
    ]
    assert judge([*whole, *clipped]) == found
    private = judges.comparable(partial(judges.private, "", "resnet18"), 3.0, 4, [*short, *clipped])
    assert private == judges.Finding(found.ours.replace("σ", "z"), "holds", (private or found).files)


def test_the_private_recipe_is_judged_by_its_longest_runs() -> None:
    def at(epochs: float, seed: int, sync: float, asynchronous: float) -> list[dict[str, Any]]:
        pair = resnet_row([sync] * 4, [asynchronous] * 4)[::4]
        for record in pair:
            del record["cell"]["sigma"]
        return [other(record, model=paper.RECIPE, epsilon=8.0, epochs=epochs, seed=seed) for record in pair]

    records = [*at(20.0, 0, 40.0, 60.0), *at(40.0, 0, 60.0, 56.0), *at(40.0, 1, 61.0, 60.0)]
    assert judges.recipe(records) == judges.Finding("SYNC 60.50, async 58.00", "holds", records[2:])
    assert judges.recipe(records[:5]) == judges.Finding("SYNC 60.00, async 56.00", "does not hold", records[2:4])
    assert judges.recipe(resnet_row([90.0] * 4, [90.0] * 4)) is None
    fallen = [*records[:3], other(records[3], diverged="it did")]
    assert (judges.recipe(fallen) or judges.Finding("", "")).verdict == "does not hold"


def test_a_loss_that_diverged_is_no_rise_and_no_match() -> None:
    rows = [other(record, model="lstm", epochs=20.0, variant="") for record in resnet_row([1.0] * 4, [1.0] * 4)]
    for record, sigma in zip(rows, paper.NOISE["speech"] * 2, strict=True):
        record["cell"]["sigma"], record["loss"] = sigma, 1.5 + sigma
    compare, rise = partial(judges.comparable, judges.full, 0.05, 4), partial(judges.rises, judges.full, 4)
    assert [(judge(rows) or judges.Finding("", "")).verdict for judge in (compare, rise)] == ["holds", "holds"]
    fallen = [*rows[:7], other(rows[7], diverged="it did")]
    found = compare(fallen), rise(fallen)
    assert [(each or judges.Finding("", "")).verdict for each in found] == ["holds in part", "holds in part"]
    assert all(each is not None and "diverged" in each.ours for each in found)
    blown = [*rows[:7], other(rows[7], loss=159.0) | {"curve": {"loss": [2.3, 159.0]}}]
    assert (compare(blown) or judges.Finding("", "")).verdict == "holds in part"
    assert "a run diverged or ended above its first loss at σ = 0.32" in (compare(blown) or judges.Finding("", "")).ours
    worse = [*rows[:3], other(rows[3], loss=159.0) | {"curve": {"loss": [2.3, 159.0]}}, *rows[4:]]  # SYNC's own
    assert (compare(worse) or judges.Finding("", "")).verdict == "holds in part"
    nothing = [other(record, diverged="it did") for record in rows]
    for only in (nothing, [*nothing[:4], *rows[4:]]):  # all diverged, and SYNC's runs alone
        assert (compare(only) or judges.Finding("", "")).verdict == "does not hold"
    assert (rise(nothing) or judges.Finding("", "")).verdict == "does not hold"
    longer = other(rows[5], epochs=40.0, loss=9.0)  # SYNC has no run of that length
    assert rise([*rows, longer]) == rise(rows)


def test_runs_shorter_than_the_papers_settle_nothing() -> None:
    def small(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return other(record, **changes) | {"config": record["config"] | {"batch_size": 128}}

    whole = resnet_row([90.0] * 4, [90.0] * 4)
    compare, rise = partial(judges.comparable, judges.full, 3.0, 4), partial(judges.rises, judges.full, 4)
    for judge in (compare, rise):
        found = judge(whole)
        assert found is not None
        assert found.verdict != judges.SHORTER
        assert (judge([small(record) for record in whole]) or found).verdict == judges.SHORTER
        assert (judge([*whole[:-1], small(whole[-1])]) or found).verdict == found.verdict  # one that diverged, say
        assert (judge([small(record, model="cnn") for record in whole]) or found).verdict == found.verdict
        gone = [small(record, diverged="it did") for record in whole]  # how long they would have been is not known
        assert judge(gone) is not None
        assert (judge(gone) or found).verdict != judges.SHORTER
    quick = [small(record, form="quick") for record in whole]
    assert (judges.comparable(judges.small, 3.0, 4, quick) or judges.Finding("", "")).verdict == "holds"
    case = [
        small(slow_record(algorithm, variant, [1.0, 2.0], [0.2, 0.9]), sigma=1.0, engine="")
        for algorithm in paper.ALGORITHMS
        for variant in ("usual", "doubled")
    ]
    assert (cases.collapse(judges.full, case) or judges.Finding("", "")).verdict == judges.SHORTER


def test_other_cnns_are_compared_where_sync_learned() -> None:
    def pairs(model: str, epochs: float, sync: float, asynchronous: float) -> list[dict[str, Any]]:
        row = resnet_row([sync] * 4, [asynchronous] * 4)
        return [other(record, model=model, epochs=epochs) for record in row]

    assert judges.comparable_others(pairs("vgg19", 60.0, 30.0, 31.0)) is None
    assert judges.comparable_others(pairs("resnet18", 300.0, 90.0, 91.0)) is None
    assert judges.comparable_others(pairs("vgg19", 10.0, 90.0, 91.0)) is None
    records = [*pairs("vgg19", 60.0, 30.0, 31.0), *pairs("mobilenet", 60.0, 70.0, 71.0),
               *pairs("senet18", 20.0, 70.0, 60.0), *pairs("mobilenet", 30.0, 70.0, 10.0)]  # fmt: skip
    found = judges.comparable_others(records)
    assert found is not None
    farthest = "the farthest −10.00 (senet18, σ = 0)"  # at its large noise the paper's own two differ
    assert found.ours.startswith(f"after 20 to 60 epochs 4 of 7 pairs; {farthest}; 4 more where SYNC stayed")
    assert found.ours.endswith("; 20 not run yet")
    assert (found.verdict, len(found.files)) == (judges.SHORTER, 22)
    fallen = [other(each, diverged="it did") if each["cell"]["algorithm"] == "adpsgd" else each for each in records]
    assert "0 of 7 pairs; 7 of them diverged" in (judges.comparable_others(fallen) or found).ours
    whole = judges.comparable_others([other(each, epochs=300.0) for each in records[8:24]])
    assert (whole or found).verdict == "holds in part"
    assert (cases.collapse_of_senet(records) or found).verdict == judges.SHORTER
    assert (cases.collapse_of_senet(fallen) or found).verdict == "does not hold"
    senet = cases.collapse_of_senet([*records, *pairs("senet18", 300.0, 10.0, 80.0)])
    assert senet == judges.Finding("of 300 epochs: SYNC 10.00, async 80.00", "holds", (senet or found).files)
