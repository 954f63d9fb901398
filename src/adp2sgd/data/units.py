"""Units of privacy: the person, device or other owner to whom several records belong.

A private run protects whole units where the data name them. Batches are then samples of units, and all rows of a drawn
unit are clipped as one, so that adding or removing a unit with all its records moves the sum by at most the clip norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from adp2sgd.data.batches import PoissonBatches
from adp2sgd.data.records import RecordSet, Units
from adp2sgd.privacy.mechanism import RECORD
from adp2sgd.randomness.streams import Streams

IDENTIFIERS = frozenset(
    f"{who}{what}"
    for who in ("patient", "subject", "person", "user", "participant", "customer", "client", "member", "employee")
    for what in ("", "id", "number", "no", "key", "name")
) | {"mrn", "ssn", "pid", "id", "nhsnumber", "insurancenumber", "email", "speaker", "medicalrecordnumber", "name"}
"""Names of columns that identify people, in lower case and without "_", "-", "." and spaces."""


@dataclass(frozen=True)
class Population:
    """What a learner's batches are samples of: `count` records, or `count` units that are called `unit`."""

    count: int
    unit: str = RECORD


def population(records: RecordSet, *, private: bool, rows: Tensor | None = None) -> Population:
    """Of these records, or of those in `rows`. Only private batches are samples of units."""
    units = records.units if private else None
    if units is None:
        return Population(len(records) if rows is None else len(rows))
    return Population(units.count if rows is None else units.take(rows).count, units.name)


def looks_like_people(names: Iterable[str]) -> str | None:
    """The first of these column names that usually identifies people."""
    return next((name for name in names if "".join(c for c in name.lower() if c not in "_-. ") in IDENTIFIERS), None)


class UnitBatches:
    """A batch of whole units: each drawn unit has `records_per_unit` consecutive rows.

    `drawn` samples units. The rows of a unit are a circular run of its records in an order that is drawn once, from a
    place that is drawn anew at each step. A unit of more records takes part with `records_per_unit` of them. A unit of
    fewer records takes part with all of them, and some or all occur more than once. In the mean over the draws every
    record of a unit has the same weight.
    The work of a draw depends on the number of drawn units and not on how many records they have.
    """

    def __init__(self, units: Units, records_per_unit: int, drawn: PoissonBatches, streams: Streams) -> None:
        self.expected = drawn.expected
        self.rows = drawn.rows * records_per_unit
        self._each = records_per_unit
        self._drawn = drawn
        self._streams = streams
        self._records = len(units.of)
        shuffled = streams("units", 0).permutation(self._records)
        grouped = shuffled[torch.argsort(units.of[shuffled], stable=True)]
        counts = units.of.unique(return_counts=True)[1]
        # Behind the last unit there is one more: the blank row, which fills up batches of fixed size.
        self._order = torch.cat([grouped, torch.tensor([self._records])])
        self._counts = torch.cat([counts, torch.ones(1, dtype=counts.dtype)])
        self._starts = self._counts.cumsum(0) - self._counts

    def draw(self, step: int) -> Tensor:
        units = self._drawn.draw(step)
        counts = self._counts[units]
        first = self._streams("records", step).below(counts)
        within = (first[:, None] + torch.arange(self._each)) % counts[:, None]
        return self._order[self._starts[units, None] + within].flatten()

    def counted(self, rows: Tensor) -> int | None:
        """How many units, the first ones, are not blank; None where all are."""
        return None if not self._drawn.fixed else int((rows < self._records).sum()) // self._each
