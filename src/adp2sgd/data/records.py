"""Records: what every data source returns and every shard is made of.

`RecordSet` is the contract. `Records` lie in memory as tensors; `data.indexed.DatasetRecords` are read by index from a
dataset that may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.errors import DataError
from adp2sgd.tree import Inputs


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


class RecordSet(Protocol):
    """Records 0 … len − 1, each with an input and a target.

    `sites[i]` is the index in `site_names` of the owner of record i, where the data has natural owners.
    `units` says to whom each record belongs where one person has several; without them a record is the unit of privacy.
    Inputs stay as stored (uint8 images, say); `Task.prepare` turns a batch of them into what the model reads.
    """

    @property
    def sites(self) -> Tensor | None: ...
    @property
    def site_names(self) -> tuple[str, ...]: ...
    @property
    def units(self) -> Units | None: ...

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> Self:
        """The records `rows`, in that order. Reads nothing that is not in memory."""
        ...

    def read(self, rows: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the records `rows`."""
        ...

    def blank(self) -> tuple[Inputs, Tensor]:
        """Inputs and targets of no record: the structure, the types and the shapes."""
        ...

    def with_blank(self) -> Self:
        """These and one row of zeros behind them, which is no record: it fills up batches."""
        ...

    def labels(self) -> Tensor | None:
        """All targets; None where that would take reading every record."""
        ...


@dataclass(frozen=True, eq=False)
class Records:
    """Records in memory: row i of `inputs` (a tensor, or a dictionary or tuple of tensors) and of `targets`."""

    inputs: Inputs
    targets: Tensor
    sites: Tensor | None = None
    site_names: tuple[str, ...] = ()
    units: Units | None = None

    def __post_init__(self) -> None:
        if not tree.is_tree(self.inputs):
            kind = type(self.inputs).__name__
            raise DataError(f"inputs of Records are a {kind}; give a torch.Tensor, or a dictionary or tuple of them")
        for name in ("targets", "sites"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and (name != "sites" or value is not None):
                raise DataError(f"{name} of Records are a {type(value).__name__}; give a torch.Tensor")
        for part in tree.tensors(self.inputs):
            if len(part) != len(self.targets):
                raise DataError(f"{len(part)} inputs but {len(self.targets)} targets; every record needs both")
        if self.sites is not None and len(self.sites) != len(self.targets):
            raise DataError(f"{len(self.targets)} records but {len(self.sites)} site labels; every record needs one")
        if self.units is not None and len(self.units.of) != len(self.targets):
            raise DataError(f"{len(self.targets)} records but {len(self.units.of)} units; every record belongs to one")

    def __repr__(self) -> str:
        """Sizes and types, never a value: objects are printed in messages and notebooks."""
        parts = {"inputs": self.inputs, "targets": self.targets, "sites": self.sites}
        told = [f"{name}={tree.described(part)}" for name, part in parts.items() if part is not None]
        return f"Records({', '.join(told)})"

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Tensor) -> Records:
        sites = None if self.sites is None else self.sites[rows]
        units = None if self.units is None else self.units.take(rows)
        return replace(self, inputs=tree.take(self.inputs, rows), targets=self.targets[rows], sites=sites, units=units)

    def read(self, rows: Tensor) -> tuple[Inputs, Tensor]:
        return tree.take(self.inputs, rows), self.targets[rows]

    def blank(self) -> tuple[Inputs, Tensor]:
        return tree.each(lambda part: part[:0].clone(), self.inputs), self.targets[:0].clone()

    def with_blank(self) -> Records:
        def longer(part: Tensor) -> Tensor:
            return torch.cat([part, torch.zeros_like(part[:1])])

        return Records(tree.each(longer, self.inputs), longer(self.targets))

    def labels(self) -> Tensor:
        return self.targets

    def to(self, device: torch.device | str) -> Records:
        sites = None if self.sites is None else self.sites.to(device)
        inputs = tree.each(lambda part: part.to(device), self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.to(device), sites=sites)
