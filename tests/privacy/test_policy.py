"""What holds over all runs on a ledger, although each may be chosen after the results before it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

from adp2sgd.config import Privacy
from adp2sgd.errors import ConfigError, LedgerError, PrivacyError
from adp2sgd.privacy import accountant, ledger, plan, policy
from adp2sgd.privacy.accountant import epsilon, renyi
from adp2sgd.privacy.budget import Budget
from adp2sgd.privacy.ledger import WIDTH, Ledger
from adp2sgd.privacy.mechanism import Composed, SampledGaussian
from adp2sgd.privacy.policy import FixedPlan, RenyiFilter, conversion, filter_for
from adp2sgd.privacy.spent import spent_in

DELTA = 1e-5
LASTING = Privacy(mode="private", epsilon=8.0, delta=DELTA, ledger="kept", headroom=1.0)
ONE = LASTING.replace(runs=1)
NAMES = {"dataset": "heart", "site": "cleveland"}


def begin(
    folder: Path, privacy: Privacy = LASTING, *, run: str = "run", planned: int = 50, rate: float = 0.1
) -> Budget:
    (folder / run).mkdir(exist_ok=True)
    return Budget.open(
        folder / "ledger.jsonl",
        privacy,
        **NAMES,
        records=1000,
        batch_size=round(1000 * rate),
        planned_steps=planned,
        plan_path=folder / run / "plan.json",
        seeded=False,
    )


def taken(folder: Path, steps: int, privacy: Privacy = LASTING, *, run: str = "run", rate: float = 0.1) -> Budget:
    """A run that ends after `steps` steps."""
    with closing(begin(folder, privacy, run=run, rate=rate)) as own:
        for _ in range(steps):
            own.draw()
    return own


def kept(folder: Path) -> ledger.Account:
    return ledger.read(folder / "ledger.jsonl")


# An owner who chooses the second mechanism after the output of the first one. All are single steps, so hockey-stick
# divergences have closed forms, and the truth is an integral over the first output.
FIRST, SHARP, BROAD = SampledGaussian(1.0, 0.1), SampledGaussian(0.4, 0.001), SampledGaussian(3.41, 1.0)


def loss(step: SampledGaussian, x: NDArray[np.float64]) -> NDArray[np.float64]:
    noise, rate = step.noise_multiplier, step.sample_rate
    return np.asarray(np.log(1 - rate + rate * np.exp((2 * x - 1) / (2 * noise**2))))


def delta_of(step: SampledGaussian, target: NDArray[np.float64]) -> NDArray[np.float64]:
    """P(S) − e^target·Q(S) for the worst set S, where a record is removed."""
    noise, rate = step.noise_multiplier, step.sample_rate
    gain = np.maximum(np.expm1(target) / rate, -1.0)
    with np.errstate(divide="ignore"):
        x = 0.5 + noise**2 * np.log1p(gain)
    absent = norm.sf(x / noise)
    return np.asarray((1 - rate) * absent + rate * norm.sf((x - 1) / noise) - np.exp(target) * absent)


def true_epsilon(first: SampledGaussian, choices: Sequence[SampledGaussian]) -> float:
    """Of the owner who takes, for each output of `first`, that of the `choices` which then tells the most."""
    noise, rate = first.noise_multiplier, first.sample_rate
    x = np.linspace(-12 * noise, 1 + 12 * noise, 20_001)
    chance = ((1 - rate) * norm.pdf(x / noise) + rate * norm.pdf((x - 1) / noise)) / noise * (x[1] - x[0])

    def delta(target: float) -> float:
        return float(chance @ np.max([delta_of(each, target - loss(first, x)) for each in choices], axis=0))

    return float(brentq(lambda target: math.log(delta(target) / DELTA), 0.1, 10))


def test_loss_distributions_report_too_little_where_the_owner_chooses_after_a_result() -> None:
    told = [epsilon(Composed(((FIRST, 1), (each, 1))), 1, DELTA).epsilon for each in (SHARP, BROAD)]
    for each, reported in zip((SHARP, BROAD), told, strict=True):
        assert true_epsilon(FIRST, [each]) == pytest.approx(reported, rel=2e-3)  # fixed beforehand, PLD is right
    assert true_epsilon(FIRST, [SHARP, BROAD]) > 1.08 * max(told)


@pytest.mark.parametrize("order", [1.8, 2.5, 4.0, 8.0])
def test_the_filter_covers_an_owner_who_chooses_after_a_result(order: float) -> None:
    """At any order: if both paths fit within an ε, the truth of the choice between them does."""
    own = RenyiFilter(epsilon=1e9, delta=DELTA, adjacency="add-remove", order=order)
    told = max(own.spent(Composed(((FIRST, 1), (each, 1)))).epsilon for each in (SHARP, BROAD))
    assert told >= true_epsilon(FIRST, [SHARP, BROAD])


def test_two_mechanisms_on_one_ledger_are_reported_by_the_filter(tmp_path: Path) -> None:
    taken(tmp_path, 20, LASTING.replace(noise_multiplier=2.0), run="first")
    second = taken(tmp_path, 20, LASTING.replace(noise_multiplier=1.5), run="second", rate=0.05)
    told, own = second.guarantee(), kept(tmp_path).policy
    assert isinstance(own, RenyiFilter)
    by_pld = epsilon(kept(tmp_path).spent(), 1, DELTA).epsilon
    assert told.epsilon_spent == own.spent(kept(tmp_path).spent()).epsilon > by_pld
    assert (told.epsilon, told.composition) == (8.0, f"renyi-filter({own.order:g})")
    assert told.epsilon_alone == pytest.approx(
        epsilon(SampledGaussian(1.5, 0.05), second.plan.max_steps, DELTA).epsilon
    )
    assert f"all runs on the ledger by renyi-filter({own.order:g})" in str(told)
    [row] = spent_in(tmp_path / "ledger.jsonl")  # δ is the policy's
    assert (row.epsilon, row.epsilon_limit, row.composition) == (told.epsilon_spent, 8.0, told.composition)
    assert row.epsilon_if_fixed == pytest.approx(by_pld)


@pytest.mark.parametrize(("noise", "rate", "order"), [(1.0, 0.1, 4), (2.0, 0.08, 12), (0.5, 0.01, 3), (50, 1e-4, 64)])
def test_renyi_divergences_agree_with_the_closed_form_of_whole_orders(noise: float, rate: float, order: int) -> None:
    weights = [math.comb(order, k) * (1 - rate) ** (order - k) * rate**k for k in range(order + 1)]
    moment = sum(weight * math.expm1((k * k - k) / (2 * noise**2)) for k, weight in enumerate(weights))
    exact = math.log1p(moment) / (order - 1)
    assert exact <= renyi(SampledGaussian(noise, rate), float(order)) <= exact * (1 + 2e-8) + 2e-14 / (order - 1)


@pytest.mark.parametrize("order", [1.5, 3.0, 20.0])
def test_divergences_where_a_record_is_replaced(order: float) -> None:
    half, whole = SampledGaussian(1.3, 0.5), SampledGaussian(1.3, 1.0)
    assert renyi(whole, order, "replace-one") == 4 * renyi(whole, order)
    x = np.arange(-40, 40, 1e-3)
    p, q = (np.logaddexp(norm.logpdf(x / 1.3), norm.logpdf((x - side) / 1.3)) - math.log(2.6) for side in (1, -1))
    direct = math.log(float(np.exp(order * p + (1 - order) * q).sum()) * 1e-3) / (order - 1)
    assert renyi(half, order, "replace-one") == pytest.approx(direct, rel=1e-6)
    assert renyi(SampledGaussian(0.1, 0.5), 2.0) == renyi(SampledGaussian(0.1, 1.0), 2.0)  # too narrow to integrate


def test_the_order_suits_the_first_run_and_all_that_are_planned() -> None:
    for noise, steps in ((2.0, 0), (None, 3000)):
        own = filter_for(8.0, DELTA, "add-remove", rate=0.08, noise=noise, steps=steps)
        used = noise or own.noise_within(own.allowance(), 0.08, steps)
        room = own.steps_within(own.allowance(), SampledGaussian(used, 0.08))
        assert room >= steps
        rdp = epsilon(SampledGaussian(used, 0.08), room, DELTA, "rdp").epsilon
        assert rdp <= 8 < epsilon(SampledGaussian(used, 0.08), math.ceil(room * 1.01), DELTA, "rdp").epsilon


def test_runs_share_the_budget_and_the_last_step_stays_within_it(tmp_path: Path) -> None:
    third = LASTING.replace(runs=3)
    for number in range(3):
        with closing(begin(tmp_path, third, run=str(number))) as own:
            assert own.plan.max_steps == 50
            noise = own.plan.mechanism.noise_multiplier
            while not own.exhausted:
                own.draw()
    spent = kept(tmp_path).policy.spent(kept(tmp_path).spent()).epsilon  # type: ignore[union-attr]
    assert 7.95 < spent <= 8
    assert 7.2 < epsilon(SampledGaussian(noise, 0.1), 150, DELTA).epsilon < 7.6  # what the freedom to choose costs
    with pytest.raises(PrivacyError, match=r"earlier runs have spent ε = 7\.9.* in .*ledger\.jsonl: .*allows"):
        begin(tmp_path, third.replace(noise_multiplier=1.0), run="4")


def test_steps_that_were_reserved_and_not_drawn_are_left_to_later_runs(tmp_path: Path) -> None:
    """A filter adds up what is drawn. What was never drawn told nothing, whenever the owner decided so."""
    first = taken(tmp_path, 10, LASTING.replace(noise_multiplier=2.0), run="first")
    second = begin(tmp_path, LASTING.replace(noise_multiplier=2.0), run="second")
    assert second.plan.max_steps == first.plan.max_steps - 10
    second.close()


def test_a_first_run_by_loss_distributions_fixes_the_mechanism_for_ever(tmp_path: Path) -> None:
    first = taken(tmp_path, 30, ONE, run="first")
    own = kept(tmp_path).policy
    assert own == FixedPlan(epsilon=8.0, delta=DELTA, adjacency="add-remove", mechanism=first.plan.mechanism, steps=50)
    assert 7.99 < first.guarantee().epsilon <= 8
    assert first.guarantee().composition == "pld"
    before = (tmp_path / "ledger.jsonl").read_bytes()
    for other, rate in ((ONE.replace(noise_multiplier=5.0), 0.1), (LASTING, 0.05), (LASTING.replace(runs=9), 0.2)):
        with pytest.raises(PrivacyError, match=r"alone, not .* at"):
            begin(tmp_path, other, run="other", rate=rate)
    lines = (len((tmp_path / "ledger.jsonl").read_bytes()) - len(before)) // WIDTH
    assert lines == 3  # starts
    second = begin(tmp_path, LASTING, run="second")  # the noise is the ledger's
    assert (second.plan.mechanism, second.plan.max_steps) == (first.plan.mechanism, 20)
    while not second.exhausted:
        second.draw()
    second.close()
    assert second.guarantee().epsilon == second.guarantee().epsilon_spent == first.guarantee().epsilon


@pytest.mark.parametrize("privacy", [LASTING, ONE])
def test_a_budget_can_be_tightened_after_a_result_and_not_raised(privacy: Privacy, tmp_path: Path) -> None:
    first = taken(tmp_path, 10, privacy.replace(noise_multiplier=2.0), run="first")
    same = privacy.replace(noise_multiplier=2.0)
    with pytest.raises(PrivacyError, match=r"epsilon = 9 exceeds 8, which was fixed .* use 8 or less"):
        begin(tmp_path, same.replace(epsilon=9.0), run="more")
    for change, words in (
        ({"delta": 1e-4}, "delta = 0.0001 differs from 1e-05"),
        ({"adjacency": "replace-one"}, "use add-"),
    ):
        with pytest.raises(PrivacyError, match=words):
            begin(tmp_path, same.replace(**change), run="other")
    less = begin(tmp_path, same.replace(epsilon=6.0), run="less")
    assert less.plan.max_steps < first.plan.max_steps - 10
    assert (
        less.plan.spent_after(less.plan.max_steps).epsilon <= 6 < less.plan.spent_after(less.plan.max_steps + 1).epsilon
    )
    assert less.guarantee().epsilon == first.guarantee().epsilon  # 6 was chosen after a result, so it is no promise
    less.close()
    if privacy is LASTING:
        with pytest.raises(PrivacyError, match=r"epsilon = 2.0 is below 3\.\d+, which the first step costs"):
            begin(tmp_path, same.replace(epsilon=2.0), run="least")


def test_a_lasting_ledger_needs_a_bound_on_all_its_runs(tmp_path: Path) -> None:
    free = LASTING.replace(epsilon=None, noise_multiplier=2.0)
    with pytest.raises(PrivacyError, match=r"epsilon is missing: it bounds what all runs on .*runs = 1"):
        begin(tmp_path, free)
    taken(tmp_path, 1)
    assert begin(tmp_path, free, run="later").plan.max_steps == 50  # the ledger has one
    for wrong, words in (({"runs": 0}, "use 1 or more"), ({"ledger": None, "runs": 2}, r"set privacy\.ledger")):
        with pytest.raises(ConfigError, match=words):
            LASTING.replace(**wrong)


def test_the_policy_is_on_disk_before_the_first_step_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[list[str]] = []
    sync = os.fsync

    def seen(descriptor: int) -> None:
        sync(descriptor)
        path = tmp_path / "ledger.jsonl"
        if path.exists():
            synced.append([next(iter(json.loads(line))) for line in path.read_text().splitlines()])

    monkeypatch.setattr(os, "fsync", seen)
    taken(tmp_path, 1)
    assert synced.index(["ledger", "start", "policy"]) < synced.index(["ledger", "start", "policy", "mechanism"])
    assert synced[-1] == ["ledger", "start", "policy", "mechanism", "reserve", "return"]


@pytest.mark.parametrize(("steps", "adopted"), [(0, True), (1, False)])
def test_kill_9_keeps_the_policy(steps: int, adopted: bool, tmp_path: Path) -> None:
    """Once a step may have been drawn, nobody can begin the data set anew with another order or ε."""
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_policy import begin
own = begin(Path({str(tmp_path)!r}))
for _ in range({steps}):
    own.draw()
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    first = kept(tmp_path).policy
    assert isinstance(first, RenyiFilter)
    again = begin(tmp_path)
    assert (again.plan.policy, again.plan.max_steps) == (first, 50)  # and a run that goes on keeps its plan
    again.close()
    other = LASTING.replace(epsilon=7.9, noise_multiplier=4.0)
    begin(tmp_path, other, run="other").close()
    assert (kept(tmp_path).policy != first) == adopted
    if not adopted:
        with (
            pytest.raises(LedgerError, match="fixed since its first step"),
            Ledger.open(tmp_path / "ledger.jsonl", **NAMES) as own,
        ):
            own.adopt(begun(other))


def begun(privacy: Privacy) -> policy.Policy:
    return plan.plan(privacy, records=1000, batch_size=100, planned_steps=50).policy


def test_a_run_that_never_drew_goes_on_under_the_policy_of_the_one_that_did(tmp_path: Path) -> None:
    begin(tmp_path, LASTING.replace(noise_multiplier=2.0), run="idle").close()
    taken(tmp_path, 5, ONE.replace(epsilon=2.0), run="quick")
    with pytest.raises(PrivacyError, match=r"alone, not 2 at 0\.1"):
        begin(tmp_path, LASTING.replace(noise_multiplier=2.0), run="idle")
    assert kept(tmp_path).policy == begun(ONE.replace(epsilon=2.0))


@pytest.mark.parametrize("left", [1, 100, WIDTH - 1])
def test_a_torn_policy_is_written_anew_since_nothing_was_drawn_under_it(left: int, tmp_path: Path) -> None:
    begin(tmp_path).close()
    path = tmp_path / "ledger.jsonl"
    os.truncate(path, path.stat().st_size - WIDTH + left)
    assert kept(tmp_path).policy is None
    assert taken(tmp_path, 1, run="other").plan.policy == kept(tmp_path).policy


def test_a_policy_that_was_changed_after_the_first_step_is_damage(tmp_path: Path) -> None:
    taken(tmp_path, 3)
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, **NAMES) as own:
        line = ledger._encode({"policy": begun(ONE).entry(), "token": own.token}, own.mark.sum, WIDTH)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(LedgerError, match="is damaged at line"):
        ledger.read(path)


def test_every_policy_fits_a_line_and_is_read_back() -> None:
    long = SampledGaussian(12.345678901234567, 0.08192123456789012)
    common = {"epsilon": 1.2345678901234567e-05, "delta": 1.2345678901234567e-12, "adjacency": "replace-one"}
    for own in (
        FixedPlan(**common, mechanism=long, steps=10**12),  # type: ignore[arg-type]
        RenyiFilter(**common, order=1234.5678),  # type: ignore[arg-type]
    ):
        line = ledger._encode({"policy": own.entry(), "token": 10**9}, "", WIDTH)
        assert policy.parse(json.loads(line)["policy"]) == own


def of_old(folder: Path, mechanisms: Sequence[SampledGaussian]) -> None:
    """A ledger as it was before there were policies."""
    path = folder / "ledger.jsonl"
    path.write_bytes(ledger._encode({"ledger": 1, **NAMES, "block": 32, "id": "0"}, "", 0))
    with Ledger.open(path, **NAMES) as own:
        for mechanism in mechanisms:
            own.reserve(4, mechanism)
            for _ in range(4):
                own.draw()


def test_no_run_begins_on_a_ledger_with_steps_and_no_policy(tmp_path: Path) -> None:
    of_old(tmp_path, [SampledGaussian(2.0, 0.1), SampledGaussian(1.0, 0.1)])
    with pytest.raises(LedgerError, match="has steps from before ledgers had a policy: no bound covers"):
        begin(tmp_path)
    with pytest.raises(ConfigError, match="--delta"):
        spent_in(tmp_path / "ledger.jsonl")
    [row] = spent_in(tmp_path / "ledger.jsonl", DELTA)
    assert row.epsilon == epsilon(kept(tmp_path).spent(), 1, DELTA).epsilon
    assert "no policy was fixed before the first step" in row.note
    assert row.epsilon_limit is None


def test_a_run_from_before_policies_goes_on_where_the_ledger_is_its_own(tmp_path: Path) -> None:
    own = SampledGaussian(2.0, 0.1)
    old = {
        "ledger": str(tmp_path / "ledger.jsonl"),
        "mechanism": vars(own),
        "max_steps": 40,
        "delta": DELTA,
        "adjacency": "add-remove",
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run/plan.json").write_text(json.dumps({**old, "before": {"parts": []}}))
    of_old(tmp_path, [own])
    again = taken(tmp_path, 6, ONE)
    assert (again.steps, again.plan.max_steps) == (10, 40)
    assert again.guarantee().epsilon == epsilon(own, 40, DELTA).epsilon
    assert kept(tmp_path).policy == again.plan.policy
    of_old(tmp_path, [own, SampledGaussian(1.0, 0.1)])
    (tmp_path / "run/plan.json").write_text(json.dumps({**old, "before": {"parts": []}}))
    with pytest.raises(LedgerError, match="steps of several runs from before"):
        begin(tmp_path)
    (tmp_path / "run/plan.json").write_text(json.dumps({**old, "before": {"parts": [[vars(own), 3]]}}))
    with pytest.raises(LedgerError, match="for a run chosen after others"):
        begin(tmp_path)


def with_history(folder: Path, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger whose `runs` earlier runs all had different mechanisms."""
    taken(folder, 1, LASTING.replace(runs=100), run="first")
    with monkeypatch.context() as patch, Ledger.open(folder / "ledger.jsonl", **NAMES) as own:
        patch.setattr(os, "fsync", lambda _: None)
        for number in range(runs):
            own.reserve(1, SampledGaussian(20 + number / 100, 0.1))
            own.draw()


