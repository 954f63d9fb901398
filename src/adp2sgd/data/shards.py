"""One data set → one shard of rows per learner. Shards are disjoint and cover the data."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adp2sgd import config
from adp2sgd.data.records import RecordSet, Units
from adp2sgd.errors import ConfigError

Rows = NDArray[np.int64]


def split(records: RecordSet, how: config.Data, learners: int, seed: int) -> tuple[Tensor, ...]:
    """The rows of each learner, the same for the same seed; every row belongs to exactly one learner."""
    if len(records) < learners:
        raise ConfigError(f"learners = {learners} exceeds the {len(records)} training records; use fewer learners")
    stream, partition = np.random.default_rng([seed, 0x5AAD]), partition_of(records, how)
    if records.units is not None and partition != "site":
        shards = _whole_units(records.units, how, partition, learners, stream)
    elif partition == "iid":
        shards = _iid(len(records), how.sizes or (1.0,) * learners, stream)
    elif partition == "dirichlet":
        shards = _dirichlet(records, how.alpha, learners, stream)
    else:
        shards = _by_site(records, learners)
    return tuple(torch.from_numpy(np.sort(rows)) for rows in shards)


def partition_of(records: RecordSet, how: config.Data) -> str:
    """The partition that `auto` stands for: records stay with their sites where they have some."""
    if how.partition != "auto":
        return how.partition
    return "iid" if records.sites is None else "site"


def _iid(records: int, sizes: tuple[float, ...], stream: np.random.Generator) -> list[Rows]:
    """A random permutation cut in proportion to `sizes`; every learner gets at least one record."""
    share = np.array(sizes) / sum(sizes)
    counts = 1 + np.floor(share * (records - len(sizes))).astype(np.int64)
    for k in np.argsort(-share, kind="stable")[: records - counts.sum()]:
        counts[k] += 1
    return np.split(stream.permutation(records), np.cumsum(counts)[:-1])


def _whole_units(
    units: Units, how: config.Data, partition: str, learners: int, stream: np.random.Generator
) -> list[Rows]:
    """As `_iid`, of units: all records of a unit go to one learner."""
    if partition != "iid":
        raise ConfigError(
            f'data.partition = "{partition}" would divide the records of a {units.name}; use "iid" or "site"'
        )
    if units.count < learners:
        raise ConfigError(f"learners = {learners} exceeds the {units.count} units ({units.name}); use fewer learners")
    numbers, place = np.unique(units.of.numpy(), return_inverse=True)
    chosen = _iid(len(numbers), how.sizes or (1.0,) * learners, stream)
    return [np.flatnonzero(np.isin(place, own)) for own in chosen]


def _dirichlet(records: RecordSet, alpha: float, learners: int, stream: np.random.Generator) -> list[Rows]:
    """Each label's records divided in Dirichlet(alpha) proportions; a learner left empty gets one from the largest."""
    found = records.labels()
    if found is None:
        raise ConfigError(
            'data.partition = "dirichlet" needs all labels at once; give the dataset an attribute targets, or use "iid"'
        )
    labels = found.numpy()
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError('data.partition = "dirichlet" needs one whole-number label per record; use "iid"')
    shards: list[list[int]] = [[] for _ in range(learners)]
    for label in np.unique(labels):
        rows = stream.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(stream.dirichlet([alpha] * learners))[:-1] * len(rows)
        for shard, piece in zip(shards, np.split(rows, cuts.astype(np.int64)), strict=True):
            shard.extend(piece.tolist())
    for shard in shards:
        if not shard:
            shard.append(max(shards, key=len).pop())
    return [np.array(shard, dtype=np.int64) for shard in shards]


def _by_site(records: RecordSet, learners: int) -> list[Rows]:
    if records.sites is None:
        raise ConfigError('data.partition = "site" needs data with sites, and this task has none; use "iid"')
    sites = records.sites.numpy()
    found = np.unique(sites)
    if len(found) < len(records.site_names) == learners:
        gone = next(name for number, name in enumerate(records.site_names) if number not in found)
        raise ConfigError(f'all records of site "{gone}" are held out, so it has none to train on; change the split')
    if len(found) != learners:
        raise ConfigError(
            f"learners = {learners} but the data has {len(found)} sites; set learners = {len(found)}, or "
            'data.partition = "iid" to deal their records out'
        )
    return [np.flatnonzero(sites == site) for site in found]
