"""status.json: how a run stands, from outside, while it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from adp2sgd import simulate, train
from adp2sgd.config import Config, Topology
from adp2sgd.engine import status as module
from adp2sgd.engine.status import Counters, RunStatus, StatusFile, read_status
from adp2sgd.run_folder import STATUS, Folder, Run, read_result


def status(steps: int) -> RunStatus:
    return RunStatus(
        task="t", algorithm="adpsgd", clock="real", seconds=1.0, global_steps=steps, target_steps=100, epoch=1.0,
        epochs=2.0, learners=(), notes=("a note",),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.create(tmp_path / "run", Config())


@pytest.mark.parametrize("engine", [simulate, pytest.param(train, marks=pytest.mark.processes)])
def test_a_run_shows_how_it_stands_and_who_met_whom(
    engine: Callable[..., Run], quadratic_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.0)
    monkeypatch.setattr(module, "SHARE", 1e9)
    seen: list[RunStatus] = []
    home = tmp_path / "run"

    def look(_: RunStatus) -> None:
        seen.append(read_status(Folder.open(home)))  # type: ignore[arg-type]
        assert Folder.open(home).running

    run = engine(quadratic_config.replace(topology=Topology(graph="ring")), home, on_status=look)
    assert not Folder.open(home).running
    assert [each.global_steps for each in seen] == sorted(each.global_steps for each in seen)
    assert seen[-1].target_steps == run.global_steps - run.overshoot
    assert seen[-1].learners[0].counters.partners.keys() <= {1, 3}
    met = {each.learner: each.partners for each in run.learners}
    for me, partners in met.items():
        assert partners.keys() <= {(me + 1) % 4, (me - 1) % 4}
        assert sum(partners.values()) == run.learners[me].exchanges
    if engine is simulate:
        assert all(met[k][me] == count for me, partners in met.items() for k, count in partners.items())
    assert read_result(home).learners == run.learners


def test_the_file_is_strict_json_for_its_owner_alone(folder: Folder) -> None:
    StatusFile(folder, lambda _: None)(status(3))
    path = folder.path / STATUS
    raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert (raw["global_steps"], raw["notes"]) == (3, ["a note"])
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_is_written_once_a_second_and_at_the_end(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    passed: list[int] = []
    write = StatusFile(folder, lambda each: passed.append(each.global_steps))
    told = []
    for steps, moment in ((0, 100.0), (10, 100.5), (20, 101.0), (30, 101.9), (100, 101.95)):
        now[0] = moment
        write(status(steps))
        found = read_status(folder)
        assert found is not None
        told.append((found.global_steps, found.left_s))
    assert passed == [0, 10, 20, 30, 100]
    assert told == [(0, None), (0, None), (20, 4.0), (20, 4.0), (100, 0.0)]


def test_a_full_disk_does_not_end_the_run(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    passed: list[int] = []
    StatusFile(folder, lambda each: passed.append(each.global_steps))(status(3))
    assert passed == [3]
    assert read_status(folder) is None


def test_counts_of_several_starts_add_up_partner_by_partner() -> None:
    before = Counters(steps=3, staleness_max=5, partners={1: 2, 2: 1})
    after = Counters(**json.loads(json.dumps({"steps": 2, "staleness_max": 4, "partners": {1: 1, 3: 7}})))
    assert before + after == Counters(steps=5, staleness_max=5, partners={1: 3, 2: 1, 3: 7})