def test_a_thousand_earlier_runs_cost_one_divergence_each_and_no_composition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_history(tmp_path, 1000, monkeypatch)
    composed: list[object] = []
    monkeypatch.setattr(accountant, "_by_pld", lambda *a: composed.append(a))
    renyi.cache_clear()
    plan.plan.cache_clear()
    second = begin(tmp_path, LASTING.replace(runs=4), run="second")
    assert len(second.plan.before.parts) == 1001
    assert renyi.cache_info().misses <= 1001 + 100  # and a search for the noise
    before = renyi.cache_info().misses
    assert second.plan.spent_after(second.plan.max_steps).epsilon <= 8
    for _ in range(3):
        second.draw()
    second.close()
    again = begin(tmp_path, LASTING.replace(runs=4), run="second")
    assert (again.plan, again.steps) == (second.plan, 3)
    assert renyi.cache_info().misses == before
    assert not composed
    again.close()


def test_learners_that_are_alike_share_one_calculation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan.plan.cache_clear()
    searched: list[float] = []
    search = plan.noise_for
    monkeypatch.setattr(plan, "noise_for", lambda **goal: searched.append(goal["sample_rate"]) or search(**goal))
    for learner in range(6):
        (tmp_path / str(learner)).mkdir()
        begin(tmp_path / str(learner), ONE, rate=0.1 if learner % 2 else 0.2).close()
    assert sorted(searched) == [0.1, 0.2]


