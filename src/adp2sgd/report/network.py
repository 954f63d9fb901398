"""The graph of a run, drawn: learners as nodes, completed exchanges on the edges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from adp2sgd.report import words
from adp2sgd.report.figure import Figure, layout
from adp2sgd.report.run_data import Edge, RunData

DRAWN = 64  # learners at most; the CSV has all edges
LABELLED = 40  # edges at most that show their count without hovering
WIDTHS = 7  # of edges, in pixels; 0 for an edge without an exchange
HIDDEN = {"visible": False, "automargin": False}

Place = tuple[float, float]


def network(run: RunData, index: int) -> Iterator[Figure]:
    exchanges = run.exchanges
    if not exchanges:
        return
    names = {each.learner: each.short_name for each in run.learners}
    rows = [(names.get(i, str(i)), names.get(j, str(j)), count) for (i, j), count in exchanges.items()]
    drawn = len(run.learners) <= DRAWN
    least, most = min(rows, key=lambda row: row[2]), max(rows, key=lambda row: row[2])
    yield Figure(
        id=f"graph-{index}",
        title="Graph: completed exchanges on each edge",
        alt=f"Graph of {words.counted(len(run.learners), 'learner')} and {words.counted(len(rows), 'edge')}. Most: "
        f"{most[0]} with {most[1]}, {most[2]:,} exchanges. Fewest: {least[0]} with {least[1]}, {least[2]:,}.",
        caption="Thicker edges carried more exchanges; larger nodes took more steps."
        if drawn
        else f"More than {DRAWN} learners are not drawn; the CSV lists every edge.",
        traces=_traces(run, exchanges, names) if drawn else [],
        layout=layout(
            HIDDEN | {"range": [-2, 2]},
            HIDDEN | {"range": [-1.3, 1.3], "scaleanchor": "x"},
            hovermode="closest",
            dragmode="pan",
        ),
        columns=("learner", "partner", "exchanges"),
        rows=rows,
        height=420 if drawn else 120,
    )


def _traces(run: RunData, exchanges: dict[Edge, int], names: dict[int, str]) -> list[dict[str, Any]]:
    places = _places(sorted({*names, *(k for edge in exchanges for k in edge)}), exchanges)
    most = max(1, *exchanges.values())
    return [
        *(_edges(places, exchanges, most, width) for width in range(WIDTHS + 1)),
        _counts(places, exchanges, names),
        _nodes(run, places, names),
    ]


def _places(learners: list[int], exchanges: dict[Edge, int]) -> dict[int, Place]:
    """On a circle, clockwise from the top; the centre of a star in the middle."""
    degree = {k: sum(k in edge for edge in exchanges) for k in learners}
    hub = [k for k in learners if degree[k] == len(learners) - 1 > 2 and len(exchanges) == len(learners) - 1]
    around = [k for k in learners if k not in hub]
    turn = 2 * math.pi / max(1, len(around))
    circle = {k: (math.sin(turn * n), math.cos(turn * n)) for n, k in enumerate(around)}
    return circle | dict.fromkeys(hub, (0.0, 0.0))


def _edges(places: dict[int, Place], exchanges: dict[Edge, int], most: int, width: int) -> dict[str, Any]:
    """The edges of one width as one line with gaps: a browser draws a few lines faster than thousands."""
    own = [edge for edge, count in exchanges.items() if math.ceil(WIDTHS * count / most) == width]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for i, j in own for x in (places[i][0], places[j][0], None)],
        "y": [y for i, j in own for y in (places[i][1], places[j][1], None)],
        "line": {"color": "@8", "width": max(1, width), "dash": "solid" if width else "dot"},
        "hoverinfo": "skip",
    }


def _counts(places: dict[int, Place], exchanges: dict[Edge, int], names: dict[int, str]) -> dict[str, Any]:
    """In the middle of each edge, a little nearer to its first learner, so that diagonals do not hide each other."""
    near = 0.5 if len(exchanges) <= len(places) else 0.62
    middle = [
        [near * places[i][axis] + (1 - near) * places[j][axis] for i, j in exchanges] for axis in (0, 1)
    ]  # fmt: skip
    return {
        "type": "scatter",
        "mode": "markers+text" if len(exchanges) <= LABELLED else "markers",
        "x": middle[0],
        "y": middle[1],
        "text": [f"{count:,}" for count in exchanges.values()],
        "textposition": "middle center",
        "textfont": {"color": "@text", "size": 11},
        "marker": {"size": 26 if len(exchanges) <= LABELLED else 8, "color": "@page"},
        "hovertext": [f"{names.get(i, i)} and {names.get(j, j)}: {n:,} exchanges" for (i, j), n in exchanges.items()],
        "hoverinfo": "text",
    }


def _nodes(run: RunData, places: dict[int, Place], names: dict[int, str]) -> dict[str, Any]:
    steps = {each.learner: each.steps for each in run.learners}
    most = max(1, *steps.values()) if steps else 1
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [place[0] for place in places.values()],
        "y": [place[1] for place in places.values()],
        "text": [names.get(k, str(k)) for k in places],
        "textposition": [_beside(place) for place in places.values()],
        "textfont": {"color": "@text"},
        "marker": {
            "size": [12 + 14 * math.sqrt(steps.get(k, 0) / most) for k in places],
            "color": "@1",
            "opacity": 1,
            "line": {"color": "@page", "width": 2},
        },
        "hovertext": [f"{names.get(k, k)}: {steps.get(k, 0):,} steps" for k in places],
        "hoverinfo": "text",
        "cliponaxis": False,
    }


def _beside(place: Place) -> str:
    """Where a node's name stands: outside the circle."""
    x, y = place
    if abs(x) > 0.5:
        return "middle right" if x > 0 else "middle left"
    return "bottom center" if y < 0 else "top center"
