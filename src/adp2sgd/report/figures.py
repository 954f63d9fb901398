"""All figures of a report, in one place: first those that compare runs, then those of each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from adp2sgd.report import words
from adp2sgd.report.colours import series
from adp2sgd.report.figure import Cell, Figure, layout
from adp2sgd.report.network import network
from adp2sgd.report.run_data import Floats, RunData
from adp2sgd.report.sampling import METHOD, MOST, thinned
from adp2sgd.report.timeline import METHOD as TIMELINE_METHOD
from adp2sgd.report.timeline import STATES, Span, timeline

ROWS_SHOWN = 64  # learners in a timeline
MARKERS = 30  # a line of so many points or fewer shows them


def comparing(runs: Sequence[RunData]) -> list[Figure]:
    """One line per run: every metric against epochs and against time, then the consensus distance."""
    found: list[Figure] = []
    names = dict.fromkeys(name for run in runs for name in run.curve.metrics)
    for name in sorted(names, key=lambda each: each == "loss"):
        for axis in ("epoch", "seconds"):
            found += _line(f"{name}-{axis}", words.readable(name), runs, axis, name)
    return [*found, *_line("consensus", "consensus distance", runs, "epoch", None)]


def of_run(run: RunData, index: int) -> list[Figure]:
    """What the learners of one run did. `index` tells the runs of a report apart."""
    halves = [figure for make in (_steps, _staleness, _exchanges, _budget, network) for figure in make(run, index)]
    if len(halves) % 2:
        halves[-1] = replace(halves[-1], wide=True)  # no gap beside it
    return [*halves, *_timeline(run, index)]


def labels(run: RunData) -> list[str]:
    """A short, distinct name for each learner."""
    names = [each.short_name for each in run.learners]
    return [name if names.count(name) == 1 else f"{name} {k}" for k, name in enumerate(names)]


def _line(key: str, title: str, runs: Sequence[RunData], axis: str, metric: str | None) -> Iterator[Figure]:
    traces: list[dict[str, Any]] = []
    rows: list[tuple[Any, ...]] = []
    said = []
    for index, run in enumerate(runs):
        x: Floats = getattr(run.curve, axis)
        y: Floats = run.curve.consensus if metric is None else run.curve.metrics.get(metric, np.empty(0))
        finite = np.flatnonzero(np.isfinite(y)) if len(y) else np.empty(0, dtype=np.intp)
        if not len(finite):
            continue
        traces.append(_line_trace(run.name, index, x, y))
        rows += [(run.name, float(x[k]), float(y[k])) for k in finite]
        first, last = (words.metric(metric or "", float(y[k])) for k in (finite[0], finite[-1]))
        said.append(f"{run.name}: from {first} to {last}")
    if not traces:
        return
    against = "epochs" if axis == "epoch" else f"time, {_clock(runs)} seconds"
    share = metric is not None and words.is_fraction(metric)
    y_axis: dict[str, Any] = {"title": title, "tickformat": ".0%"} if share else {"title": title}
    if metric is None and all(row[2] > 0 for row in rows):
        y_axis |= _logarithmic([row[2] for row in rows])
    yield Figure(
        id=key,
        title=f"{title[0].upper()}{title[1:]} against {'epochs' if axis == 'epoch' else 'time'}",
        alt=f"{title} of the average model against {against}. {'; '.join(said)}.",
        caption=_line_caption(metric, axis, runs),
        traces=traces,
        layout=layout({"title": against}, y_axis, hovermode="x unified", showlegend=len(traces) > 1),
        columns=("run", axis, metric or "consensus"),
        rows=rows,
        wide=metric is None,
    )


def _logarithmic(values: Sequence[float]) -> dict[str, Any]:
    """A tick at each power of ten; where the values span less, wherever they are round."""
    wide = max(values) / min(values) >= 100
    return {"type": "log", "dtick": 1, "tickformat": ".0e"} if wide else {"type": "log", "tickformat": ".2~g"}


def _line_trace(name: str, index: int, x: Floats, y: Floats) -> dict[str, Any]:
    kept = thinned(x, y)
    colour, dash = series(index)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(kept) <= MARKERS else "lines",
        "name": name,
        "x": x[kept].tolist(),
        "y": y[kept].tolist(),
        "line": {"color": colour, "dash": dash, "width": 2},
        "marker": {"size": 5, "color": colour},
    }


def _line_caption(metric: str | None, axis: str, runs: Sequence[RunData]) -> str:
    parts = ["Mean squared distance of the learners' models from their average."] if metric is None else []
    if axis == "seconds" and len({run.clock for run in runs}) > 1:
        parts.append("Virtual and real seconds are not comparable.")
    if any(len(run.curve) > MOST for run in runs):
        parts.append(METHOD)
    return " ".join(parts)


def _clock(runs: Sequence[RunData]) -> str:
    return " or ".join(sorted({run.clock for run in runs}))


def _bars(
    key: str, title: str, run: RunData, values: dict[str, list[float]], colours: Sequence[str], **more: Any
) -> Figure:
    """One group of bars per learner; the CSV has a column for each kind."""
    names = labels(run)
    traces = [
        {"type": "bar", "name": kind, "x": names, "y": heights, "marker": {"color": colour}}
        for (kind, heights), colour in zip(values.items(), colours, strict=False)
    ]
    shape = layout(
        {"title": "site" if any(each.site for each in run.learners) else "learner", "type": "category"},
        {"title": more.pop("unit")},
        barmode=more.pop("barmode", "group"),
        showlegend=len(values) > 1,
        hovermode="x unified",
    )
    rows: list[list[Cell]] = [[name, *(heights[k] for heights in values.values())] for k, name in enumerate(names)]
    return Figure(id=key, title=title, traces=traces, layout=shape, columns=("learner", *values), rows=rows, **more)


def _steps(run: RunData, index: int) -> Iterator[Figure]:
    if not run.learners:
        return
    steps: list[float] = [each.steps for each in run.learners]
    fewest, most = min(run.learners, key=lambda each: each.steps), max(run.learners, key=lambda each: each.steps)
    figure = _bars(
        f"steps-{index}", "Steps per learner", run, {"steps": steps}, ["@1"], unit="steps",
        alt=f"Steps of each learner. Most: {most.name}, {words.number(most.steps)} ({words.percent(most.share)}). "
        f"Fewest: {fewest.name}, {words.number(fewest.steps)} ({words.percent(fewest.share)}).",
    )  # fmt: skip
    figure.traces[0] |= {
        "customdata": [words.percent(each.share) for each in run.learners],
        "hovertemplate": "%{y:,} steps, %{customdata} of all<extra></extra>",
    }
    yield figure


def _staleness(run: RunData, index: int) -> Iterator[Figure]:
    known = [each for each in run.learners if each.staleness_mean is not None]
    if not known or not any(each.staleness_max for each in known):
        return
    values = {
        "mean": [each.staleness_mean or 0.0 for each in run.learners],
        "95 % of steps below": [_quantile(each.log.staleness) for each in run.learners],
        "maximum": [float(each.staleness_max or 0) for each in run.learners],
    }
    if not all(len(each.log) for each in run.learners):
        del values["95 % of steps below"]
    worst = max(known, key=lambda each: each.staleness_max or 0)
    yield _bars(
        f"staleness-{index}", "Staleness per learner", run, values, ["@1", "@6", "@2"], unit="global steps",
        alt=f"Staleness of each learner's gradients. Largest: {worst.name}, {worst.staleness_max} global steps, "
        f"{words.number(worst.staleness_mean, 3)} on average.",
        caption="Global steps between reading the model and descending with its gradient.",
    )  # fmt: skip


def _quantile(values: Floats) -> float:
    return float(np.quantile(values, 0.95)) if len(values) else 0.0


def _exchanges(run: RunData, index: int) -> Iterator[Figure]:
    if not any(each.exchanges or each.busy for each in run.learners) or not run.edges:
        return
    values: dict[str, list[float]] = {
        "completed": [each.exchanges for each in run.learners],
        "answered busy": [each.busy for each in run.learners],
        "no answer": [each.expired for each in run.learners],
    }
    values = {kind: counts for kind, counts in values.items() if kind == "completed" or any(counts)}
    total = sum(each.exchanges for each in run.learners) // 2
    yield _bars(
        f"exchanges-{index}", "Exchanges per learner", run, values, ["@3", "@8", "@5"], unit="exchanges",
        barmode="stack", alt=f"Exchanges of each learner, about {words.number(total)} pairs in all.",
        caption="Completed exchanges count at both partners.",
    )  # fmt: skip


def _budget(run: RunData, index: int) -> Iterator[Figure]:
    """ε spent of ε allowed, a horizontal bar per learner."""
    known = [(name, each) for name, each in zip(labels(run), run.learners, strict=True) if each.epsilon is not None]
    if not known:
        return
    names = [name for name, _ in known]
    caps = [each.epsilon or 0.0 for _, each in known]
    spent = [each.epsilon_spent or 0.0 for _, each in known]
    bar = {"type": "bar", "orientation": "h", "y": names}
    frame = {"color": "rgba(0,0,0,0)", "line": {"color": "@cap", "width": 1.5}}
    traces = [
        bar | {"name": "allowed", "x": caps, "width": 0.7, "marker": frame},
        bar | {"name": "spent", "x": spent, "width": 0.45, "marker": {"color": "@4"}},
    ]
    most = max(range(len(known)), key=lambda k: spent[k] / max(caps[k], 1e-12))
    yield Figure(
        id=f"epsilon-{index}",
        title="Privacy budget: ε spent of ε allowed",
        alt=f"ε of each learner. Largest share: {names[most]} spent {spent[most]:.3g} of {caps[most]:.3g}.",
        traces=traces,
        layout=layout(
            {"title": "ε", "rangemode": "tozero"},
            {"type": "category", "autorange": "reversed"},
            barmode="overlay", showlegend=True, hovermode="y unified",
        ),
        columns=("learner", "epsilon_spent", "epsilon_allowed"),
        rows=list(zip(names, spent, caps, strict=True)),
        height=max(220, 110 + 30 * len(known)),
    )  # fmt: skip


def _timeline(run: RunData, index: int) -> Iterator[Figure]:
    spans = timeline(run)
    if not spans:
        return
    names = dict(zip((each.learner for each in run.learners), labels(run), strict=True))
    shown = list(names)[:ROWS_SHOWN]
    drawn = [span for span in spans if span.learner in set(shown)]
    rest = len({span.learner for span in spans} - set(shown))
    yield Figure(
        id=f"timeline-{index}",
        title="Timeline: who trained, was slow, was dead, came back",
        alt=f"Timeline of each learner. {_events_in_words(spans, names)}",
        caption=TIMELINE_METHOD + (f" {rest} more learners are in the CSV." if rest else ""),
        traces=[_state_trace(state, drawn, names) for state in STATES if any(s.state == state for s in drawn)],
        layout=layout(
            {"title": f"{run.clock} seconds", "range": [0, max(span.end for span in spans)]},
            {"type": "category", "autorange": "reversed", "categoryorder": "array",
             "categoryarray": [names[each] for each in shown]},
            barmode="overlay", showlegend=True, hovermode="closest",
        ),
        columns=("learner", "state", "begin_s", "end_s", "steps"),
        rows=[(names[span.learner], span.state, span.begin, span.end, span.steps) for span in spans],
        height=max(220, 110 + 26 * len(shown)),
        wide=True,
    )  # fmt: skip


PATTERNS = {"slow": "/", "dead": "x", "averaging": "."}  # colour alone carries nothing


def _state_trace(state: str, spans: Sequence[Span], names: dict[int, str]) -> dict[str, Any]:
    own = [span for span in spans if span.state == state]
    return {
        "type": "bar",
        "orientation": "h",
        "name": state,
        "y": [names[span.learner] for span in own],
        "base": [span.begin for span in own],
        "x": [span.end - span.begin for span in own],
        "customdata": [[span.begin, span.end, span.steps] for span in own],
        "hovertemplate": f"%{{y}}: {state}<br>%{{customdata[0]:.4g}} to %{{customdata[1]:.4g}} s, "
        "%{customdata[2]} steps<extra></extra>",
        "marker": {"color": f"@{state}", "pattern": _pattern(state)},
        "width": 0.8,
    }


def _pattern(state: str) -> dict[str, Any]:
    shape = PATTERNS.get(state, "")
    return {"shape": shape, "bgcolor": f"@{state}", "fgcolor": "@page", "size": 7, "solidity": 0.2}


def _events_in_words(spans: Sequence[Span], names: dict[int, str]) -> str:
    said = []
    for state, verb in (("dead", "was dead"), ("slow", "was slow"), ("averaging", "only averaged")):
        who = dict.fromkeys(names[span.learner] for span in spans if span.state == state)
        if who:
            listed = ", ".join(list(who)[:8]) + (" and more" if len(who) > 8 else "")
            said.append(f"At times {verb}: {listed}.")
    return " ".join(said) or "All trained from the beginning to the end."
