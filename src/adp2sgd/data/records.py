"""Records in memory: what every data source returns and every shard is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from adp2sgd.errors import DataError


@dataclass(frozen=True, eq=False, repr=False)
class Units:
    """`of[i]` is the number of the unit that record i belongs to. `name` says what a unit is, such as "patient_id"."""

    of: Tensor
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.of, Tensor) or self.of.dim() != 1 or self.of.is_floating_point():
            raise DataError("the units of Records are no numbers; give a torch.Tensor of one whole number per record")

    @classmethod
    def named(cls, column: Sequence[str], name: str) -> Units:
        """The units whose names stand in `column`, one for each record."""
        codes = np.unique(np.array(column), return_inverse=True)[1]
        return cls(torch.from_numpy(codes.astype(np.int64)), name)

    @cached_property
    def count(self) -> int:
        """How many units there are."""
        return len(self.of.unique())

    def take(self, rows: Tensor) -> Units:
        return Units(self.of[rows], self.name)

    def divided(self, shards: Iterable[Tensor]) -> tuple[int, int] | None:
        """Two of the `shards` of rows that share a unit; None where every unit lies in one shard."""
        owner: dict[int, int] = {}
        for number, rows in enumerate(shards):
            for unit in self.of[rows].unique().tolist():
                if owner.setdefault(unit, number) != number:
                    return owner[unit], number
        return None


@dataclass(frozen=True, eq=False)
class Records:
    """Row i of `inputs` belongs to row i of `targets`; a row is one record.

    `sites[i]` is the index in `site_names` of the record's owner, where the data has natural owners.
    `units` says to whom each record belongs where one person has several; without them a record is the unit of privacy.
    Inputs stay as stored (uint8 images, say); `Task.prepare` turns a batch of them into what the model reads.
    """

    inputs: Tensor
    targets: Tensor
    sites: Tensor | None = None
    site_names: tuple[str, ...] = ()
    units: Units | None = None

    def __post_init__(self) -> None:
        for name in ("inputs", "targets", "sites"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and (name != "sites" or value is not None):
                raise DataError(f"{name} of Records are a {type(value).__name__}; give a torch.Tensor")
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs)} inputs but {len(self.targets)} targets; every record needs both")
        if self.sites is not None and len(self.sites) != len(self.targets):
            raise DataError(f"{len(self.targets)} records but {len(self.sites)} site labels; every record needs one")
        if self.units is not None and len(self.units.of) != len(self.targets):
            raise DataError(f"{len(self.targets)} records but {len(self.units.of)} units; every record belongs to one")

    def __repr__(self) -> str:
        """Sizes and types, never a value: objects are printed in messages and notebooks."""
        parts = {"inputs": self.inputs, "targets": self.targets, "sites": self.sites}
        told = [f"{name}={part.dtype} {list(part.shape)}" for name, part in parts.items() if part is not None]
        return f"Records({', '.join(told)})"

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Tensor) -> Records:
        """The given rows, in that order."""
        sites = None if self.sites is None else self.sites[rows]
        units = None if self.units is None else self.units.take(rows)
        return replace(self, inputs=self.inputs[rows], targets=self.targets[rows], sites=sites, units=units)

    def with_blank(self) -> Records:
        """These and one row of zeros behind them, which is no record: it fills up batches."""
        inputs, targets = (torch.cat([part, torch.zeros_like(part[:1])]) for part in (self.inputs, self.targets))
        return Records(inputs, targets)

    def to(self, device: torch.device | str) -> Records:
        sites = None if self.sites is None else self.sites.to(device)
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device), sites=sites)
