"""A table's encoder: everything that is needed to turn new rows into a model's inputs, without the training records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adp2sgd.data import features, target
from adp2sgd.data.features import Feature
from adp2sgd.data.tablefile import UNNAMED, Column, Format, Table, Where, as_text, read
from adp2sgd.data.target import Target
from adp2sgd.errors import DataError

Rows = Sequence[Mapping[str, object]] | Mapping[str, Sequence[object]]
"""Rows by column name, or columns by name."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The model reads, for each feature in turn, its value and then an indicator of being missing."""

    features: tuple[Feature, ...]
    target: Target
    written: Format = UNNAMED

    def encode(self, rows: Rows) -> Tensor:
        """float32 [n, width]. Columns that are no features, such as the label, may be there or not."""
        return self.inputs(as_table(rows))

    def inputs(self, table: Table) -> Tensor:
        """As `encode`, of a table that was read from files."""
        for feature in self.features:
            if feature.column not in table.columns:
                raise DataError(f"the rows have no column {feature.column!r}, which the model reads; add it")
        parts = [features.encode(each, table.columns[each.column], table.where, self.written) for each in self.features]
        return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))

    def targets(self, table: Table) -> Tensor:
        """The labels of a table, one per row."""
        return self.target.encode(table.columns[self.target.column], table.where, self.written)

    def decode(self, outputs: Tensor) -> list[Any]:
        """What each row of a model's outputs says: the name of a class, or a number in the label's own unit."""
        return list(self.target.decode(outputs))

    def read(self, path: str | Path) -> Table:
        """A file of new rows, written as the training files were."""
        return read(Path(path), self.written)

    @property
    def width(self) -> int:
        return sum(feature.width + 1 for feature in self.features)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or TOML without nulls."""
        return {
            "kind": "table",
            "features": [features.to_dict(feature) for feature in self.features],
            "target": target.to_dict(self.target),
            "written": {key: value for key, value in asdict(self.written).items() if value is not None},
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Encoder:
        """What `to_dict` gave, also after a way through JSON."""
        return cls(
            features=tuple(features.from_dict(each) for each in raw["features"]),
            target=target.from_dict(raw["target"]),
            written=Format(**raw["written"]),
        )


def as_table(rows: Rows) -> Table:
    """Rows or columns in memory as a table of text."""
    where: Where = lambda row: f"row {row}"  # noqa: E731
    if isinstance(rows, Mapping):
        lengths = {len(values) for values in rows.values()}
        if len(lengths) > 1:
            raise DataError(f"the columns have {' and '.join(map(str, sorted(lengths)))} values; give all as many")
        return Table({name: [as_text(value) for value in values] for name, values in rows.items()}, where)
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, Column] = {name: [as_text(row.get(name)) for row in rows] for name in names}
    return Table(columns, where)
