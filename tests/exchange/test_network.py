"""Exchanges between sites over real TLS: cut, slow, silent and rounded links, and models that are refused."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from adp2sgd.exchange import link as link_module
from adp2sgd.exchange import neighbours
from adp2sgd.exchange.deadlines import FLOOR_S, Pace
from adp2sgd.exchange.duplex import DuplexExchange
from adp2sgd.exchange.handshake import DuplicateError, Met, Peer
from certificates import site
from conftest import make_learner
from proxy import Proxy
from sites import Site, close_all, dials, wait_linked
from worlds import NetworkWorld, wait_for

Make = Callable[..., Site]


@pytest.fixture
def make() -> Iterator[Make]:
    """Sites that are closed after the test."""
    made: list[Site] = []

    def one(*arguments: object, **options: object) -> Site:
        made.append(Site(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield one
    close_all(made)
    assert threading.active_count() == 1 or not [each for each in threading.enumerate() if each.name == "link"]


def test_exchange_threads_conserve_the_sum_and_reach_consensus(make: Make) -> None:
    """Three sites, links of their own, two exchanges at once, models of several parts, and updates meanwhile."""
    sites = [make(k, dimension=400_000) for k in range(3)]
    for each in sites:
        each.know(*((other.number, other.address) for other in sites if other is not each))
    wait_linked(*sites)
    learners = [each.learner for each in sites]
    before = sum(learner.state.clone() for learner in learners)
    spread = float(torch.stack([learner.state for learner in learners]).var(dim=0).mean())
    draw = random.Random(0)
    for _ in range(30):
        asker = draw.choice(sites)
        asker.thread.want(draw.choice([k for k in range(3) if k != asker.number]))
        time.sleep(0.02)
        for learner in learners:
            with learner.vector.mutex:
                learner.state.add_(0.01)
    wait_for(lambda: not any(each.exchange.under_way for each in sites))
    completed = sum(each.tally.completed for each in sites)
    assert completed >= 8
    assert completed % 2 == 0
    assert not any(each.tally.halves or each.tally.unconfirmed for each in sites)
    total = sum(learner.state for learner in learners)
    assert torch.allclose(total, before + 0.01 * 3 * 30, rtol=0, atol=1e-8)
    assert float(torch.stack([learner.state for learner in learners]).var(dim=0).mean()) < 0.2 * spread


def test_a_snapshot_that_arrives_after_everything_else_completes_the_exchange_once() -> None:
    """Small messages overtake the parts of a snapshot: Ready may come first."""
    world = NetworkWorld()
    try:
        total = world.total()
        world.exchanges[0].ask(1)
        world.step(1)
        accept, answer = world.arrived(0)
        world.exchanges[0].receive(accept)
        world.step(1)
        [ready] = world.arrived(0)
        world.exchanges[0].receive(ready)
        assert world.exchanges[0].tally.completed == 0
        world.exchanges[0].receive(answer)
        world.step(1)
        assert [exchange.tally.completed for exchange in world.exchanges] == [1, 1, 0]
        assert torch.allclose(world.total(), total, rtol=0, atol=1e-14)
        assert world.network[0]._vectors.room == world.network[1]._vectors.room == 4  # nor lent twice
    finally:
        world.close()


def test_in_bfloat16_both_sides_mix_the_same_two_snapshots_to_the_bit(make: Make) -> None:
    sites = [make(k, dimension=100_001, dtype=torch.bfloat16) for k in range(2)]
    mixed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for each in sites:
        mix = each.learner.mix

        def noted(mine, theirs, intact=None, k=each.number, mix=mix):  # type: ignore[no-untyped-def]
            mixed[k] = (mine.clone(), theirs.clone())
            return mix(mine, theirs, intact)

        each.learner.mix = noted  # type: ignore[method-assign]
    dials(sites[0], sites[1])
    wait_linked(*sites)
    states = [each.learner.state.clone() for each in sites]
    sites[0].thread.want(1)
    wait_for(lambda: all(each.tally.completed for each in sites))
    assert torch.equal(mixed[0][0], mixed[1][1])
    assert torch.equal(mixed[0][1], mixed[1][0])
    assert torch.equal(mixed[0][0], states[0].bfloat16().double())
    size = sites[0].carrier.neighbours.links[1].bytes_out
    assert 2 * 100_001 < size < 2 * 100_001 + 5_000  # two bytes a number went over the wire


@pytest.mark.parametrize("after", [300, 3_000_000, 9_000_000])
def test_a_link_cut_within_an_exchange_changes_nothing_or_is_counted_and_comes_back(make: Make, after: int) -> None:
    """16 MB flow each way; the cut falls before the first number and within the snapshots."""
    near, far = make(0, dimension=2_000_000), make(1, dimension=2_000_000)
    proxy = Proxy(far.address)
    try:
        dials(near, far, proxy.address)
        wait_linked(near, far)
        states = [each.learner.state.clone() for each in (near, far)]
        proxy.cut_after(after)
        near.thread.want(1)
        wait_for(lambda: proxy.cuts > 0 and not near.exchange.under_way and not far.exchange.under_way)
        assert near.tally.completed == far.tally.completed == near.tally.halves == far.tally.unconfirmed == 0
        assert near.tally.expired == 1
        for each, state in zip((near, far), states, strict=True):
            assert torch.equal(each.learner.state, state)
        wait_for(lambda: near.carrier.room == far.carrier.room == 4)  # no memory is lost
        proxy.mend()
        wait_linked(near, far)
        near.thread.want(1)
        wait_for(lambda: far.tally.completed == 1)
        assert near.reasons("down")
        assert far.reasons("down")
    finally:
        proxy.close()


def test_a_commit_that_is_lost_is_counted_as_half_an_exchange(make: Make) -> None:
    near, far = make(0), make(1)
    proxy = Proxy(far.address)
    try:
        dials(near, far, proxy.address)
        wait_linked(near, far)
        send = near.carrier.send

        def losing(message):  # type: ignore[no-untyped-def]
            if type(message).__name__ == "Commit":
                proxy.swallow()
            return send(message)

        near.carrier.send = losing  # type: ignore[method-assign]
        near.thread.want(1)
        wait_for(lambda: near.tally.completed == 1 and proxy.swallowed > 0)
        assert far.exchange.under_way
        proxy.cut()
        wait_for(lambda: far.tally.unconfirmed == 1)
        assert far.tally.completed == 0
    finally:
        proxy.close()


def test_a_slow_link_slows_itself_only(make: Make) -> None:
    """An exchange of 1.6 MB each way at 0.4 MB/s goes on while others complete over a fast link."""
    sites = [make(k, dimension=200_000) for k in range(3)]
    proxy = Proxy(sites[1].address, bytes_per_s=4e5)
    try:
        sites[0].know((1, proxy.address), (2, sites[2].address))
        for each in sites[1:]:
            each.know((0, None))
        wait_for(lambda: sites[0].linked == {1, 2})
        sites[0].thread.want(1)
        wait_for(lambda: proxy.passed > 100_000)
        took = []
        while sites[1].tally.completed == 0 and len(took) < 10:
            done, began = sites[2].tally.completed, time.monotonic()
            sites[0].thread.want(2)
            wait_for(lambda done=done: sites[2].tally.completed > done)  # type: ignore[misc]
            took.append(time.monotonic() - began)
        assert len(took) == 10
        assert 1 in sites[0].exchange.under_way
        wait_for(lambda: sites[1].tally.completed == 1)
        assert sites[0].tally.completed == 11
        assert sites[0].tally.expired == 0
    finally:
        proxy.close()


def test_of_two_exchanges_at_once_slow_links_hold_one() -> None:
    class Paced:
        room = 4

        def slow(self, partner: int) -> bool:
            return partner >= 10

    exchange: Any = DuplexExchange(make_learner(0), cast(Any, Paced()))
    assert exchange._admits(10)
    exchange.under_way[11] = None
    assert not exchange._admits(10)
    assert exchange._admits(1)
    exchange.under_way[1] = None
    assert not exchange._admits(2)


@pytest.mark.parametrize("wrong", ["nan", "shape"])
def test_a_model_that_is_not_acceptable_is_refused_and_both_say_why(make: Make, wrong: str) -> None:
    near = make(0, dimension=1000 if wrong == "nan" else 999)
    far = make(1, dimension=1000)
    if wrong == "nan":
        near.learner.state[7] = math.nan
    dials(near, far)
    wait_linked(near, far)
    state = far.learner.state.clone()
    near.thread.want(1)
    wait_for(lambda: near.reasons("model refused") and far.reasons("model refused"))
    wait_for(lambda: not near.exchange.under_way and not far.exchange.under_way)
    assert near.tally.completed == far.tally.completed == 0
    assert torch.equal(far.learner.state, state)
    assert any({"nan": "NaN", "shape": "1000"}[wrong] in reason for reason in far.reasons("model refused"))
    told = near.reasons("model refused") + far.reasons("model refused")
    assert any("refuses this site's model" in reason for reason in told)
    wait_for(lambda: near.carrier.room == far.carrier.room == 4)  # no memory is lost
    assert near.linked == {1}  # the link stands; a healthy model would pass


def test_a_connection_that_dies_silently_is_noticed_and_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BEAT_S", 0.1)
    monkeypatch.setattr(link_module, "DEAD_S", 0.5)
    near, far = make(0), make(1)
    proxy = Proxy(far.address)
    try:
        dials(near, far, proxy.address)
        wait_linked(near, far)
        time.sleep(1.0)
        assert not near.reasons("down")  # beats keep an idle link
        proxy.swallow()
        wait_for(lambda: bool(near.reasons("down") and far.reasons("down")))
        assert proxy.swallowed
        told = [*near.reasons("down"), *far.reasons("down")]  # who notices first closes, and the other sees that
        assert any("nothing came" in reason for reason in told)
        proxy.mend()
        wait_linked(near, far)
    finally:
        proxy.close()


def test_a_peer_that_stops_reading_fills_its_own_queue_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be sent is refused at once, the other link works, and the stuck one is given up."""
    monkeypatch.setattr(link_module, "STALL_S", 1.0)
    monkeypatch.setattr(link_module, "BEAT_S", 0.2)
    sites = [make(k, dimension=100_000) for k in range(3)]
    sites[0].know((1, None), (2, None))
    for each in sites[1:]:
        each.know((0, sites[0].address))
    wait_for(lambda: sites[0].linked == {1, 2})
    stuck = sites[1].carrier.neighbours.links[0].reader
    monkeypatch.setattr(stuck, "read", lambda: False)
    text = {"text": "x" * 100_000}
    taken = 0
    while sites[0].carrier.control_to(1, "note", text):
        taken += 1
    assert link_module.QUEUE <= taken < 10 * link_module.QUEUE  # the queue, and what the kernel buffers
    sites[2].thread.want(0)
    wait_for(lambda: sites[2].tally.completed == 1)
    wait_for(lambda: any("read nothing" in reason for reason in sites[0].reasons("down")))


