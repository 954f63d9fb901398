"""A figure as data: what is drawn, what it says in words, and its numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | float | int | None

AXIS = {"gridcolor": "@line", "linecolor": "@line", "zerolinecolor": "@line", "automargin": True}
LAYOUT = {
    "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "@text", "family": "system-ui, sans-serif", "size": 13},
    "hoverlabel": {"bgcolor": "@panel", "bordercolor": "@line", "font": {"color": "@text"}},
    "modebar": {
        "color": "@muted",
        "activecolor": "@text",
        "bgcolor": "rgba(0,0,0,0)",
        "remove": ["sendChartToCloud"],  # a button that uploads the figure to a server of plotly's maker
    },
    "legend": {
        "orientation": "h",
        "y": 1.02,
        "yanchor": "bottom",
        "x": 0,
        "traceorder": "normal",
        "font": {"color": "@text"},
    },
    "showlegend": False,
    "dragmode": "zoom",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`traces` and `layout` are plotly.js's, with colours by name; `alt` says what the picture shows.

    `columns` and `rows` hold every number behind the picture: the CSV.
    """

    id: str
    title: str
    alt: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    height: int = 320
    wide: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.title,
            "alt": self.alt,
            "caption": self.caption,
            "data": list(self.traces),
            "layout": {**self.layout, "height": self.height},
            "columns": list(self.columns),
            "rows": [[_plain(cell) for cell in row] for row in self.rows],
        }


def layout(x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Axes with the common look; titles are texts."""
    return {**LAYOUT, "xaxis": axis(x), "yaxis": axis(y), **more}


def axis(own: dict[str, Any]) -> dict[str, Any]:
    title = {"title": {"text": own["title"]}} if isinstance(own.get("title"), str) else {}
    return {**AXIS, **own, **title}


def _plain(cell: Cell) -> Cell:
    """Strict JSON; floats with the digits that matter, so that the page stays small."""
    if isinstance(cell, float):
        return float(f"{cell:.6g}") if math.isfinite(cell) else None
    return cell
