"""A model card: what a model is for, what it learned from, how good it is, and what its training promises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adp2sgd.model_folder import SPEC
from adp2sgd.run_folder import Folder, Run, read_result

WITHOUT = "Not published: they are of held-out records, which ε does not cover (`adp2sgd export --with-metrics`)."


def card(folder: str | Path, file: str, *, with_metrics: bool = False) -> str:
    """The card of the finished run in `folder`, in Markdown; `file` is the model's file beside it.

    Metrics of a private run are of held-out records, which ε does not cover: they are in the card on request only.
    """
    run, settings = read_result(folder), Folder.open(folder).settings
    facts = json.loads((Path(folder) / SPEC).read_text(encoding="utf-8"))
    told = [
        f"# Model card: {run.task}",
        f"`{file}` is the average model of {len(run.learners)} learners after {run.epochs:.4g} epochs of "
        f"{'asynchronous' if run.algorithm == 'adpsgd' else 'synchronous'} decentralized training.",
        "## Task",
        _task(facts),
        "## Data",
        f"Training records were divided among {len(run.learners)} learners (`{settings.data.partition}`). "
        "They are not part of this model's files.",
        "## Metrics",
        _metrics(run) if with_metrics or settings.privacy.mode != "private" else WITHOUT,
        "## Privacy",
        *privacy(run),
        "## Versions",
        ", ".join(f"{name} {version}" for name, version in run.versions.items()),
    ]
    return "\n\n".join(told) + "\n"


def privacy(run: Run) -> tuple[str, ...]:
    """The guarantee in words. A privacy statement may say more here."""
    if run.guarantee is None:
        return (f"**No privacy guarantee**: {run.guarantee_why}.",)
    return (f"{run.guarantee}.", "ε does not cover held-out records.")


def _task(facts: Mapping[str, Any]) -> str:
    parts = [f"{part['dtype']} {part['shape']}" for part in facts["inputs"]["parts"]]
    made = f"the built-in model `{facts['model']['name']}`" if facts.get("model") else "a model of the user's own"
    lines = [f"- model: {made}", f"- inputs, per record: {', '.join(parts)}", f"- loss: {facts['loss'] or 'own'}"]
    encoder = facts["encoder"]
    if encoder is not None and encoder["kind"] == "table":
        lines.append(f"- columns: {', '.join(each['column'] for each in encoder['features'])}")
        lines.append(f"- label: {encoder['target']['column']}")
    elif encoder is not None:
        lines.append(f"- classes: {', '.join(encoder['classes'])}")
    return "\n".join(lines)


def _metrics(run: Run) -> str:
    rows = ["| metric | all held-out records |", "|---|---|"]
    rows += [f"| {name} | {'none' if value is None else f'{value:.4f}'} |" for name, value in run.metrics.items()]
    for site, figures in run.sites.items():
        told = ", ".join(f"{name} {v:.4f}" for name, v in figures.items() if isinstance(v, float))
        rows.append(f"| at {site} | {told} |")
    return "\n".join(rows)
