"""Who trained, was slow, paused, was dead, came back: from the times at which learners ended their steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from adp2sgd.report.run_data import Floats, LearnerData, RunData

WINDOWS = 120  # of a run's time, in which steps are counted
STEPS = 8  # of the median learner in a window, at least
SLOW = 0.5  # of the median learner's steps in a window
PAUSE = 5.0  # median step times of the learner without a step
CAPPED = 0.999  # of ε: steps of a process that died count as spent, so steps alone do not tell
STATES = ("training", "slow", "no steps", "dead", "averaging")
METHOD = (
    f"The run's time is divided into at most {WINDOWS} windows. Slow: less than half of the median learner's steps in "
    "a window. No steps: none for five times the learner's own median step time. Dead: between the last step of a "
    "process and the first step of its successor. Averaging: the budget is spent."
)


@dataclass(frozen=True)
class Span:
    """What one learner did between two times, in seconds."""

    learner: int
    state: str
    begin: float
    end: float
    steps: int


def timeline(run: RunData) -> list[Span]:
    """Every learner's spans, in order; learners without a recorded step have none."""
    logged = [each for each in run.learners if len(each.log)]
    if not logged:
        return []
    end = max(run.seconds, *(float(each.log.seconds[-1]) for each in logged))
    windows = np.linspace(0.0, end, _windows(logged) + 1)
    counts = np.stack([np.histogram(each.log.seconds, windows)[0] for each in logged])
    median = np.median(counts, axis=0)
    return [
        span
        for each, own in zip(logged, counts, strict=True)
        for span in _merged(_spans(each, own, median, windows, end))
    ]


def _windows(learners: list[LearnerData]) -> int:
    return int(np.clip(np.median([len(each.log) for each in learners]) // STEPS, 1, WINDOWS))


def _spans(learner: LearnerData, own: Floats, median: Floats, windows: Floats, end: float) -> Iterator[Span]:
    """The pauses of a learner, and in between its windows, each slow or not."""
    before = 0.0
    for pause in _pauses(learner, end):
        yield from _working(learner, own, median, windows, before, pause.begin)
        yield pause
        before = pause.end
    yield from _working(learner, own, median, windows, before, end)


def _pauses(learner: LearnerData, end: float) -> Iterator[Span]:
    """Each holds the one step that ends it; the last one, until the run's end, holds none."""
    times, starts = learner.log.seconds, learner.log.start
    gaps = np.diff(times, prepend=0.0)
    reborn = np.diff(starts, prepend=starts[0]) > 0
    usual = float(np.median(gaps))
    for k in np.flatnonzero((gaps > PAUSE * max(usual, 1e-9)) | reborn):
        begin = float(times[k - 1]) if k else 0.0
        yield Span(learner.learner, "dead" if reborn[k] else "no steps", begin, float(times[k]), 1)
    rest = end - float(times[-1])
    if rest > PAUSE * max(usual, 1e-9):
        yield Span(learner.learner, _last_state(learner), float(times[-1]), end, 0)


def _last_state(learner: LearnerData) -> str:
    """Why a learner took no step until the end."""
    if learner.state in {"lost", "restarting"}:
        return "dead"
    spent, cap = learner.epsilon_spent, learner.epsilon
    capped = spent is not None and cap is not None and spent >= CAPPED * cap
    return "averaging" if capped or learner.state == "averaging" else "no steps"


def _working(
    learner: LearnerData, own: Floats, median: Floats, windows: Floats, begin: float, end: float
) -> Iterator[Span]:
    """One span per window, or part of one, between two times."""
    first, last = np.searchsorted(windows, (begin, end), side="right")
    for k in range(max(0, first - 1), min(last, len(own))):
        low, high = max(begin, float(windows[k])), min(end, float(windows[k + 1]))
        if high <= low:
            continue
        whole = float(windows[k + 1] - windows[k])
        before, after = np.searchsorted(learner.log.seconds, (low, high), side="right")
        steps = int(after - before)
        slow = own[k] < SLOW * median[k] and high - low > whole / 2
        yield Span(learner.learner, "slow" if slow else "training", low, high, steps)


def _merged(spans: Iterator[Span]) -> list[Span]:
    """Neighbouring spans of one state as one."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and last.state == span.state:
            found[-1] = Span(span.learner, span.state, last.begin, span.end, last.steps + span.steps)
        elif span.end > span.begin:
            found.append(span)
    return found
