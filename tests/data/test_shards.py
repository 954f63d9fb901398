"""Shards are disjoint and cover the data; batches are what the accountant assumes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adp2sgd.config import Data
from adp2sgd.data import shards
from adp2sgd.data.batches import PoissonBatches, ReshuffledBatches
from adp2sgd.data.records import Records
from adp2sgd.errors import ConfigError, DataError
from adp2sgd.randomness.streams import Streams


def records(count: int, classes: int = 5, sites: int = 0) -> Records:
    stream = torch.Generator().manual_seed(count)
    labels = torch.randint(classes, (count,), generator=stream)
    owners = torch.arange(count) % sites if sites else None
    return Records(torch.arange(count).float(), labels, owners, tuple(f"site {i}" for i in range(sites)))


@settings(max_examples=150)
@given(st.data())
def test_every_record_belongs_to_exactly_one_learner(data: st.DataObject) -> None:
    learners = data.draw(st.integers(1, 12))
    data_set = records(data.draw(st.integers(learners, 300)), sites=learners)
    how = data.draw(
        st.one_of(
            st.just(Data()),
            st.just(Data(partition="iid")),
            st.builds(Data, partition=st.just("dirichlet"), alpha=st.floats(0.01, 100)),
            st.just(Data(partition="site")),
            st.lists(st.floats(0.01, 10), min_size=learners, max_size=learners).map(lambda s: Data(sizes=tuple(s))),
        )
    )
    found = shards.split(data_set, how, learners, seed=data.draw(st.integers(0, 99)))
    assert len(found) == learners
    assert all(len(rows) > 0 for rows in found)
    assert torch.equal(torch.cat(found).sort().values, torch.arange(len(data_set)))


def test_unequal_sizes_and_sites_are_as_asked() -> None:
    found = shards.split(records(1000), Data(sizes=(1, 2, 7)), 3, seed=0)
    assert [len(rows) for rows in found] == pytest.approx([100, 200, 700], abs=3)
    assert [len(rows) for rows in shards.split(records(5), Data(sizes=(1000, 1, 1)), 3, seed=0)] == [3, 1, 1]
    data_set = records(90, sites=3)
    for number, rows in enumerate(shards.split(data_set, Data(partition="site"), 3, seed=0)):
        assert set(data_set.sites[rows].tolist()) == {number}


def test_a_small_alpha_gives_each_learner_few_labels() -> None:
    def labels_per_learner(alpha: float) -> float:
        data_set = records(2000, classes=10)
        found = shards.split(data_set, Data(partition="dirichlet", alpha=alpha), 8, seed=1)
        shares = [torch.bincount(data_set.targets[rows], minlength=10) / len(rows) for rows in found]
        return sum(1 / float(share.square().sum()) for share in shares) / 8

    assert labels_per_learner(0.05) < 3.5
    assert labels_per_learner(100.0) > 9


def test_the_same_seed_gives_the_same_shards() -> None:
    first, again, other = (shards.split(records(50), Data(), 4, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("how", "learners", "words"),
    [
        (Data(), 31, "learners = 31"),
        (Data(partition="site"), 4, "site"),
    ],
)
def test_impossible_splits_are_refused(how: Data, learners: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shards.split(records(30), how, learners, seed=0)
    with pytest.raises(ConfigError, match="learners = 4 but the data has 3 sites"):
        shards.split(records(30, sites=3), Data(partition="site"), 4, seed=0)
    with pytest.raises(ConfigError, match=r'3 sites; set learners = 3, or data.partition = "iid"'):
        shards.split(records(30, sites=3), Data(), 4, seed=0)
    with pytest.raises(DataError, match="every record needs both"):
        Records(torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize("seed", [3, None])
def test_poisson_batches_are_independent_draws_of_each_record(seed: int | None) -> None:
    """4,000 batches of rate 0.1 over 50 records. Means, variance of sizes and the correlation of neighbours within
    5 standard errors (false alarms below 1e-4 in all for the unseeded case)."""
    batches = PoissonBatches(50, 5, Streams(seed, 0))
    member = torch.zeros(4000, 50)
    for step in range(4000):
        member[step, batches.draw(step)] = 1
    each = math.sqrt(0.1 * 0.9 / 4000)
    assert float((member.mean(0) - 0.1).abs().max()) < 5 * each
    sizes = member.sum(1)
    assert float(sizes.var()) == pytest.approx(50 * 0.1 * 0.9, rel=5 * math.sqrt(2 / 4000))
    assert float(sizes.min()) == 0  # empty batches happen: chance 0.5 % each
    together = float((member[:, :-1] * member[:, 1:]).mean())
    assert together == pytest.approx(0.01, abs=5 * 0.1 / math.sqrt(4000 * 49))
    assert batches.expected == 5


def test_seeded_batches_are_a_function_of_the_step() -> None:
    batches, again = (PoissonBatches(50, 5, Streams(3, 1)) for _ in range(2))
    batches.draw(0)
    assert torch.equal(batches.draw(7), again.draw(7))
    assert not torch.equal(batches.draw(7), batches.draw(8))


def test_reshuffled_batches_visit_every_record_once_in_an_epoch() -> None:
    batches = ReshuffledBatches(23, 5, Streams(0, 0))
    for epoch in range(3):
        rows = torch.cat([batches.draw(4 * epoch + i) for i in range(4)])
        assert len(rows) == len(set(rows.tolist())) == 20
    assert not torch.equal(batches.draw(0), batches.draw(4))
    assert ReshuffledBatches(3, 5, Streams(0, 0)).expected == 3


def test_a_site_whose_records_are_all_held_out_is_named() -> None:
    records = Records(torch.zeros(4, 1), torch.zeros(4), torch.tensor([0, 0, 2, 2]), ("north", "south", "west"))
    with pytest.raises(ConfigError, match='all records of site "south" are held out'):
        shards.split(records, Data(partition="site"), 3, seed=0)
    with pytest.raises(ConfigError, match="set learners = 2"):
        shards.split(records, Data(partition="site"), 4, seed=0)
    assert len(shards.split(records, Data(partition="site"), 2, seed=0)) == 2