@pytest.mark.parametrize("attempt", range(3))
def test_sites_that_dial_each_other_at_once_keep_one_link(
    make: Make, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    monkeypatch.setattr(neighbours, "COURTESY_S", 0.0)
    near, far = make(0), make(1)
    near.know((1, far.address))
    far.know((0, near.address))
    wait_linked(near, far)
    time.sleep(0.3)
    wait_linked(near, far)
    here, there = near.carrier.neighbours.links[1], far.carrier.neighbours.links[0]
    assert here.met.dialled != there.met.dialled
    assert here._stream.socket.getsockname() == there._stream.socket.getpeername()
    near.thread.want(1)
    wait_for(lambda: far.tally.completed == 1)


@pytest.mark.parametrize("lower", [True, False])
def test_of_two_connections_both_sites_keep_the_one_that_the_lower_number_dialled(make: Make, lower: bool) -> None:
    me, other = (0, 1) if lower else (1, 0)
    here, peer = make(me).carrier.neighbours, Peer(other, site(other))

    def admitted(standing: Met, new: Met) -> bool:
        here.links[other] = cast(Any, SimpleNamespace(met=standing, close=lambda _: None))
        try:
            here._admit(new)
        except DuplicateError:
            return False
        finally:
            here.links.clear()
        return True

    dialled, accepted = (Met(peer, b"", "same", by_me) for by_me in (True, False))
    assert admitted(standing=accepted, new=dialled) == lower
    assert admitted(standing=dialled, new=accepted) != lower
    assert admitted(standing=dialled, new=dialled)  # the peer has lost the old one
    restarted = Met(peer, b"", "another", not lower)
    assert admitted(standing=Met(peer, b"", "same", lower), new=restarted)


@pytest.mark.parametrize("restarted", [0, 1])
def test_a_site_that_restarted_replaces_its_old_connection_at_once(make: Make, restarted: int) -> None:
    """The old connection, dialled by site 0, is open and silent, as after a power failure. Nobody waits until it is
    found dead, whichever of the two restarts and dials."""
    sites = [make(0), make(1)]
    proxy = Proxy(sites[1].address)
    try:
        dials(sites[0], sites[1], proxy.address)
        wait_linked(*sites)
        proxy.swallow()
        other, after = sites[1 - restarted], make(restarted)
        after.know((other.number, other.address))
        wait_for(lambda: after.linked == {other.number}, link_module.DEAD_S / 3)
        after.thread.want(other.number)
        wait_for(lambda: other.tally.completed == 1)
    finally:
        proxy.close()


def test_an_exchange_that_is_given_up_stops_sending(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 MB are to flow each way at 3 MB/s; both sides stop long before, and the link is of use again."""
    near, far = make(0, dimension=6_000_000), make(1, dimension=6_000_000)
    proxy = Proxy(far.address, bytes_per_s=3e6)
    try:
        dials(near, far, proxy.address)
        wait_linked(near, far)
        monkeypatch.setattr(near.carrier, "deadline_s", lambda _: 0.5)
        near.thread.want(1)
        wait_for(lambda: near.tally.expired == 1)
        wait_for(lambda: far.tally.expired == 1 and not far.exchange.under_way)
        links = [near.carrier.neighbours.links[1], far.carrier.neighbours.links[0]]
        wait_for(lambda: all(each.idle for each in links))
        assert max(each.bytes_out for each in links) < 30e6  # of 48 MB; what the kernel had taken is on its way
        assert near.reasons("down") == far.reasons("down") == []
    finally:
        proxy.close()


def test_control_messages_reach_their_handler_and_have_a_limit(make: Make) -> None:
    near, far = make(0), make(1)
    came = []
    far.carrier.on_control("roster", lambda peer, body: came.append((peer, body["number"])))
    dials(near, far)
    wait_linked(near, far)
    assert near.carrier.control_to(1, "unknown to this release", {})
    assert near.carrier.control_to(1, "roster", {"number": 7})
    wait_for(lambda: came == [(0, 7)])
    assert not near.carrier.control_to(2, "roster", {})
    with pytest.raises(Exception, match="exceeds the limit"):
        near.carrier.control_to(1, "roster", {"text": "x" * 300_000})


def test_deadlines_follow_what_a_link_has_shown() -> None:
    now = [0.0]
    pace = Pace(100_000_000, lambda: now[0])

    def exchange(seconds: float, completed: bool = True) -> None:
        pace.begin()
        now[0] += seconds
        pace.end(completed)

    cold = pace.deadline_s
    assert cold == FLOOR_S + 2 * 100_000_000 / 125_000
    for seconds in (20.0, 21.0, 19.0, 20.0, 20.0):
        exchange(seconds)
    assert pace.typical_s == 20.0
    assert 40.0 <= pace.deadline_s < 60.0
    learnt = pace.deadline_s
    exchange(0.1, completed=False)  # busy, or cancelled: says nothing about the link
    assert pace.deadline_s == learnt
    exchange(learnt, completed=False)
    assert pace.deadline_s == 2 * learnt
    exchange(1.5 * learnt)
    assert pace.deadline_s < 2 * learnt
    quick = Pace(1000, lambda: now[0])
    quick.begin()
    now[0] += 0.01
    quick.end(True)
    assert quick.deadline_s == FLOOR_S
