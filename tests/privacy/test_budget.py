"""Caps, ledgers and plans: what a learner may draw, over all starts and all runs on its data set."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adp2sgd.cli.view import print_run
from adp2sgd.config import Config, Data, Optimizer, Privacy, Speeds
from adp2sgd.engine import simulate, train
from adp2sgd.engine.budgets import open_budget
from adp2sgd.engine.processes.train import Account
from adp2sgd.engine.result import _guarantee
from adp2sgd.engine.setup import prepare
from adp2sgd.errors import ConfigError, DivergedError, LedgerError, PrivacyError
from adp2sgd.privacy import ledger
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.budget import Budget, plan
from adp2sgd.privacy.mechanism import Composed, SampledGaussian
from adp2sgd.privacy.policy import RenyiFilter
from adp2sgd.privacy.spent import spent_in

EIGHT = Privacy(mode="private", epsilon=8.0, noise_multiplier=2.0, delta=1e-5)
LASTING = EIGHT.replace(ledger="kept")  # over runs, so by a Rényi filter; the tests name the file themselves


def budget(
    folder: Path,
    privacy: Privacy = EIGHT,
    *,
    run: str = "run",
    planned: int = 100,
    records: int = 1000,
    batch_size: int = 100,
) -> Budget:
    (folder / run).mkdir(exist_ok=True)
    return Budget.open(
        folder / "ledger.jsonl",
        privacy,
        dataset="heart",
        site="cleveland",
        records=records,
        batch_size=batch_size,
        planned_steps=planned,
        plan_path=folder / run / "plan.json",
        seeded=False,
    )


def spent_by_filter(folder: Path) -> float:
    """ε of all that the ledger holds, by its own policy."""
    account = ledger.read(folder / "ledger.jsonl")
    assert isinstance(account.policy, RenyiFilter)
    return account.policy.spent(account.spent()).epsilon


def counted(folder: Path) -> int:
    return sum(dict(ledger.read(folder / "ledger.jsonl").spent().parts).values())


def test_the_three_ways_to_fix_a_cap() -> None:
    size = {"records": 1000, "batch_size": 100, "planned_steps": 200}
    both = plan(EIGHT, **size)
    assert both.spent_after(both.max_steps).epsilon <= 8 < both.spent_after(both.max_steps + 1).epsilon
    target = plan(Privacy(mode="private", epsilon=3.0, delta=1e-5, headroom=1.5), **size)
    assert target.max_steps == 300
    assert 2.99 < target.spent_after(300).epsilon <= 3.0
    noise = plan(Privacy(mode="private", noise_multiplier=1.5, delta=1e-5, headroom=1.0), **size)
    assert (noise.max_steps, noise.mechanism) == (200, SampledGaussian(1.5, 0.1))


@pytest.mark.parametrize(("noise", "goal", "drawn"), [(1.0, 8.0, 50), (1.0, 5.0, 5), (1.001, 8.0, 50)])
def test_a_run_that_goes_on_reports_what_others_have_spent_since(
    noise: float, goal: float, drawn: int, tmp_path: Path
) -> None:
    """Also where they used the same mechanism, whose steps cannot be told from the run's own. A later run can tighten ε
    but not raise it: before, the one in between had a larger one of its own."""
    own = LASTING.replace(noise_multiplier=1.0)
    first = budget(tmp_path, own, run="first")
    for _ in range(drawn):
        first.draw()
    first.close()
    other = budget(tmp_path, own.replace(noise_multiplier=noise, epsilon=goal), run="other")
    while not other.exhausted:
        other.draw()
    other.close()
    again = budget(tmp_path, own, run="first")
    spent = spent_by_filter(tmp_path)
    assert again.guarantee().epsilon_spent == pytest.approx(spent)
    assert spent <= goal
    assert again.guarantee().epsilon == 8
    assert again.exhausted == (goal == 8.0)
    again.close()


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size = 200 exceeds"):
        plan(EIGHT, records=100, batch_size=200, planned_steps=10)
    tiny = Privacy(mode="private", epsilon=0.001, noise_multiplier=0.5, delta=1e-5)
    with pytest.raises(PrivacyError, match="allows no step"):
        plan(tiny, records=1000, batch_size=100, planned_steps=10)


def test_the_cap_holds_over_all_starts_of_a_run(tmp_path: Path) -> None:
    drawn = 0
    for start in range(100):
        own = budget(tmp_path)
        cap = own.plan.max_steps
        for _ in range(37 + start):
            if own.exhausted:
                break
            own.draw()
            drawn += 1
        if start % 2:
            own.close()
        else:
            own._ledger._forget()  # as if the process had been killed: what is reserved stays spent
        assert drawn <= counted(tmp_path) <= cap
        if own.exhausted:
            break
    with pytest.raises(PrivacyError, match="spent"):
        budget(tmp_path).draw()
    assert drawn > 0.5 * cap


def test_kill_9_costs_the_whole_block(tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_budget import budget
own = budget(Path({str(tmp_path)!r}))
for _ in range(40):
    own.draw()
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert done.returncode == -9
    assert counted(tmp_path) == 64  # two blocks of 32
    again = budget(tmp_path)
    assert again.steps == 64
    again.draw()
    again.close()
    assert counted(tmp_path) == 65


def test_a_second_run_starts_from_what_the_first_one_spent(tmp_path: Path) -> None:
    first = budget(tmp_path, run="first")
    for _ in range(200):
        first.draw()
    first.close()
    second = budget(tmp_path, run="second")
    assert second.plan.before == Composed(((first.plan.mechanism, 200),))
    assert second.plan.max_steps == first.plan.max_steps - 200
    assert second.guarantee().epsilon <= 8
    second.close()
    other = budget(tmp_path, Privacy(mode="private", epsilon=8.0, delta=1e-5), run="third")
    assert (
        other.plan.mechanism.noise_multiplier
        > plan(
            Privacy(mode="private", epsilon=8.0, delta=1e-5), records=1000, batch_size=100, planned_steps=100
        ).mechanism.noise_multiplier
    )
    assert 7.9 < other.guarantee().epsilon <= 8


def test_a_run_that_resumes_after_another_one_counts_that_too(tmp_path: Path) -> None:
    first = budget(tmp_path, LASTING, run="first")
    first.draw()
    first.close()
    between = budget(tmp_path, LASTING.replace(noise_multiplier=1.0), run="between")
    for _ in range(50):
        between.draw()
    between.close()
    again = budget(tmp_path, LASTING, run="first")
    assert again.plan.max_steps < first.plan.max_steps
    while not again.exhausted:
        again.draw()
    again.close()
    assert 7.9 < spent_by_filter(tmp_path) <= 8
    assert epsilon(ledger.read(tmp_path / "ledger.jsonl").spent(), 1, 1e-5).epsilon <= 8


def test_a_full_disk_ends_drawing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = budget(tmp_path)

    def full(*_: object) -> None:
        raise LedgerError("the ledger cannot be written (No space left on device); free disk space")

    monkeypatch.setattr(ledger.Ledger, "_append", full)
    with pytest.raises(LedgerError, match="No space"):
        own.draw()
    assert own.exhausted
    assert own.failure is not None
    assert counted(tmp_path) == 0


def resumed_after_another_run(folder: Path, own_epsilon: float) -> Budget:
    """A run that took 100 steps, again, after one with less noise on the same data has used up the ledger's ε = 8."""
    own = LASTING.replace(epsilon=own_epsilon)
    with closing(budget(folder, LASTING, run="begin")) as begun:
        begun.draw()  # from now on ε = 8 is the ledger's
    first = budget(folder, own, run="first")
    for _ in range(100):
        first.draw()
    first.close()
    between = budget(folder, LASTING.replace(noise_multiplier=1.0), run="between")
    while not between.exhausted:
        between.draw()
    between.close()
    return budget(folder, own, run="first")


