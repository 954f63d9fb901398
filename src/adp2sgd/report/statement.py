"""The privacy statement of a run: what a data-protection officer needs to judge it, section by section.

The sections follow NIST SP 800-226, "Guidelines for Evaluating Differential Privacy Guarantees" (March 2025). What the
run's folder cannot answer is a question to the owner of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adp2sgd.errors import ConfigError
from adp2sgd.files import replacing, to_json
from adp2sgd.report.privacy_facts import PrivacyFacts, gather
from adp2sgd.report.privacy_sections import SECTIONS, Section, units
from adp2sgd.report.registry import registry_entry

LARGE_DELTA, LARGE_EPSILON = 1e-5, 10.0
OF_PEOPLE = "seems to tell whose a record is"  # in the note of a run whose records may belong to people

__all__ = ["Section", "Statement", "statement", "write_statement"]


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_markdown(self) -> str:
        """A page of its own."""
        parts = [f"# {self.title}", self.summary]
        parts += _listed("What weakens it", self.warnings)
        for section in self.sections:
            parts += [f"## {section.title}", *section.text]
            if section.facts:
                rows = [f"| {name} | {value} |" for name, value in section.facts]
                parts.append("\n".join(["| what | value |", "|---|---|", *rows]))
        return "\n\n".join([*parts, *_listed("Questions to the owner of the data", self.questions)]) + "\n"


def _listed(title: str, lines: tuple[str, ...]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []


def statement(folder: str | Path) -> Statement:
    """The privacy statement of the finished private run in `folder`. Looks at no record."""
    known = gather(folder)
    return Statement(
        title=f"Privacy statement of {known.name}",
        summary=_summary(known),
        sections=tuple(make(known) for make in SECTIONS),
        warnings=tuple(_warnings(known)),
        questions=tuple(_questions(known)),
        registry=registry_entry(known),
    )


def write_statement(folder: str | Path, kind: str = "markdown", out: Path | None = None) -> str:
    """The statement as text, in the file `out` too if given. `kind`: markdown, json, or registry for the draft of a
    registry entry alone, as JSON."""
    if kind not in FORMATS:
        raise ConfigError(f'--format "{kind}" is unknown; use one of: {", ".join(FORMATS)}')
    text = FORMATS[kind](statement(folder))
    if out is not None:
        try:
            with replacing(out) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {out} ({error.strerror}); choose another -o") from None
    return text


FORMATS: dict[str, Callable[[Statement], str]] = {
    "markdown": Statement.to_markdown,
    "json": lambda made: to_json(made.to_dict(), indent=2),
    "registry": lambda made: to_json(made.registry, indent=2),
}


def _summary(known: PrivacyFacts) -> str:
    own = known.guarantee
    other = "its absence" if own.adjacency == "add-remove" else "another one"
    claim = (
        f"No single {known.unit} can be told apart from {other} beyond ε = {own.epsilon:.3g}, δ = {own.delta:g}, by "
        f"anyone who sees every model that is sent, if {own.valid_if}"
    )
    if own.seeded:
        claim += ". The run was seeded: this ε describes the method, not this run, because the seed reveals the noise"
    return f"{claim}."


def _warnings(known: PrivacyFacts) -> list[str]:
    own, found = known.guarantee, []
    if own.seeded:
        found.append("The run was seeded. Whoever knows the seed knows the noise: this run protects nobody.")
    if own.epsilon >= LARGE_EPSILON:
        found.append(f"ε = {own.epsilon:.3g} is 10 or more: in the worst case it protects hardly anything.")
    if own.delta > LARGE_DELTA:
        found.append(f"δ = {own.delta:g} is above 1e-5.")
    size = known.population
    if size is not None and own.delta > size**-2:
        whose = f"the largest learner's {size:,} {units(known)}"
        found.append(f"δ = {own.delta:g} is above 1/n² = {size**-2:.1g} for {whose}.")
    if known.per_record and (asked := [note for note in known.run.notes if OF_PEOPLE in note]):
        found.append(f"ε is per record, and people may have several records: {asked[0]}.")
    if own.note:
        found.append(f"The accountant notes: {own.note}.")
    return found


def _questions(known: PrivacyFacts) -> list[str]:
    found = ["Who decided on ε and δ, and why are they acceptable for these data?"]
    if known.per_record:
        found.append("Does every person have one record at most? If not, how many has the person with the most?")
    found += [
        f"Does any {known.unit} lie at two learners or sites? Its ε is the sum of theirs.",
        "Were clip norm, model, learning rate or number of epochs chosen by trials on these data? Were the trials "
        "private runs on the same ledger?",
        "Which other statistics, models or tables were released from these data, and with which ε?",
        "Who can read the raw data, the run's folder and the ledger, and how are they protected?",
        "Who are the held-out records of, and do they agree that figures about them are published?",
        "How good must the model be for its purpose, and for which groups of people was that checked?",
    ]
    if known.settings.privacy.ledger is None:
        found.append("Have these data been used in other private runs? This run's ledger counts its own steps alone.")
    return found
