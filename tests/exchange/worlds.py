"""Three learners joined by one kind of carrier, for tests that hand every message on themselves."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from adp2sgd.exchange.carrier import Carrier
from adp2sgd.exchange.duplex import Accept, DuplexExchange, Offer, Ready
from adp2sgd.exchange.handshake import Peer
from adp2sgd.exchange.memory import MemoryCarrier, Pool
from adp2sgd.exchange.network import NetworkCarrier
from adp2sgd.exchange.protocol import Answer, Commit, Exchange, Message, Request
from adp2sgd.exchange.shared import Post, SharedCarrier, make_mail
from adp2sgd.exchange.slots import Layout
from adp2sgd.learner import Learner
from adp2sgd.tasks import resolve
from certificates import identity, site
from conftest import make_learner
from socket_carrier import SocketCarrier


class World:
    """`exchanges[k]` is learner k's side. Nothing arrives before the test asks for it."""

    carriers: Sequence[Carrier]
    script: tuple[tuple[int, list[type[Message]]], ...] = ((1, [Request]), (0, [Answer]), (1, [Commit]))
    """What learner 1 and learner 0 receive in turn when learner 0 asks learner 1."""

    def __init__(self, dimension: int = 3) -> None:
        task = resolve("quadratic", {"records": 50, "dimension": dimension})
        self.learners: list[Learner] = [make_learner(k, task) for k in range(3)]
        for k, learner in enumerate(self.learners):
            learner.state.copy_(torch.linspace(k, 7.3 * k - 1, dimension, dtype=torch.float64) / 3)
        self.connect()
        self.exchanges = self.sides()

    def sides(self) -> list[Exchange]:
        return [Exchange(learner, carrier) for learner, carrier in zip(self.learners, self.carriers, strict=True)]

    def connect(self) -> None:
        """Make `carriers`."""
        raise NotImplementedError

    def arrived(self, k: int) -> list[Message]:
        """What has reached learner k; the test decides what becomes of it."""
        return list(self.carriers[k].receive(0.0))

    def step(self, k: int) -> list[Message]:
        """Learner k reacts to all that has reached it."""
        messages = self.arrived(k)
        for message in messages:
            self.exchanges[k].receive(message)
        return messages

    def until_commit(self) -> None:
        """Learner 0 has asked: go on until the next message that learner 0 receives makes it commit."""
        for k, _ in self.script[:-2]:
            self.step(k)

    def dropped(self, k: int) -> int:
        """Messages that learner k's carrier dropped because nobody had asked for them."""
        return 0

    def settle(self) -> None:
        """Until nothing is under way any more."""
        while any([self.step(k) for k in range(3)]):
            pass

    def again(self, message: Message) -> Message:
        """The same message delivered a second time."""
        return message

    def die(self, k: int) -> None:
        """kill -9: learner k neither sends nor reads from now on."""
        self.carriers[k].close()

    def close(self) -> None:
        """After the test."""

    def total(self) -> torch.Tensor:
        return sum((learner.state for learner in self.learners), torch.zeros(()))


class MemoryWorld(World):
    def connect(self) -> None:
        pool, self._dead = Pool(), set[int]()
        self.carriers = [MemoryCarrier(learner, self._post, pool) for learner in self.learners]

    def _post(self, message: Message) -> None:
        carrier = self.carriers[message.receiver]
        assert isinstance(carrier, MemoryCarrier)
        if message.receiver not in self._dead:
            carrier.arrived.append(message)

    def again(self, message: Message) -> Message:
        return message if message.snapshot is None else replace(message, snapshot=message.snapshot.clone())

    def die(self, k: int) -> None:
        self._dead.add(k)


class SharedWorld(World):
    def connect(self) -> None:
        state, self.mail = self.learners[0].state, make_mail()
        layout = Layout(len(state), state.dtype)
        self.descriptors = [layout.create(k) for k in range(3)]
        posts = [Post(self.mail, str(k)) for k in range(3)]
        self.carriers = [
            SharedCarrier(learner, post, self.descriptors) for learner, post in zip(self.learners, posts, strict=True)
        ]
        self._dead: set[int] = set()

    def die(self, k: int) -> None:
        self._dead.add(k)
        self.carriers[k].close()

    def close(self) -> None:
        for k in {0, 1, 2} - self._dead:
            self.carriers[k].close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        shutil.rmtree(self.mail)


