"""The report as one page of HTML that holds everything it shows and sends no request."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from adp2sgd.files import to_json
from adp2sgd.report import words
from adp2sgd.report.colours import THEMES
from adp2sgd.report.figure import Figure
from adp2sgd.report.figures import comparing, labels, of_run
from adp2sgd.report.run_data import RunData

if TYPE_CHECKING:
    from jinja2 import Environment

LIVE_S = 2.0  # between two looks of a live page
LEARNERS_SHOWN = 64  # rows of the table of learners


def page(runs: Sequence[RunData], *, live: bool = False) -> str:
    """The whole page. `live`: it asks the server that sent it for news."""
    scripts = [_asset("page.js"), _plotly()]
    context = _context(runs)
    facts = {"figures": _data(context), "themes": THEMES, "live": live, "live_s": LIVE_S}
    return _environment().get_template("page.html.j2").render(
        **context,
        facts=to_json(facts).replace("<", "\\u003c"),
        style=_asset("page.css"),
        own_script=scripts[0],
        chart_script=scripts[1],
        policy=_policy(scripts, live=live),
        live=live,
    )  # fmt: skip


def update(runs: Sequence[RunData]) -> dict[str, Any]:
    """What a live page needs to bring itself up to date."""
    context = _context(runs)
    content = _environment().get_template("content.html.j2").render(**context)
    return {"content": content, "figures": _data(context), "running": any(run.running for run in runs)}


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """All figures of a report, in the order of the page."""
    return [*comparing(runs), *(figure for index, run in enumerate(runs) for figure in of_run(run, index))]


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ: key and the value of each run."""
    keys = sorted({key for run in runs for key in run.config})
    rows = [(key, [_setting(run.config, key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _context(runs: Sequence[RunData]) -> dict[str, Any]:
    return {
        "runs": runs,
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        "comparing": comparing(runs),
        "own_figures": [of_run(run, index) for index, run in enumerate(runs)],
        "differences": differences(runs) if len(runs) > 1 else [],
        "metric_names": list(dict.fromkeys(name for run in runs for name in run.metrics)),
        "labels": labels,
        "shown": LEARNERS_SHOWN,
        "words": words,
        "setting": _setting,
    }


def _data(context: Mapping[str, Any]) -> list[dict[str, Any]]:
    own = [figure for figures in context["own_figures"] for figure in figures]
    return [figure.to_dict() for figure in (*context["comparing"], *own)]


def _setting(settings: Mapping[str, Any], key: str) -> str:
    value = settings.get(key, "–")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _policy(scripts: Sequence[str], *, live: bool) -> str:
    """What the browser lets the page do: run these two scripts, and connect to nobody (`live`: to its own server)."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; form-action 'none'; base-uri 'none'"
    )


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("adp2sgd.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _asset(name: str) -> str:
    return (files("adp2sgd.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """plotly.js from the installed package."""
    import plotly

    return (files(plotly) / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