RUN = st.tuples(
    st.sampled_from([0.6, 1.0, 2.0, None]), st.sampled_from([0.05, 0.1]), st.sampled_from([1, 40, 999]), st.booleans()
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=st.lists(RUN, min_size=3, max_size=6))
def test_whatever_is_run_the_allowance_is_never_exceeded(
    runs: list[tuple[float | None, float, int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # speed; nothing here cuts the power
    folder = tmp_path / os.urandom(8).hex()
    folder.mkdir()
    drawn: dict[SampledGaussian, int] = {}
    for number, (noise, rate, steps, killed) in enumerate(runs):
        try:
            own = begin(folder, LASTING.replace(noise_multiplier=noise), run=str(number % 2), rate=rate)
        except PrivacyError:  # nothing is left, or a run goes on at another rate
            continue
        for _ in range(steps):
            if own.exhausted:
                break
            own.draw()
            drawn[own.plan.mechanism] = drawn.get(own.plan.mechanism, 0) + 1
        own._ledger._forget() if killed else own.close()
    account = kept(folder)
    assert isinstance(account.policy, RenyiFilter)
    order = account.policy.order
    assert all(dict(account.spent().parts)[each] >= count for each, count in drawn.items())
    total = sum(count * renyi(each, order) for each, count in account.spent().parts)
    assert total + conversion(order, DELTA) <= 8 * (1 + 1e-12)
