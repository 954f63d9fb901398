"""Shared memory between processes: the wire, the slots, and exchange threads with real sockets."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adp2sgd.exchange.protocol import MESSAGES, Exchange
from adp2sgd.exchange.shared import Post, SharedCarrier, decode, encode
from adp2sgd.exchange.slots import SLOTS, Layout, Memory, Peers, Slots
from adp2sgd.exchange.thread import ExchangeThread
from adp2sgd.learner import Learner
from adp2sgd.progress import Count
from adp2sgd.tasks import resolve
from conftest import make_learner


@pytest.fixture
def memories() -> Iterator[list[int]]:
    """Descriptors that are closed after the test; fill it with `create`."""
    made: list[int] = []
    yield made
    for descriptor in made:
        os.close(descriptor)


def create(learners: list[Learner], memories: list[int]) -> Layout:
    layout = Layout(len(learners[0].state), learners[0].state.dtype)
    memories += [layout.create(k) for k in range(len(learners))]
    return layout


def test_messages_survive_the_wire() -> None:
    progress = {(0, 0): Count(5), (3, 70_000): Count(2**40, True)}
    for kind in MESSAGES.values():
        sent = kind(sender=3, receiver=1, initiator=3, number=2**33 + 7, progress=progress)
        message, slot, sequence = decode(encode(sent, 2, 9))
        assert type(message) is kind
        assert (message.sender, message.number, slot, sequence) == (3, 2**33 + 7, 2, 9)
        assert message.progress == progress
    with pytest.raises(struct.error):
        decode(b'{"do": "go"}')


def test_a_slot_is_used_again_only_when_released_or_overdue_and_late_readers_notice(memories: list[int]) -> None:
    learner = make_learner(0)
    layout = create([learner, make_learner(1)], memories)
    slots = Slots(Memory(memories[0], layout), learner.state, learner.snapshot, patience_s=60.0)
    peers = Peers(memories, layout, torch.device("cpu"))
    for _ in range(SLOTS):
        slots.done(slots.take())
    assert slots.free == []
    peers.memory(0).release(1, peers.memory(0).sequence(1))
    assert slots.free == [1]
    hello = MESSAGES["Answer"](sender=0, receiver=1, initiator=1, number=1)
    message = peers.opened(hello, 2, 1)
    assert message is not None
    assert message.intact is not None
    assert message.intact()
    taken = slots.take()
    assert slots.slot_of(taken) == 1
    peers.memory(0).release(1, peers.memory(0).sequence(1))
    assert slots.free == []  # this side still needs it
    slots._taken[2] = -1e9  # its reader was silent for too long
    assert slots.slot_of(slots.take()) == 2
    assert not message.intact()
    assert message.snapshot is not None
    assert not make_learner(1).mix(torch.zeros(3, dtype=torch.float64), message.snapshot, message.intact)
    assert peers.opened(hello, 2, 1) is None


@pytest.mark.processes
def test_exchanges_between_threads_conserve_the_sum_and_reach_consensus(memories: list[int], tmp_path: Path) -> None:
    """Four exchange threads with real sockets and shared memory, models of several blocks, and updates meanwhile."""
    task, count = resolve("quadratic", {"records": 8, "dimension": 300_000}), 4
    learners = [make_learner(k, task) for k in range(count)]
    for k, learner in enumerate(learners):
        learner.state.normal_(generator=torch.Generator().manual_seed(k))
    before = sum(learner.state.clone() for learner in learners)
    spread = float(torch.stack([learner.state for learner in learners]).var(dim=0).mean())
    create(learners, memories)
    carriers = [SharedCarrier(each, Post(tmp_path, str(each.number)), memories) for each in learners]
    threads = [ExchangeThread(Exchange(learner, carrier)) for learner, carrier in zip(learners, carriers, strict=True)]
    for thread in threads:
        thread.start()
    draw = random.Random(0)
    for _ in range(80):  # two askers at a time, so that some are answered `busy` and most are not
        for asker in draw.sample(range(count), 2):
            threads[asker].want(draw.choice([k for k in range(count) if k != asker]))
        for _ in range(10):
            time.sleep(0.001)
            for learner in learners:
                with learner.vector.mutex:
                    learner.state.add_(0.01)  # small beside the spread: an exchange may fall between two updates
    for thread in threads:
        thread.close()
    tallies = [thread.exchange.tally for thread in threads]
    assert sum(tally.completed for tally in tallies) > 40
    assert sum(tally.completed for tally in tallies) % 2 == 0
    assert not any(tally.halves or tally.unconfirmed for tally in tallies)
    updates = 0.01 * count * 80 * 10
    assert torch.allclose(sum(learner.state for learner in learners), before + updates, rtol=0, atol=1e-8)
    assert float(torch.stack([learner.state for learner in learners]).var(dim=0).mean()) < 0.1 * spread
    for carrier in carriers:
        carrier.close()


def test_a_look_between_answer_and_commit_overwrites_nothing(memories: list[int], tmp_path: Path) -> None:
    learners = [make_learner(0), make_learner(1)]
    create(learners, memories)
    carriers = [SharedCarrier(each, Post(tmp_path, str(each.number)), memories) for each in learners]
    sides = [Exchange(learner, carrier) for learner, carrier in zip(learners, carriers, strict=True)]

    def react(k: int) -> None:
        for message in carriers[k].receive(0.0):
            sides[k].receive(message)

    learners[0].state.fill_(0.0)
    learners[1].state.fill_(1.0)
    sides[0].ask(1)
    react(1)  # answers with its snapshot
    learners[1].state.add_(10.0)  # its training goes on
    carriers[1].show()  # a look, before the commit that uses its slot
    react(0)
    carriers[0].show()  # the initiator leaves right after its commit
    react(1)
    assert torch.equal(learners[0].state + learners[1].state, torch.full_like(learners[0].state, 11.0))
    assert sides[1].tally.completed == 1
    for carrier in carriers:
        carrier.close()


@pytest.mark.processes
def test_training_goes_on_while_a_partner_is_silent(memories: list[int], tmp_path: Path) -> None:
    """A partner whose queue takes messages and never answers: `want` returns at once, and the exchange expires."""

    class Hasty(SharedCarrier):
        def deadline_s(self, partner: int) -> float:
            return 0.1

    threads = threading.active_count()
    learner = make_learner(0)
    create([learner, make_learner(1)], memories)
    carrier, silent = Hasty(learner, Post(tmp_path, "0"), memories), Post(tmp_path, "1")
    thread = ExchangeThread(Exchange(learner, carrier))
    thread.start()
    before = time.monotonic()
    for _ in range(50):
        thread.want(1)
        learner.begin()
        learner.update(learner.gradient())
        time.sleep(0.01)
    thread.close()
    assert learner.steps == 50
    assert 2 <= thread.exchange.tally.expired <= 1 + (time.monotonic() - before) / 0.1
    assert threading.active_count() <= threads
    carrier.close()
    silent.close()


def test_who_is_gone_is_not_reached_and_who_is_there_is(memories: list[int], tmp_path: Path) -> None:
    learner = make_learner(0)
    create([learner, make_learner(1), make_learner(2)], memories)
    carrier, there = SharedCarrier(learner, Post(tmp_path, "0"), memories), Post(tmp_path, "1")
    thread = ExchangeThread(Exchange(learner, carrier))
    thread.start()
    deadline = time.monotonic() + 10
    while thread.reaches([2]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not thread.reaches([2])
    assert thread.reaches([1, 2])
    thread.close()
    assert list(there.receive())  # the news of step counts
    carrier.close()
    there.close()