class SocketWorld(World):
    wire: torch.dtype | None = None

    def connect(self) -> None:
        self.links: list[dict[int, socket.socket]] = [{}, {}, {}]
        for i, j in itertools.combinations(range(3), 2):
            self.links[i][j], self.links[j][i] = socket.socketpair()
        self.carriers = [
            SocketCarrier(learner, links, self.wire) for learner, links in zip(self.learners, self.links, strict=True)
        ]
        self._dead: set[int] = set()

    die = SharedWorld.die

    def close(self) -> None:
        for k in {0, 1, 2} - self._dead:
            self.carriers[k].close()


class PiecesWorld(SocketWorld):
    """Every read of a socket gives at most three bytes."""

    def arrived(self, k: int) -> list[Message]:
        carrier = self.carriers[k]
        assert isinstance(carrier, SocketCarrier)
        found: list[Message] = []
        for peer, link in list(carrier._links.items()):
            while data := _some(link):
                carrier._in[peer] += data
                found += carrier._complete(peer)
        return found + list(carrier.receive(0.0))


class RoundedWorld(SocketWorld):
    wire = torch.bfloat16


class NetworkWorld(World):
    """Real TLS connections on loopback, with certificates of one authority."""

    dtype: torch.dtype | None = None
    script = ((1, [Request]), (0, [Accept, Answer]), (1, [Offer]), (0, [Ready]), (1, [Commit]))

    def connect(self) -> None:
        self._dead: set[int] = set()
        self.network = [
            NetworkCarrier(learner, k, identity(k), listen=[("127.0.0.1", 0)], dtype=self.dtype)
            for k, learner in enumerate(self.learners)
        ]
        self.carriers = self.network
        peers = [Peer(k, site(k), tuple(carrier.addresses)) for k, carrier in enumerate(self.network)]
        for k, carrier in enumerate(self.network):
            carrier.set_peers(peer for peer in peers if peer.number != k)
        wait_for(lambda: all(len(carrier.neighbours.links) == 2 for carrier in self.network))

    def sides(self) -> list[Exchange]:
        pairs = zip(self.learners, self.network, strict=True)
        return [DuplexExchange(learner, carrier, at_once=1) for learner, carrier in pairs]

    def arrived(self, k: int) -> list[Message]:
        wait_for(self._quiet)
        return list(self.carriers[k].receive(0.0))

    def again(self, message: Message) -> Message:
        if message.snapshot is None:
            return message
        return replace(message, snapshot=message.snapshot.clone(), receipt=None)

    def dropped(self, k: int) -> int:
        return sum(link.reader.dropped for link in self.network[k].neighbours.links.values())

    def die(self, k: int) -> None:
        self._dead.add(k)
        self.network[k].close()
        wait_for(lambda: all(k not in each.neighbours.links for each in self.network))

    def close(self) -> None:
        for k in {0, 1, 2} - self._dead:
            self.network[k].close()

    def _quiet(self) -> bool:
        """All that was sent has been received."""
        alive = sorted({0, 1, 2} - self._dead)
        ends = [(self.network[i].neighbours.links, self.network[j].neighbours.links, i, j)
                for i, j in itertools.permutations(alive, 2)]  # fmt: skip
        return all(j in here and i in there and here[j].idle and here[j].frames_out == there[i].reader.frames
                   for here, there, i, j in ends)  # fmt: skip


class RoundedNetworkWorld(NetworkWorld):
    dtype = torch.bfloat16


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "in vain"
        time.sleep(0.0005)


def _some(link: socket.socket) -> bytes:
    try:
        return link.recv(3)
    except OSError:
        return b""


WORLDS: dict[str, Callable[..., World]] = {
    "memory": MemoryWorld,
    "shared": SharedWorld,
    "sockets": SocketWorld,
    "sockets in pieces": PiecesWorld,
    "sockets in bfloat16": RoundedWorld,
    "network": NetworkWorld,
    "network in bfloat16": RoundedNetworkWorld,
}
