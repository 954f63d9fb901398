"""Records in memory: what every data source returns and every shard is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adp2sgd.errors import DataError


@dataclass(frozen=True, eq=False)
class Records:
    """Row i of `inputs` belongs to row i of `targets`; a row is one record, the unit of privacy.

    `sites[i]` is the index in `site_names` of the record's owner, where the data has natural owners.
    Inputs stay as stored (uint8 images, say); `Task.prepare` turns a batch of them into what the model reads.
    """

    inputs: Tensor
    targets: Tensor
    sites: Tensor | None = None
    site_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("inputs", "targets", "sites"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and (name != "sites" or value is not None):
                raise DataError(f"{name} of Records are a {type(value).__name__}; give a torch.Tensor")
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs)} inputs but {len(self.targets)} targets; every record needs both")
        if self.sites is not None and len(self.sites) != len(self.targets):
            raise DataError(f"{len(self.targets)} records but {len(self.sites)} site labels; every record needs one")

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
        return replace(self, inputs=self.inputs[rows], targets=self.targets[rows], sites=sites)

    def with_blank(self) -> Records:
        """These and one row of zeros behind them, which is no record: it fills up batches."""
        inputs, targets = (torch.cat([part, torch.zeros_like(part[:1])]) for part in (self.inputs, self.targets))
        return Records(inputs, targets)

    def to(self, device: torch.device | str) -> Records:
        sites = None if self.sites is None else self.sites.to(device)
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device), sites=sites)
