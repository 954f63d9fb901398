"""The report as Markdown: the summary, tables and notes, for issues, papers and terminals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from adp2sgd.report import words
from adp2sgd.report.figures import labels
from adp2sgd.report.page import LEARNERS_SHOWN, differences
from adp2sgd.report.run_data import RunData


def markdown(runs: Sequence[RunData]) -> str:
    parts = [f"# {runs[0].name if len(runs) == 1 else f'{len(runs)} runs compared'}"]
    parts += [f"**{run.name}:** {words.summary(run)}" if len(runs) > 1 else words.summary(run) for run in runs]
    parts.append(_runs(runs))
    if len(runs) > 1 and (rows := differences(runs)):
        names = [run.name for run in runs]
        parts += ["## Settings in which the runs differ", _table(["setting", *names], ([k, *v] for k, v in rows))]
    parts += [part for run in runs for part in _run(run)]
    return "\n\n".join(parts) + "\n"


def _runs(runs: Sequence[RunData]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    head = ["run", "algorithm", "state", *map(words.readable, names), "epochs", "steps", "time", "consensus", "ε"]
    rows = (
        [
            run.name, run.algorithm, run.state, *(words.metric(name, run.metrics.get(name)) for name in names),
            words.number(run.epoch, 3), words.number(run.global_steps), f"{words.duration(run.seconds)} {run.clock}",
            words.number(run.consensus, 3),
            "none" if run.guarantee is None else words.number(run.guarantee["epsilon"], 3),
        ]
        for run in runs
    )  # fmt: skip
    return _table(head, rows)


def _run(run: RunData) -> list[str]:
    head = ["learner", "state", "steps", "share", "staleness mean / max", "exchanges", "ε spent"]
    rows = (
        [
            name, each.state, words.number(each.steps), words.percent(each.share),
            f"{words.number(each.staleness_mean, 3)} / {words.number(each.staleness_max)}",
            words.number(each.exchanges),
            f"{words.number(each.epsilon_spent, 3)} of {words.number(each.epsilon, 3)}" if each.epsilon else "–",
        ]
        for name, each in zip(labels(run)[:LEARNERS_SHOWN], run.learners, strict=False)
    )  # fmt: skip
    parts = [f"## {run.name}", _table(head, rows)]
    if run.statement is not None:
        parts.append(re.sub("^#", "###", run.statement.to_markdown().strip(), flags=re.MULTILINE))
    elif run.guarantee is not None:
        parts += ["### Privacy", _table(["", ""], words.guarantee_rows(run.guarantee))]
    if run.notes:
        parts += ["### Warnings and notes", "\n".join(f"- {note}" for note in run.notes)]
    settings = "\n".join(f"{key} = {value}" for key, value in run.config.items())
    versions = "\n".join(f"{key} {value}" for key, value in run.versions.items())
    return [*parts, "### Configuration and versions", f"```\n{settings}\n\n{versions}\n```"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