def test_what_was_taken_stays_reported_when_another_run_has_used_up_the_rest(tmp_path: Path) -> None:
    again = resumed_after_another_run(tmp_path, 8.0)
    assert again.steps == 100
    while not again.exhausted:  # a step or two of less noise may still fit
        again.draw()
    again.close()
    assert again.guarantee().epsilon_spent == pytest.approx(spent_by_filter(tmp_path))
    assert 7.9 < spent_by_filter(tmp_path) <= again.guarantee().epsilon == 8
    assert 100 <= again.steps <= 110  # one step of noise 1 costs as much as eight of noise 2 at the order


def test_what_was_taken_stays_reported_when_another_run_went_beyond_this_ones_budget(tmp_path: Path) -> None:
    again = resumed_after_another_run(tmp_path, 6.0)
    assert again.exhausted
    assert again.steps == 100
    assert again.guarantee().epsilon_spent == pytest.approx(spent_by_filter(tmp_path))
    assert again.guarantee().epsilon_spent > 6
    assert again.guarantee().epsilon == 8


def test_a_run_resumes_only_at_the_rate_that_it_was_planned_for(tmp_path: Path) -> None:
    budget(tmp_path).close()
    for records, batch_size in ((900, 100), (1000, 120)):
        with pytest.raises(PrivacyError, match=r"planned at sample rate 0\.1"):
            budget(tmp_path, records=records, batch_size=batch_size)
    budget(tmp_path).close()


