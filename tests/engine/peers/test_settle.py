"""When a site may leave at the end of a run."""

from __future__ import annotations

import time

import pytest
import torch

from adp2sgd.engine.peers import settle
from adp2sgd.engine.peers.settle import Settling

HERE = torch.tensor([3.0, 4.0])  # norm 5


@pytest.fixture
def settling(monkeypatch: pytest.MonkeyPatch) -> Settling:
    monkeypatch.setattr(settle, "QUIET_S", 0.05)
    made = Settling(0.01)
    made.begin()
    return made


def test_a_site_settles_when_every_neighbour_is_near_and_nobody_asks(settling: Settling) -> None:
    assert settling.open([1, 2]) == [1, 2]
    settling.note(1, HERE, HERE + torch.tensor([0.06, 0.08]))  # 0.1 / 5
    assert settling.open([1, 2]) == [1, 2]
    settling.note(1, HERE, HERE + torch.tensor([0.003, 0.004]))
    assert settling.open([1, 2]) == [2]
    settling.note(2, HERE, HERE)
    assert settling.open([1, 2]) == []
    assert not settling.over([1, 2], 60.0), "somebody has just asked"
    time.sleep(0.06)
    assert settling.over([1, 2], 60.0)
    assert not settling.over([1, 2], 60.0, waits=True)
    assert settling.distance == pytest.approx(0.001, rel=0.01)
    assert settling.consensus == pytest.approx(0.005**2 / 8, rel=0.01)  # ((0.005/2)² + 0) / 2


def test_a_far_neighbour_makes_all_others_unknown_again(settling: Settling) -> None:
    settling.note(1, HERE, HERE)
    settling.note(2, HERE, 2 * HERE)
    assert settling.open([1, 2]) == [1, 2]


def test_a_site_leaves_at_the_limit_as_it_is(settling: Settling) -> None:
    settling.note(1, HERE, 2 * HERE)
    assert not settling.over([1], 60.0)
    assert settling.over([1], 0.0)
    assert settling.distance == pytest.approx(1.0)
    assert Settling(0.01).distance is None


def test_nothing_is_measured_while_training_goes_on() -> None:
    made = Settling(0.01)
    made.note(1, HERE, 2 * HERE)
    assert made.distances == {}
