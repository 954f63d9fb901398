"""`run.plot()`: the report's figures in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adp2sgd.report.colours import THEMES, painted
from adp2sgd.report.page import figures
from adp2sgd.report.read import of_run
from adp2sgd.run_folder import Run

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

OFFLINE = {"showSendToCloud": False, "plotlyServerURL": ""}  # else a button uploads the figure to plotly's maker


class Plots(Mapping[str, "Figure"]):
    """Title → plotly figure. A notebook shows all of them; `plots["Steps per learner"]` is one."""

    def __init__(self, run: Run, theme: str) -> None:
        from plotly.graph_objects import Figure

        self._figures: dict[str, Any] = {}
        for each in figures([of_run(run)]):
            raw = painted(each.to_dict(), THEMES[theme])
            if raw["data"]:
                margin = {"l": 8, "r": 12, "t": 64, "b": 8}
                shape = {**raw["layout"], "title": {"text": each.title}, "margin": margin}
                self._figures[each.title] = Figure(data=raw["data"], layout=shape)

    def __getitem__(self, title: str) -> Figure:
        return self._figures[title]

    def __iter__(self) -> Any:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)

    def __repr__(self) -> str:
        return f"Plots({', '.join(self._figures)})"

    def _ipython_display_(self) -> None:
        for figure in self._figures.values():
            figure.show(config=OFFLINE)


def plot(run: Run, theme: str = "light") -> Plots:
    """All figures of a run; `theme` is "light" or "dark"."""
    return Plots(run, theme)