def test_a_ledger_that_is_gone_is_missed(tmp_path: Path) -> None:
    own = budget(tmp_path)
    own.draw()
    own.close()
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="is gone"):
        budget(tmp_path)
    (tmp_path / "run/plan.json").write_text("")
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(LedgerError):
        budget(tmp_path)


def full(path: Path, **_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_older_copy_of_the_ledger_is_noticed_by_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would draw anew what the copy does not know of, and report what its plan says."""
    path, copies = tmp_path / "ledger.jsonl", [b""]
    first = budget(tmp_path, run="first")
    for _ in range(40):
        first.draw()
    first.close()
    copies.append(path.read_bytes())
    own = budget(tmp_path)
    copies.append(path.read_bytes())
    for _ in range(10):
        own.draw()
    copies.append(path.read_bytes())  # of a run that is killed now: all that is known of it is its start
    (tmp_path / "killed").mkdir()
    shutil.copy(tmp_path / "run/plan.json", tmp_path / "killed/plan.json")
    own.close()
    whole = path.read_bytes()
    for copy in copies[1:]:
        path.write_bytes(copy)
        for refused in (budget, read):
            with pytest.raises(LedgerError, match="lacks steps that the run has charged to it: it is an older copy"):
                refused(tmp_path)
            assert path.read_bytes() == copy  # nothing was written there
    path.write_bytes(copies[3])
    budget(tmp_path, run="killed").close()
    path.unlink()
    budget(tmp_path, run="another").close()  # begins the ledger anew
    with pytest.raises(LedgerError, match="lacks steps"):
        budget(tmp_path)
    path.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr("adp2sgd.privacy.plan.replacing", full)
        again = budget(tmp_path)  # a mark that cannot be written is no reason to stop
        again.close()
    assert again.steps == 10
    kept = json.loads((tmp_path / "run/plan.json").read_text())
    del kept["mark"]
    (tmp_path / "run/plan.json").write_text(json.dumps(kept))
    budget(tmp_path).close()  # a run that was begun before there were marks


def read(folder: Path) -> Budget:
    return Budget.read(folder / "ledger.jsonl", EIGHT, plan_path=folder / "run" / "plan.json", seeded=False)


def test_other_ledgers_of_the_same_data_are_told_of(two_sites: Config, tmp_path: Path) -> None:
    """The records may have been divided among other sites before: then they have spent there, too."""
    first = simulate(two_sites, tmp_path / "first")
    assert not any("other sites" in note for note in first.notes)
    for file in (tmp_path / "ledgers").iterdir():
        file.rename(file.with_name(file.name.replace("south", "clinic")))
    again = simulate(two_sites, tmp_path / "again")
    [note] = [note for note in again.notes if "other sites" in note]
    assert "two-hospitals-clinic.jsonl" in note
    assert "north" not in note


def test_two_ledgers_of_one_content_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ledger.Ledger.open(tmp_path / name, dataset="heart", site="cleveland").close()
    sums = {ledger.Ledger.closed(tmp_path / name).mark.sum for name in ("a", "b")}
    assert len(sums) == 2


SITES = """
import torch
from torch import nn
import adp2sgd

def two_hospitals(width=0) -> adp2sgd.Task:
    stream = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(400, 4, generator=stream), torch.randint(2, (400,), generator=stream)
    data = adp2sgd.Records(inputs, targets, 1 + torch.arange(400) % 2, ("empty", "north", "south"))
    model = nn.Linear(4, 2) if not width else nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    return adp2sgd.Task(model=lambda: model, train=data, test=data)
"""


@pytest.fixture
def two_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    (tmp_path / "adp2sgd_sites.py").write_text(SITES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Config(
        task="adp2sgd_sites:two_hospitals",
        learners=2,
        epochs=2,
        batch_size=20,
        device="cpu",
        data=Data(partition="site"),
        optimizer=Optimizer(lr=0.1),
        privacy=Privacy(
            mode="private",
            epsilon=2.0,
            noise_multiplier=3.0,
            delta=1e-4,
            ledger=str(tmp_path / "ledgers"),
            dataset="two hospitals",
        ),
    )


def test_a_sites_ledger_lasts_over_runs(two_sites: Config, tmp_path: Path) -> None:
    settings = two_sites
    first, second = simulate(settings), simulate(settings.replace(options={"width": 3}))  # another model, the same data
    assert second.learners[0].epsilon_spent > first.learners[0].epsilon_spent
    assert second.learners[0].max_steps == first.learners[0].max_steps - first.learners[0].steps
    assert sorted(path.name for path in (tmp_path / "ledgers").iterdir()) == [
        "two-hospitals-north.jsonl",
        "two-hospitals-south.jsonl",
    ]
    north = str(tmp_path / "ledgers" / "two-hospitals-north.jsonl")
    assert [any(north in note for note in run.notes) for run in (first, second)] == [True, False]  # when it is new
    assert first.guarantee.epsilon_others == 0
    before, after = first.guarantee.epsilon_spent, second.guarantee.epsilon_spent
    assert second.guarantee.epsilon_others == pytest.approx(before)
    assert f"spent {after:.4g} ({before:.4g} of it by other runs)" in str(second.guarantee)
    assert [row.site for row in spent_in(tmp_path / "ledgers", 1e-4)] == ["north", "south"]
    assert [each.site for each in second.learners] == ["north", "south"]
    assert max(row.epsilon for row in spent_in(tmp_path / "ledgers", 1e-4)) == pytest.approx(after)
    with pytest.raises(ConfigError, match=r"privacy\.ledger"):
        simulate(settings.replace(seed=1))
    with pytest.raises(ConfigError, match=r"privacy\.dataset"):
        simulate(settings.replace(privacy=settings.privacy.replace(dataset=None)))


@pytest.mark.parametrize("shared", [False, True])
def test_a_statement_of_what_a_run_has_spent(
    shared: bool, two_sites: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = two_sites.privacy.replace(**({"ledger": "ledgers"} if shared else {"ledger": None, "dataset": None}))
    run = simulate(two_sites.replace(privacy=own), tmp_path / "run")
    rows = spent_in(tmp_path / "run")
    assert [row.epsilon for row in rows] == pytest.approx([each.epsilon_spent for each in run.learners])
    assert [row.steps for row in rows] == [each.steps for each in run.learners]
    assert {(row.delta, row.adjacency) for row in rows} == {(1e-4, "add-remove")}
    assert spent_in(Path(rows[1].ledger), 1e-4) == rows[1:]
    assert spent_in(tmp_path / "run", 1e-6)[0].epsilon > rows[0].epsilon
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [row.epsilon for row in spent_in(Path("run"))] == [row.epsilon for row in rows]
    assert spent_in(tmp_path / "run", adjacency="replace-one")[0].epsilon > rows[0].epsilon
    with pytest.raises(PrivacyError, match="delta"):
        spent_in(tmp_path / "run", 0.0)
    Path(rows[1].ledger).unlink()
    with pytest.raises(LedgerError, match="cannot be read"):
        spent_in(tmp_path / "run")


def test_a_run_that_resumes_elsewhere_takes_no_other_ledger(
    two_sites: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder of ledgers is another one there, which may hold a ledger of the same name."""
    settings = two_sites.replace(privacy=two_sites.privacy.replace(ledger="ledgers"))
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        made = prepare(settings)
        folder = tmp_path / name / "learner-0"
        folder.mkdir()
        open_budget(made.plan, 0, made.site_names[0], made.populations[0], folder).close()
    with pytest.raises(LedgerError, match=r"charged to .*here/ledgers/two-hospitals-north\.jsonl, not to .*there/"):
        open_budget(made.plan, 0, made.site_names[0], made.populations[0], tmp_path / "here" / "learner-0")


def test_a_statement_needs_a_ledger_and_a_delta(two_sites: Config, tmp_path: Path) -> None:
    kept = tmp_path / "south.jsonl"
    ledger.Ledger.open(kept, dataset="two hospitals", site="south").close()
    assert [(row.steps, row.epsilon) for row in spent_in(kept, 1e-5)] == [(0, 0.0)]
    with pytest.raises(ConfigError, match="--delta"):
        spent_in(kept)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "events.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds no ledger"):
        spent_in(tmp_path / "empty", 1e-5)
    (tmp_path / "empty" / "torn.jsonl").write_text('{"ledg')
    with pytest.raises(LedgerError, match="damaged at line 1"):
        spent_in(tmp_path / "empty", 1e-5)
    with pytest.raises(PrivacyError, match="delta"):
        spent_in(kept, 5.0)
    simulate(two_sites.replace(privacy=Privacy()), tmp_path / "plain")
    with pytest.raises(ConfigError, match="without a privacy guarantee"):
        spent_in(tmp_path / "plain", 1e-5)


