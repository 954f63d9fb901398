"""What `check` says is what a run does."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import Command
from data_files import DECLARED, patients, write_table

PRIVATE = ("--set", "privacy.mode=private", "--set", "privacy.epsilon=4", "--set", "privacy.delta=1e-4")
SMALL = ("--set", "task=blobs", "--set", "learners=3", "--set", "epochs=2", "--set", "batch_size=50")


@pytest.mark.parametrize("mode", [(), PRIVATE])
def test_the_figures_are_the_runs(mode: tuple[str, ...], command: Command) -> None:
    said = command.json("check", *SMALL, *mode)
    done = command.json("simulate", *SMALL, *mode, "--quiet")
    [forecast] = said["forecasts"]
    assert forecast["steps"] == done["global_steps"]
    assert sum(share["records"] for share in forecast["shares"]) == said["records"] == 1600
    for share, learner in zip(forecast["shares"], done["learners"], strict=True):
        assert (share["epsilon"], share["max_steps"]) == (learner["epsilon"], learner["max_steps"])
    if mode:
        assert all(share["noise_multiplier"] > 0.3 for share in forecast["shares"])
    exchanges = sum(learner["exchanges"] for learner in done["learners"])
    sent = sum(learner["bytes_sent"] for learner in done["learners"])
    assert said["bytes_per_exchange"] * exchanges == pytest.approx(sent, rel=0.01)
    assert 0 < said["step_s"] < 1
    assert forecast["simulate_s"] == pytest.approx(forecast["steps"] * said["step_s"])
    assert said["memory_bytes"] is None or said["memory_bytes"] >= 3 * said["bytes_per_exchange"]


def test_several_numbers_of_learners(command: Command) -> None:
    said = command.json("check", *SMALL, "--learners", "1,4,16")
    assert [each["learners"] for each in said["forecasts"]] == [1, 4, 16]
    assert [len(each["shares"]) for each in said["forecasts"]] == [1, 4, 16]
    told = command("check", *SMALL, "--learners", "4,16")[1]
    assert "bytes per exchange" in told
    code, _, complaint = command("check", *SMALL, "--learners", "4,many")
    assert (code, "--learners 4,many" in complaint) == (2, True)


def test_sites_are_named_and_no_ledger_is_touched(command: Command, tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", patients())
    lines = [
        'task = "table/logistic"\nlearners = 2\nbatch_size = 8\n[options]',
        f'path = "{path}"\nlabel = "ill"\nsite = "clinic"\nclasses = [0, 1]',
        'ranges = {age = [0, 100]}\ncategories = {kind = ["mild", "severe"]}',
        '[privacy]\nmode = "private"\nepsilon = 3\ndelta = 1e-4\nledger = "ledgers"\ndataset = "patients"',
    ]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    assert DECLARED["label"] == "ill"
    said = command.json("check", "run.toml")
    assert [share["learner"] for share in said["forecasts"][0]["shares"]] == ["north", "south"]
    assert "a ledger which has spent nothing" in " ".join(said["notes"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.toml", "t.csv"]
    code, _, complaint = command("check", "run.toml", "--learners", "5")
    assert (code, "2 sites" in complaint) == (2, True)
