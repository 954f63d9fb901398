"""Figures say what the runs did: in traces, in tables and in words."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from adp2sgd import simulate
from adp2sgd.report import words
from adp2sgd.report.colours import LIGHT, THEMES, painted
from adp2sgd.report.figure import Figure
from adp2sgd.report.page import figures
from adp2sgd.report.read import read_run
from adp2sgd.report.run_data import LearnerData, RunData, StepLog
from adp2sgd.report.timeline import timeline
from folders import PRIVATE, SMALL, make, make_large


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunData]:
    home = tmp_path_factory.mktemp("runs")
    return [read_run(make(home / "open")), read_run(make(home / "private", PRIVATE))]


def by_id(runs: list[RunData]) -> dict[str, Figure]:
    return {each.id: each for each in figures(runs)}


def test_runs_are_overlaid_and_each_has_its_own_figures(runs: list[RunData]) -> None:
    found = by_id(runs)
    assert list(found) == [
        "loss-epoch", "loss-seconds", "consensus",
        "steps-0", "staleness-0", "exchanges-0", "graph-0", "timeline-0",
        "steps-1", "staleness-1", "exchanges-1", "epsilon-1", "graph-1", "timeline-1",
    ]  # fmt: skip
    for key, axis in (("loss-epoch", "epoch"), ("loss-seconds", "seconds")):
        for trace, run in zip(found[key].traces, runs, strict=True):
            assert trace["name"] == run.name
            assert trace["x"] == getattr(run.curve, axis).tolist()
            assert trace["y"] == run.curve.metrics["loss"].tolist()
    one, other = (trace["line"] for trace in found["loss-epoch"].traces)
    assert one["color"] != other["color"]
    assert one["dash"] != other["dash"]  # colour alone carries nothing


def test_tables_hold_what_the_learners_did(runs: list[RunData]) -> None:
    found, run = by_id(runs), runs[1]
    assert [row[1] for row in found["steps-1"].rows] == [each.steps for each in run.learners]
    assert sum(row[2] for row in found["graph-1"].rows) * 2 == sum(each.exchanges for each in run.learners)
    assert [(row[1], row[2]) for row in found["epsilon-1"].rows] == [
        (each.epsilon_spent, each.epsilon) for each in run.learners
    ]
    assert "Fewest: learner 2" in found["steps-1"].alt


def test_the_timeline_names_who_was_slow(runs: list[RunData]) -> None:
    spans = timeline(runs[0])
    assert {span.state for span in spans if span.learner == 2} == {"slow"}
    assert {span.state for span in spans if span.learner != 2} == {"training"}
    assert "At times was slow: 2." in by_id(runs)["timeline-0"].alt


def test_the_timeline_shows_death_return_pause_and_a_spent_budget() -> None:
    def learner(number: int, seconds: np.ndarray, start: np.ndarray | None = None, **more: float) -> LearnerData:
        log = StepLog(
            seconds=seconds, staleness=np.zeros(len(seconds)), start=np.zeros(len(seconds)) if start is None else start
        )
        return LearnerData(learner=number, steps=len(seconds), log=log, **more)  # type: ignore[arg-type]

    steps = np.arange(0.1, 100, 0.1)
    dead = (steps < 40) | (steps > 60)
    silent = (steps < 20) | (steps > 30)
    run = RunData(
        name="r", folder=None, task="t", algorithm="adpsgd", seconds=100.0,
        learners=(
            learner(0, steps),
            learner(1, steps[dead], (steps[dead] > 60).astype(float)),
            learner(2, steps[silent]),
            learner(3, steps[steps < 70], epsilon=3.0, epsilon_spent=3.0),
            LearnerData(learner=4),
        ),
    )  # fmt: skip
    told = {
        number: [(span.state, round(span.begin), round(span.end)) for span in timeline(run) if span.learner == number]
        for number in range(5)
    }
    assert told[0] == [("training", 0, 100)]
    assert told[1] == [("training", 0, 40), ("dead", 40, 60), ("training", 60, 100)]
    assert told[2] == [("training", 0, 20), ("no steps", 20, 30), ("training", 30, 100)]
    assert told[3] == [("training", 0, 70), ("averaging", 70, 100)]
    assert told[4] == []
    assert all(sum(s.steps for s in timeline(run) if s.learner == k.learner) == k.steps for k in run.learners)


def test_spans_follow_one_another_without_gap(tmp_path: Path) -> None:
    run = read_run(make_large(tmp_path / "large", events=8000))
    for number in range(16):
        spans = [span for span in timeline(run) if span.learner == number]
        assert spans[0].begin == 0.0
        assert all(one.end == other.begin for one, other in pairwise(spans))
    assert "At times was dead: 5." in by_id([run])["timeline-0"].alt


def test_the_summary_is_plain_and_claims_no_more_than_holds(runs: list[RunData]) -> None:
    plain, private = (words.summary(run) for run in runs)
    assert plain.startswith("Four learners trained a model (quadratic) to a loss of ")
    assert "no privacy guarantee" in plain
    assert "No single record can be told apart from its absence beyond ε = 3, δ = 1e-05" in private
    assert "seeded" in private  # such a run protects nobody who knows the seed


def test_a_run_shows_its_figures_in_a_notebook() -> None:
    run = simulate(SMALL.replace(epochs=1))
    plots = run.plot()
    assert {"Loss against epochs", "Steps per learner", "Graph: completed exchanges on each edge"} <= set(plots)
    assert plots["Steps per learner"].data[0].y == tuple(each.steps for each in run.learners)
    assert plots["Steps per learner"].data[0].marker.color == LIGHT["1"]


@pytest.mark.parametrize("theme", THEMES)
def test_colours_have_enough_contrast(theme: str) -> None:
    """WCAG 2 AA: 4.5 for text, 3 for what carries meaning; the grid is decoration."""
    colours = THEMES[theme]
    for name, colour in colours.items():
        if name in {"page", "panel", "line"}:
            continue
        least = 4.5 if name in {"text", "muted", "link"} else 3.0
        for background in ("page", "panel") if least == 4.5 else ("page",):
            assert contrast(colour, colours[background]) >= least, f"{theme} {name} on {background}"


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def test_no_colour_is_left_without_a_value(runs: list[RunData]) -> None:
    for figure in figures(runs):
        for theme in THEMES.values():
            assert "'@" not in str(painted(figure.to_dict(), theme))