def test_a_learner_is_named_by_its_site(two_sites: Config, capsys: pytest.CaptureFixture[str]) -> None:
    settings = two_sites.replace(privacy=Privacy(), seed=1)
    print_run(simulate(settings))
    assert re.search(r"^ *north +\d", capsys.readouterr().out, re.MULTILINE)
    made = prepare(settings)
    nameless = replace(made, task=replace(made.task, train=replace(made.task.train, site_names=())))
    assert [made.site_names[1], nameless.site_names[1]] == ["south", "2"]  # the data's number for it
    assert prepare(settings.replace(data=Data())).site_names[1] == "south"  # sites stay apart unless asked otherwise
    dealt = prepare(settings.replace(data=Data(partition="iid")))
    assert dealt.site_names[1] is None
    assert "no learner stands for a site" in dealt.notes[0]
    assert made.notes == ()
    wild = settings.replace(optimizer=Optimizer(lr=1e30, weight_decay=1e30))
    with pytest.raises(DivergedError, match=r"learner (north|south) diverged"):
        simulate(wild)


def test_a_ledger_in_use_blocks_neither_the_others_nor_the_folder(two_sites: Config, tmp_path: Path) -> None:
    simulate(two_sites)
    south = tmp_path / "ledgers" / "two-hospitals-south.jsonl"
    with ledger.Ledger.open(south, dataset="two hospitals", site="south"), pytest.raises(LedgerError, match="in use"):
        simulate(two_sites, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert simulate(two_sites, tmp_path / "run").global_steps


@pytest.mark.parametrize("engine", [simulate, train])
def test_a_budget_that_allows_no_step_leaves_the_folder_free(engine: Any, two_sites: Config, tmp_path: Path) -> None:
    own = two_sites.privacy.replace(ledger=None, dataset=None, epsilon=1e-3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").write_text("mine")
    (tmp_path / "run" / "learner-9").write_text("mine too")
    with pytest.raises(PrivacyError, match="allows no step"):
        engine(two_sites.replace(privacy=own), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["learner-9", "notes"]


def test_figures_need_no_lock_and_write_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "ledger.jsonl"
    with closing(budget(tmp_path)) as own:
        own.draw()
        before = kept.read_bytes()
        told = Budget.read(kept, EIGHT, plan_path=tmp_path / "run" / "plan.json", seeded=False)
        assert told.figures()["max_steps"] == own.plan.max_steps
        assert told.steps == 32  # what is reserved may have been drawn
        with pytest.raises(LedgerError, match="closed in this process"):
            told.draw()
    assert kept.read_bytes()[: len(before)] == before
    told = Budget.read(kept, EIGHT, plan_path=tmp_path / "run" / "plan.json", seeded=False)
    assert (told.steps, told.figures()) == (1, own.figures())
    with pytest.raises(LedgerError, match="is gone or damaged"):
        Budget.read(kept, EIGHT, plan_path=tmp_path / "elsewhere" / "plan.json", seeded=False)


@pytest.mark.parametrize("most", [600, 100])
def test_more_private_learners_than_files_may_be_open(most: int, tmp_path: Path) -> None:
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {most}))
from adp2sgd.config import Config, Privacy
from adp2sgd.engine import simulate
privacy = Privacy(mode="private", noise_multiplier=1.0, delta=1e-5)
run = simulate(Config(task="digits/logistic", learners=120, batch_size=4, epochs=0.3, device="cpu", privacy=privacy))
assert all(each.max_steps for each in run.learners)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    if most == 600:
        assert done.returncode == 0, done.stderr
    else:
        assert "learners = 120: each private learner holds its ledger open" in done.stderr


def test_a_run_reports_the_largest_share_that_was_spent(tmp_path: Path) -> None:
    """Also where another learner has the larger budget."""
    fixed = Privacy(mode="private", noise_multiplier=2.0, delta=1e-5)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with closing(budget(tmp_path / "a", fixed, planned=200)), closing(budget(tmp_path / "b", fixed)) as short:
        for _ in range(40):
            short.draw()
    accounts = [
        Account(
            number,
            Budget.read(tmp_path / n / "ledger.jsonl", fixed, plan_path=tmp_path / n / "run/plan.json", seeded=False),
            "",
        )
        for number, n in enumerate(("a", "b"))
    ]
    told = _guarantee(accounts, at_cap=False)
    assert told.epsilon == accounts[0].budget.guarantee().epsilon > accounts[1].budget.guarantee().epsilon
    assert told.epsilon_spent == accounts[1].budget.guarantee().epsilon_spent > 0
    assert "in 40 of 125 steps" in str(told)


def test_fast_learners_that_reach_their_cap_are_named(two_sites: Config, tmp_path: Path) -> None:
    own = two_sites.privacy.replace(ledger=None, dataset=None, epsilon=None)
    uneven = two_sites.replace(privacy=own, speeds=Speeds(kind="one-slow", learner=1, factor=100.0))
    notes = simulate(uneven, tmp_path / "run").notes
    assert any(note.startswith("learner north reached the cap on private steps") for note in notes)
    even = uneven.replace(speeds=Speeds())
    for settings in (even, even.replace(algorithm="sync", privacy=own.replace(headroom=1.0))):
        assert not any("reached the cap" in note for note in simulate(settings).notes)


def test_a_ledger_that_is_used_up_is_named(two_sites: Config) -> None:
    simulate(two_sites.replace(epochs=100))  # until both sites have reached their caps
    with pytest.raises(PrivacyError, match=r"earlier runs have spent ε = \d\.\d+ in .*-north\.jsonl: .*allows no"):
        simulate(two_sites)
