"""The privacy statement of a run: what a data-protection officer needs to judge it, section by section.

The sections follow NIST SP 800-226, "Guidelines for Evaluating Differential Privacy Guarantees" (2025). What the run's
folder cannot answer is a question to the owner of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adp2sgd.errors import ConfigError
from adp2sgd.run_folder import read_result


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with paragraphs of plain text below it, and a table of facts (name, value)."""

    title: str
    text: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Statement:
    """`summary` is one sentence. `warnings` say what weakens the guarantee. `questions` are for the owner of the data:
    the run's folder does not hold the answers. `registry` is an entry for the registry of DP deployments."""

    title: str
    summary: str
    sections: tuple[Section, ...]
    warnings: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    registry: dict[str, Any]


def statement(folder: str | Path) -> Statement:
    """The privacy statement of the finished private run in `folder`. Reads result.json and config.toml alone."""
    run = read_result(folder)
    if run.guarantee is None:
        raise ConfigError(f"{folder} holds a run without a privacy guarantee ({run.guarantee_why}); nothing to state")
    found = run.guarantee
    summary = f"No single {found.unit} can be told apart from its absence beyond ε = {found.epsilon:.3g}."
    return Statement(title="Privacy statement", summary=summary, sections=(), registry={})
