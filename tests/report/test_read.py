"""A run's folder is read whole, half and damaged; whatever metrics are there are taken."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adp2sgd import simulate
from adp2sgd.engine.status import RunStatus
from adp2sgd.errors import ConfigError
from adp2sgd.report.read import named_apart, of_run, read_run
from adp2sgd.report.sampling import thinned
from adp2sgd.report.words import best_metric
from adp2sgd.run_folder import read_result
from folders import PRIVATE, SMALL, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("runs") / "first")


def test_a_finished_run_is_read_as_it_was(folder: Path) -> None:
    data, run = read_run(folder), read_result(folder)
    assert (data.name, data.state, data.task, data.clock) == ("first", "finished", "quadratic", "virtual")
    assert (data.global_steps, data.epoch, data.seconds) == (run.global_steps, run.epochs, run.seconds)
    assert data.metrics == {"loss": run.loss}
    assert data.curve.metrics["loss"].tolist() == [point.loss for point in run.curve]
    assert data.curve.consensus.tolist() == [point.consensus for point in run.curve]
    for mine, theirs in zip(data.learners, run.learners, strict=True):
        assert (mine.steps, mine.exchanges, mine.partners) == (theirs.steps, theirs.exchanges, theirs.partners)
        assert len(mine.log) == theirs.steps
        assert mine.log.staleness.mean() == pytest.approx(theirs.staleness_mean)
    assert data.edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert sum(data.exchanges.values()) == sum(each.exchanges for each in run.learners) / 2
    assert data.config["speeds.factor"] == 4.0


def test_a_run_in_memory_needs_no_folder() -> None:
    run = simulate(SMALL.replace(epochs=1))
    data = of_run(run)
    assert run.folder is None
    assert (data.global_steps, len(data.curve)) == (run.global_steps, len(run.curve))
    assert [len(each.log) for each in data.learners] == [0] * 4


def test_a_run_under_way_is_read_from_its_status(tmp_path: Path) -> None:
    seen = []

    def look(_: RunStatus) -> None:
        seen.append(read_run(tmp_path / "run"))

    simulate(SMALL, tmp_path / "run", on_status=look)
    first, last = seen[0], seen[-1]
    assert (first.state, last.state, last.finished) == ("running", "running", False)
    assert 0 < first.global_steps <= last.global_steps == last.target_steps
    assert last.left_s == 0.0
    assert last.learners[0].exchanges == sum(last.learners[0].partners.values()) > 0
    assert read_run(tmp_path / "run").state == "finished"


def test_what_a_killed_run_left_is_read(folder: Path, tmp_path: Path) -> None:
    """Its configuration and events, the last line torn in the middle."""
    left = tmp_path / "left"
    (left / "learner-0").mkdir(parents=True)
    (left / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    whole = (folder / "learner-0/events.jsonl").read_text()
    (left / "learner-0/events.jsonl").write_text(whole[: len(whole) * 2 // 3])
    data = read_run(left)
    assert (data.state, data.task) == ("stopped", "quadratic")
    assert 0 < data.learners[0].steps == len(data.learners[0].log) < whole.count("\n")
    assert np.isfinite(data.learners[0].log.seconds).all()


def test_other_metrics_and_fields_of_other_releases_are_taken(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "result.json").read_text())
    for each in (raw, *raw["curve"], *raw["learners"]):
        each["metrics"] |= {"auc": 0.75, "missing": None}
    raw |= {"monitor": "auc", "a_field_of_tomorrow": 1}
    raw["curve"][0]["metrics"]["auc"] = None
    (tmp_path / "config.toml").write_text((folder / "config.toml").read_text() + "\n[of_tomorrow]\nkey = 1\n")
    (tmp_path / "result.json").write_text(json.dumps(raw))
    data = read_run(tmp_path)
    assert data.metrics == {"auc": 0.75, "loss": pytest.approx(read_run(folder).metrics["loss"])}
    assert data.learners[0].metrics["auc"] == 0.75
    assert np.isnan(data.curve.metrics["auc"][0])
    assert data.curve.metrics["auc"][1] == 0.75
    assert best_metric(data) == "auc"
    assert data.config["of_tomorrow.key"] == 1


def test_a_private_run_states_its_guarantee_and_spending(tmp_path: Path) -> None:
    data = read_run(make(tmp_path / "run", PRIVATE))
    assert data.guarantee is not None
    assert data.guarantee["epsilon"] == pytest.approx(3.0, rel=0.01)
    assert all(0 < (each.epsilon_spent or 0) <= (each.epsilon or 0) for each in data.learners)
    assert data.seeded


def test_what_is_no_run_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run \(no config.toml\)"):
        read_run(tmp_path)
    (tmp_path / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ConfigError, match=r"result\.json cannot be read"):
        read_run(tmp_path)


def test_runs_of_one_name_are_told_apart(tmp_path: Path, folder: Path) -> None:
    for parent in ("a", "b", "c"):
        (tmp_path / parent / "run").mkdir(parents=True)
        (tmp_path / parent / "run/config.toml").write_bytes((folder / "config.toml").read_bytes())
    runs = named_apart(read_run(tmp_path / parent / "run") for parent in ("a", "b", "c"))
    assert [run.name for run in runs] == ["run", "b/run", "c/run"]


def test_a_long_line_is_thinned_and_keeps_its_peaks() -> None:
    x = np.arange(50_000.0)
    y = np.sin(x / 5000)
    y[12_345], y[40_000] = 9.0, np.nan
    kept = thinned(x, y)
    assert len(kept) == 1000
    assert (kept[0], kept[-1]) == (0, 49_999)
    assert 12_345 in kept
    assert 40_000 not in kept
    assert (np.diff(kept) > 0).all()
    assert thinned(x[:10], y[:10]).tolist() == list(range(10))
