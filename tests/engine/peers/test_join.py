"""Four hospitals that join over TLS, each a real process with its own certificate and its own records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hospitals import NAMES, Hospitals, fixture_hospitals, fixture_made_data, until  # noqa: F401

from adp2sgd.privacy.ledger import read as read_ledger
from conftest import adp2sgd

pytestmark = pytest.mark.integration
DECLARED = {"cleveland": 227, "hungarian": 220, "switzerland": 92, "va": 150}
PRIVATE = {"mode": "private", "epsilon": 3.0, "delta": 1e-4}


def test_four_sites_end_with_one_model_and_a_result_each(hospitals: Callable[..., Hospitals], tmp_path: Path) -> None:
    made = hospitals()
    made.start()
    made.wait()
    assert made.apart() < 3e-3
    for number, name in enumerate(NAMES):
        run = made.result(name)
        assert run.accuracy is not None
        assert run.accuracy > 0.7
        assert run.global_steps >= 20 * 700 // 16
        assert sum(each.steps for each in run.learners) == run.global_steps
        assert [each.site for each in run.learners] == list(NAMES)
        assert run.learners[number].exchanges > 0
        assert any("tolerance 0.001" in note for note in run.notes), "the remaining distance is stated"
    shown = adp2sgd("status", str(made.folder("va")), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for word in (*NAMES, "not running", "steps", "last exchange"):
        assert word in shown.stdout
    again = adp2sgd("join", str(made.run_file), "--site", str(made.site_file("va")), "--out", str(made.folder("va")),
                    cwd=tmp_path)  # fmt: skip
    assert again.returncode == 2
    assert "finished run" in again.stderr


def test_private_sites_killed_at_any_instant_go_on_and_no_privacy_is_undercounted(
    hospitals: Callable[..., Hospitals],
) -> None:
    """Every site is killed −9 in turn and started by the same command."""
    made = hospitals(privacy=PRIVATE, speeds={"step_s": 0.05, "pad": True}, epochs=40)
    made.start()
    for name in NAMES:
        before = made.steps(name)
        until(lambda name=name, before=before: made.steps(name) >= before + 5, 150, made.told)
        made.kill(name)
        until(lambda name=name: name in made.codes(), 10)
        made.start(name)
        until(lambda name=name: made.state(name) in ("training", "averaging", "settling", "ended"), 150, made.told)
    made.wait()
    for number, name in enumerate(NAMES):
        run, folder = made.result(name), made.folder(name)
        own = run.learners[number]
        assert own.restarts == 1
        plan = json.loads((folder / f"learner-{number}" / "plan.json").read_text())
        account = read_ledger(made.authority.site_folder(name) / "ledger" / f"heart-{name}.jsonl")
        ((mechanism, counted),) = account.spent().parts
        assert mechanism.sample_rate == 16 / DECLARED[name]
        taken = len((folder / f"learner-{number}" / "events.jsonl").read_text().splitlines())  # less what a kill lost
        assert max(own.steps, taken) <= counted <= min(plan["max_steps"], taken + 2 * account.block + 40)
        assert not any("nobody gave it a model" in note for note in run.notes)
        assert run.guarantee is not None
        assert run.guarantee.epsilon <= 3.0
        assert run.guarantee.epsilon_spent == pytest.approx(account.policy.spent(account.spent()).epsilon)
        assert run.guarantee.steps == counted
        assert not list(folder.rglob("*.lock"))
    assert made.apart() < 3e-3


def test_a_site_alone_trains_on_and_names_those_that_never_came(hospitals: Callable[..., Hospitals]) -> None:
    made = hospitals(epochs=3)
    made.start("va")
    made.wait("va")
    run = made.result("va")
    assert run.learners[3].steps == run.global_steps >= 3 * 700 // 16
    for name in NAMES[:3]:
        assert f"site {name} never came" in run.notes
    assert [each.state for each in run.learners[:3]] == ["never came"] * 3


def test_a_private_site_that_starts_first_spends_nothing_before_it_meets_a_neighbour(
    hospitals: Callable[..., Hospitals], tmp_path: Path
) -> None:
    made = hospitals(names=("hungarian", "va"), privacy=PRIVATE, epochs=2)
    made.start("va")
    until(lambda: made.state("va") == "waiting for a first neighbour", 60, made.told)
    time.sleep(3.0)
    assert made.state("va") == "waiting for a first neighbour"
    assert "waiting for a first neighbour" in made.notes("va")
    assert made.steps("va") == 0
    made.start("hungarian")
    made.wait()
    assert all(made.result(name).learners[number].steps for number, name in enumerate(made.names))
    spent = adp2sgd("privacy", "spent", str(made.folder("va")), cwd=tmp_path)
    assert spent.returncode == 0, spent.stderr
    assert "heart-va.jsonl" in spent.stdout
    shown = adp2sgd("status", str(made.folder("va")), cwd=tmp_path)
    assert "at most 3.00" in shown.stdout
    assert " of 3.00" in shown.stdout


def test_the_demonstration_of_four_sites_ends_in_a_table(tmp_path: Path) -> None:
    done = adp2sgd("demo", "--sites", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["site"] for row in rows] == list(NAMES)
    assert [row["restarts"] for row in rows] == [0, 1, 0, 0]
    for row in rows:
        assert row["accuracy"] > 0.6
        assert 0 < row["epsilon_spent"] <= row["epsilon"] == 3.0
