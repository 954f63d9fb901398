"""`adp2sgd report`: a report of one or several runs in one of its formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adp2sgd.errors import ConfigError
from adp2sgd.files import replacing, to_json
from adp2sgd.report.browser import pdf, png
from adp2sgd.report.markdown import markdown
from adp2sgd.report.page import figures, page
from adp2sgd.report.read import named_apart, read_run
from adp2sgd.report.run_data import RunData
from adp2sgd.report.words import summary

SUFFIXES = {"html": ".html", "markdown": ".md", "json": ".json", "png": ".png", "pdf": ".pdf"}


def write(folders: Sequence[str | Path], out: Path | None = None, kind: str | None = None) -> Path:
    """Write the report of the runs in `folders`. Its owner alone may read it, because it holds what events hold.

    Without `kind` the suffix of `out` decides. Without `out` it lies in the first run's folder.
    """
    kind = kind or _kind_of(out)
    if kind not in SUFFIXES:
        raise ConfigError(f'--format "{kind}" is unknown; use one of: {", ".join(SUFFIXES)}')
    target = out or Path(folders[0]) / f"report{SUFFIXES[kind]}"
    runs = named_apart(map(read_run, folders))
    content = WRITERS[kind](runs)
    try:
        with replacing(target, private=True) as part:
            part.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write to {target}: {error.strerror}; choose another -o") from None
    return target


def as_json(runs: Sequence[RunData]) -> dict[str, Any]:
    """Everything that the page shows, as numbers: each figure with its columns and rows."""
    told = [
        {
            "name": run.name,
            "summary": summary(run),
            "state": run.state,
            "task": run.task,
            "algorithm": run.algorithm,
            "clock": run.clock,
            "seconds": run.seconds,
            "epoch": run.epoch,
            "global_steps": run.global_steps,
            "metrics": run.metrics,
            "consensus": run.consensus,
            "guarantee": run.guarantee,
            "guarantee_why": run.guarantee_why,
            "notes": run.notes,
            "config": run.config,
            "versions": run.versions,
        }
        for run in runs
    ]
    numbers = {each.id: {"title": each.title, "columns": each.columns, "rows": each.rows} for each in figures(runs)}
    return {"runs": told, "figures": numbers}


def _kind_of(out: Path | None) -> str:
    suffix = "" if out is None else out.suffix.lower()
    found = [kind for kind, each in SUFFIXES.items() if each == suffix]
    return found[0] if found else "html"


WRITERS: dict[str, Callable[[Sequence[RunData]], bytes]] = {
    "html": lambda runs: page(runs).encode(),
    "markdown": lambda runs: markdown(runs).encode(),
    "json": lambda runs: (to_json(as_json(runs), indent=1) + "\n").encode(),
    "png": lambda runs: png(page(runs)),
    "pdf": lambda runs: pdf(page(runs)),
}
