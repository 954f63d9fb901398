"""Figures in words: what a person reads first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adp2sgd.report.run_data import RunData

SMALL = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NEIGHBOURS = {"add-remove": "its absence", "replace-one": "any other {unit}"}


def number(value: float | int | None, digits: int = 4) -> str:
    """A figure for a table; – where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}g}"


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f} %"


def is_fraction(metric: str) -> bool:
    return "accuracy" in metric


def metric(name: str, value: float | None) -> str:
    return percent(value) if is_fraction(name) else number(value)


def readable(name: str) -> str:
    return name.replace("_", " ")


def duration(seconds: float) -> str:
    """Three parts at most: "65 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def counted(count: int, noun: str) -> str:
    """ "one learner", "four sites", "16 learners"."""
    return f"{SMALL[count] if count < len(SMALL) else f'{count:,}'} {noun}{'' if count == 1 else 's'}"


def best_metric(run: RunData) -> str | None:
    """The metric that a summary names: the one that decides, else the first that is not the loss, else the loss."""
    if run.monitor in run.metrics:
        return run.monitor
    names = sorted(run.metrics, key=lambda name: name == "loss")
    return names[0] if names else None


def summary(run: RunData) -> str:
    """What the run did and what its privacy is worth, in two sentences of plain words."""
    return f"{_training(run)} {_privacy(run)}"


def _training(run: RunData) -> str:
    sites = [each.site for each in run.learners if each.site is not None]
    who = counted(len(run.learners), "site" if sites else "learner")
    who = who[0].upper() + who[1:]
    name = best_metric(run)
    quality = "" if name is None else f" to {_article(name)} {readable(name)} of {metric(name, run.metrics[name])}"
    quality += " on held-out records" if quality else ""
    clock = f"{duration(run.seconds)} of virtual time" if run.clock == "virtual" else duration(run.seconds)
    took = f"{number(run.epoch, 3)} epochs ({number(run.global_steps)} steps, {clock})"
    model = f"a model ({run.task})"
    if run.finished:
        return f"{who} trained {model}{quality} in {took}."
    if run.running:
        verb = "is" if len(run.learners) == 1 else "are"
        return f"{who} {verb} training {model}{', now' + quality if quality else ''}, after {took}."
    return f"{who} trained {model}{quality} for {took}; the run stopped before its end."


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _privacy(run: RunData) -> str:
    found = run.guarantee
    if run.statement is not None:
        return run.statement.summary
    if found is None and not run.finished and run.private:
        return "The privacy guarantee is stated when the run ends."
    if found is None:
        why = run.guarantee_why or "the run does not train in private mode"
        return f"It gives no privacy guarantee: {why}."
    unit = str(found.get("unit", "record"))
    other = NEIGHBOURS.get(str(found.get("adjacency")), "its absence").format(unit=unit)
    claim = (
        f"No single {unit} can be told apart from {other} beyond ε = {found['epsilon']:.3g}, δ = {found['delta']:g}, "
        "by anyone who sees every model that is sent"
    )
    if found.get("valid_if"):
        claim += f", if {found['valid_if']}"
    if run.seeded:
        claim += ". The run was seeded: this ε describes the method, not this run, because the seed reveals the noise"
    return f"{claim}."


def guarantee_rows(found: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """The guarantee, field by field."""
    names = {
        "epsilon": "ε, at most", "epsilon_spent": "ε, spent", "epsilon_others": "of it by other runs", "delta": "δ",
        "unit": "unit of privacy", "adjacency": "neighbouring relation", "accountant": "accountant",
        "composition": "composition", "sampler": "sampling", "steps": "steps", "max_steps": "steps, at most",
        "threat_model": "protected against", "valid_if": "valid if", "note": "note",
    }  # fmt: skip
    rows = [(names[key], found[key]) for key in names if found.get(key) not in (None, "", 0.0)]
    return [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in rows]
