"""Every carrier is held to the same promises, with the same tests."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adp2sgd.exchange.protocol import Answer, Busy, Commit, Message, Model
from adp2sgd.exchange.shared import Post, encode
from socket_carrier import HEAD
from worlds import WORLDS, SharedWorld, SocketWorld, World


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = WORLDS[request.param]()
    yield made
    made.close()


def kinds(messages: list[Message]) -> list[type[Message]]:
    return [type(message) for message in messages]


def test_an_exchange_changes_both_by_opposite_amounts(world: World) -> None:
    total, first, second = world.total(), *(learner.state.clone() for learner in world.learners[:2])
    assert world.exchanges[0].ask(1)
    for k, expected in world.script:
        assert kinds(world.step(k)) == expected
    moved = [world.learners[0].state - first, world.learners[1].state - second]
    assert torch.equal(moved[0], -moved[1]) or torch.allclose(moved[0], -moved[1], rtol=0, atol=1e-15)
    assert torch.allclose(world.total(), total, rtol=0, atol=1e-14)
    assert torch.allclose(world.learners[0].state, (first + second) / 2, rtol=0.01, atol=0.01)  # bfloat16 has 8 bits
    assert [exchange.tally.completed for exchange in world.exchanges] == [1, 1, 0]
    assert world.exchanges[0].tally.bytes_sent == world.exchanges[1].tally.bytes_sent > 0


def test_updates_in_between_are_kept(world: World) -> None:
    total = world.total()
    world.exchanges[0].ask(1)
    for k, _ in world.script:
        world.learners[0].state += 10
        world.learners[1].state -= 3
        world.step(k)
    assert world.exchanges[0].tally.completed == world.exchanges[1].tally.completed == 1
    assert torch.allclose(world.total(), total + len(world.script) * 7, rtol=0, atol=1e-13)


def test_who_is_occupied_answers_busy_and_costs_no_snapshot(world: World) -> None:
    world.exchanges[0].ask(1)
    world.step(1)
    assert not world.exchanges[0].ask(2)  # one exchange at a time
    assert world.exchanges[2].ask(1)
    world.step(1)
    assert kinds(world.step(2)) == [Busy]
    assert world.exchanges[2].tally.busy == 1
    assert not world.exchanges[2].under_way
    assert world.exchanges[2].tally.bytes_sent == 0
    world.settle()
    assert [exchange.tally.completed for exchange in world.exchanges] == [1, 1, 0]


def test_two_that_ask_each_other_at_once_are_both_busy(world: World) -> None:
    world.exchanges[0].ask(1)
    world.exchanges[1].ask(0)
    world.settle()
    assert [exchange.tally.busy for exchange in world.exchanges] == [1, 1, 0]
    assert not any(exchange.under_way for exchange in world.exchanges)


def test_a_copy_is_one_way_and_whole(world: World) -> None:
    world.exchanges[1].lost = True
    before = world.learners[0].state.clone()
    assert world.exchanges[1].catch_up(0)
    assert kinds(world.step(0)) == [type(world.exchanges[1].under_way[0])]
    assert kinds(world.step(1)) == [Model]
    assert torch.equal(world.learners[0].state, before)
    assert torch.allclose(world.learners[1].state, before, rtol=0.01, atol=0.01)
    assert not world.exchanges[1].lost
    assert not world.exchanges[1].under_way


def test_who_is_lost_or_shut_gives_nothing(world: World) -> None:
    world.exchanges[1].lost = True
    world.exchanges[2].shut = True
    for partner in (1, 2):
        assert world.exchanges[0].ask(partner)
        world.settle()
        assert world.exchanges[0].catch_up(partner)
        world.settle()
    assert world.exchanges[0].tally.busy == 4
    assert world.exchanges[0].tally.completed == 0


def test_an_initiator_that_gave_up_ignores_the_late_answer(world: World) -> None:
    total = world.total()
    world.exchanges[0].ask(1)
    world.until_commit()
    world.exchanges[0].expire(1)
    world.step(0)
    assert world.exchanges[0].tally.expired == 1
    assert world.exchanges[0].tally.ignored == 1
    assert torch.equal(world.total(), total)
    world.exchanges[1].expire(0)
    assert world.exchanges[1].tally.unconfirmed == 1
    world.exchanges[0].ask(1)
    world.settle()
    assert world.exchanges[0].tally.completed == 1  # and nothing is stuck


def test_a_responder_that_gave_up_ignores_the_late_commit_and_counts_it(world: World) -> None:
    before = world.learners[1].state.clone()
    world.exchanges[0].ask(1)
    world.until_commit()
    world.exchanges[1].expire(0)
    world.step(0)
    world.step(1)
    assert torch.equal(world.learners[1].state, before)
    assert world.exchanges[1].tally.unconfirmed == 1
    assert world.exchanges[1].tally.ignored == 1
    assert world.exchanges[0].tally.completed == 1  # half an exchange, which the responder's count tells


def test_repeated_and_reordered_messages_do_no_harm(world: World) -> None:
    total, late = world.total(), []
    world.exchanges[0].ask(1)
    for k, _ in world.script:
        for message in world.arrived(k):
            late.append(world.again(message))
            world.exchanges[k].receive(message)
            world.exchanges[k].receive(world.again(message))
    after = world.total()
    assert torch.allclose(after, total, rtol=0, atol=1e-14)
    states = [learner.state.clone() for learner in world.learners]
    for message in reversed(late[1:]):  # the request again would rightly begin another exchange
        world.exchanges[message.receiver].receive(message)
    world.settle()
    assert all(torch.equal(learner.state, state) for learner, state in zip(world.learners, states, strict=True))
    assert [exchange.tally.completed for exchange in world.exchanges] == [1, 1, 0]


@pytest.mark.parametrize("point", ["asked", "answered", "committed"])
def test_a_partner_that_dies_at_any_point_stops_nobody(world: World, point: str) -> None:
    """What a death leaves behind is counted, and the survivor exchanges with the third."""
    dead = 0 if point in ("asked", "committed") else 1
    world.exchanges[0].ask(1)
    survivor = world.exchanges[1 - dead]
    if point == "asked":  # the initiator dies before the answer comes
        world.die(0)
        world.step(1)
    elif point == "answered":  # the responder dies with its answer under way
        world.until_commit()
        world.die(1)
        world.step(0)
    else:  # the initiator dies before its commit
        world.until_commit()
        world.die(0)
        world.step(1)
    for partner in list(survivor.under_way):
        survivor.expire(partner)
    tally, free = survivor.tally, survivor.carrier.room
    assert tally.completed + tally.unconfirmed + tally.expired <= 1
    assert free >= 2
    completed = tally.completed
    assert survivor.ask(2)
    alive = [k for k in range(3) if k != dead]
    for _ in range(4):
        for k in alive:
            world.step(k)
    assert tally.completed == completed + 1


def test_an_exchange_needs_the_answer_of_its_own_partner(world: World) -> None:
    """A third learner that knows the numbers of an exchange cannot take part in it."""
    total = world.total()
    world.exchanges[0].ask(1)
    number = world.exchanges[0].number
    snapshot = world.carriers[2].take()
    world.carriers[2].send(Answer(sender=2, receiver=0, initiator=0, number=number, snapshot=snapshot))
    world.step(0)
    assert world.exchanges[0].tally.ignored + world.dropped(0) == 1
    world.settle()
    assert world.exchanges[0].tally.completed == 1
    assert torch.allclose(world.total(), total, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["shared", "sockets", "network"])  # memory takes a new tensor for each snapshot
def test_without_room_a_request_is_answered_busy(kind: str) -> None:
    """A snapshot that somebody still needs is never overwritten: without room everybody is answered `busy`."""
    world = WORLDS[kind]()
    carrier = world.carriers[1]
    taken = [carrier.take() for _ in range(carrier.room)]
    assert carrier.room == 0
    copies = [snapshot.clone() for snapshot in taken]
    world.exchanges[0].ask(1)
    world.settle()
    assert world.exchanges[0].tally.busy == 1
    assert all(torch.equal(snapshot, copy) for snapshot, copy in zip(taken, copies, strict=True))
    world.close()


def test_news_carry_step_counts(world: World) -> None:
    for _ in range(3):
        world.learners[0].progress.advance()
    world.learners[0].progress.stop()
    assert world.exchanges[0].tell(1)
    world.step(1)
    assert world.learners[1].progress.total == 3
    assert world.learners[1].progress.counts()[0, 0].stopped
    assert not world.exchanges[1].under_way


DEEDS = st.sampled_from(["ask", "react", "react", "update", "expire"])


@settings(max_examples=80)
@given(
    st.sampled_from(["memory", "shared", "sockets", "network"]),
    st.lists(st.tuples(DEEDS, st.integers(0, 2), st.integers(0, 2)), max_size=60),
)
def test_the_sum_is_conserved_whatever_happens_meanwhile(kind: str, deeds: list[tuple[str, int, int]]) -> None:
    """Three learners ask, answer, update and give up in any order. Only counted half-exchanges may change the sum."""
    world = WORLDS[kind]()
    try:
        expected = world.total().clone()
        for deed, k, j in deeds:
            if deed == "ask" and k != j:
                world.exchanges[k].ask(j)
            elif deed == "react":
                world.step(k)
            elif deed == "update":
                world.learners[k].state += j
                expected = expected + j
            elif deed == "expire" and j in world.exchanges[k].under_way:
                world.exchanges[k].expire(j)
        world.settle()
        for exchange in world.exchanges:
            for partner in list(exchange.under_way):
                exchange.expire(partner)
        tallies = [exchange.tally for exchange in world.exchanges]
        if not any(tally.unconfirmed or tally.halves for tally in tallies):
            assert torch.allclose(world.total(), expected, rtol=0, atol=1e-11)
            assert sum(tally.completed for tally in tallies) % 2 == 0
        doubtful = sum(tally.unconfirmed + tally.halves for tally in tallies)
        assert sum(tally.completed for tally in tallies) % 2 == 0 or doubtful
    finally:
        world.close()


# --- What only some carriers can suffer ---


def test_sockets_a_snapshot_that_breaks_off_changes_nothing() -> None:
    world = SocketWorld(dimension=200_000)  # more than the kernel buffers
    try:
        before = [learner.state.clone() for learner in world.learners]
        world.exchanges[0].ask(1)
        world.step(1)  # a part of the answer is under way
        assert world.arrived(0) == []
        world.die(1)
        assert world.arrived(0) == []
        world.exchanges[0].expire(1)
        assert torch.equal(world.learners[0].state, before[0])
        assert world.exchanges[0].tally.expired == 1
        assert world.exchanges[0].ask(2)
        for _ in range(200):
            world.step(2)
            world.step(0)
        assert world.exchanges[0].tally.completed == 1
    finally:
        world.close()


@pytest.mark.parametrize("forged", ["nothing", "sender", "receiver", "length"])
def test_sockets_what_is_forged_is_dropped(forged: str) -> None:
    """Learner 2 sends, over its own link to learner 0, what pretends to be something else."""
    world = SocketWorld()
    try:
        header = {"kind": "Commit", "sender": 2, "receiver": 0, "initiator": 2, "number": 1, "progress": []}
        header |= {"sender": {"sender": 1}, "receiver": {"receiver": 1}}.get(forged, {})
        numbers = world.learners[0].state.numpy().tobytes()
        body = numbers[:-8] if forged == "length" else numbers
        packed = json.dumps(header).encode()
        world.links[2][0].sendall(HEAD.pack(len(packed), len(body)) + packed + body)
        assert kinds(world.arrived(0)) == ([Commit] if forged == "nothing" else [])
    finally:
        world.close()


def test_shared_memory_a_message_from_another_socket_is_dropped() -> None:
    world = SharedWorld()
    try:
        world.exchanges[0].ask(1)
        stranger = Post(world.mail, "stranger")
        number = world.exchanges[0].number
        stranger.send("0", encode(Busy(sender=1, receiver=0, initiator=0, number=number)))
        stranger.send("0", b"\xff" * 40)
        stranger.close()
        assert world.arrived(0) == []
        assert 1 in world.exchanges[0].under_way
    finally:
        world.close()


def test_shared_memory_a_snapshot_that_is_overwritten_while_it_is_read_is_half_an_exchange() -> None:
    world = SharedWorld()
    try:
        world.exchanges[0].ask(1)
        world.step(1)
        world.step(0)
        [commit] = world.arrived(1)
        before = world.learners[1].state.clone()
        commit.receipt.memory.set_sequence(commit.receipt.slot, commit.receipt.sequence + 1)
        world.exchanges[1].receive(commit)
        assert world.exchanges[1].tally.halves == 1
        assert torch.equal(world.learners[1].state, before)
    finally:
        world.close()


def test_shared_memory_tells_when_a_death_may_leave_half_an_exchange() -> None:
    world = SharedWorld()
    try:
        memories = [carrier.memory for carrier in world.carriers if hasattr(carrier, "memory")]
        world.exchanges[0].ask(1)
        assert not memories[0].exposed
        world.step(1)
        assert memories[1].exposed
        world.settle()
        assert not any(memory.exposed for memory in memories)
    finally:
        world.close()
