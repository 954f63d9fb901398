"""Who may talk to whom, how a learner picks its partner, and what that does to the models' spread.

Pure: graphs and matrices, no sockets and no processes. Matrices are K × K in float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from adp2sgd import config
from adp2sgd.errors import ConfigError
from adp2sgd.theory import rho_bar

Edge = tuple[int, int]
Matrix = NDArray[np.float64]


def ring(learners: int) -> set[Edge]:
    return {_edge(k, (k + 1) % learners) for k in range(learners)}


def torus(learners: int) -> set[Edge]:
    """The most square grid of `learners` cells, wrapped in both directions."""
    rows = next(r for r in range(int(learners**0.5), 0, -1) if learners % r == 0)
    columns = learners // rows
    if rows == 1 and learners > 3:
        raise ConfigError(
            f"learners = {learners} is prime and makes no torus; use a ring or another number of learners"
        )
    cell = [(k // columns, k % columns) for k in range(learners)]
    right = {_edge(k, r * columns + (c + 1) % columns) for k, (r, c) in enumerate(cell)}
    down = {_edge(k, (r + 1) % rows * columns + c) for k, (r, c) in enumerate(cell)}
    return {(i, j) for i, j in right | down if i != j}


def complete(learners: int) -> set[Edge]:
    return {(i, j) for i in range(learners) for j in range(i + 1, learners)}


def hypercube(learners: int) -> set[Edge]:
    if learners & (learners - 1):
        raise ConfigError(f"learners = {learners} makes no hypercube; use a power of two or another graph")
    return {_edge(k, k ^ (1 << bit)) for k in range(learners) for bit in range(learners.bit_length() - 1)}


def exponential(learners: int) -> set[Edge]:
    """Each learner is joined to those 1, 2, 4, … places further on the ring."""
    hops = [1 << bit for bit in range(max(1, (learners - 1).bit_length()))]
    return {_edge(k, (k + hop) % learners) for k in range(learners) for hop in hops}


def star(learners: int) -> set[Edge]:
    return {(0, k) for k in range(1, learners)}


def random_regular(learners: int, degree: int = 4, seed: int = 0) -> set[Edge]:
    """A connected graph in which every learner has `degree` neighbours, the same for the same seed."""
    if degree >= learners or degree * learners % 2 or (degree < 2 < learners):
        raise ConfigError(
            f"topology.degree = {degree} makes no connected regular graph of {learners} learners; "
            "use 2 ≤ degree < learners, with degree × learners even"
        )
    draw = random.Random(f"random-regular/{seed}/{learners}/{degree}")
    dense = 2 * degree >= learners  # then the edges that are missing are drawn, and the rest is connected in any case
    while True:
        edges = _pair_up(learners, learners - 1 - degree if dense else degree, draw)
        if edges is not None and dense:
            return complete(learners) - edges
        if edges is not None and _connected(learners, edges):
            return edges


GRAPHS: dict[str, Callable[[int], set[Edge]]] = {
    "ring": ring,
    "torus": torus,
    "complete": complete,
    "hypercube": hypercube,
    "exponential": exponential,
    "random-regular": random_regular,
    "star": star,
}


@dataclass(frozen=True)
class Graph:
    """A connected, undirected graph of learners with its way of choosing partners.

    `neighbour`: any learner starts an exchange, with a uniformly drawn neighbour.
    `sender-receiver`: every second learner is a sender; only senders start, each with a uniformly drawn receiver
    (the paper's: in effect a complete bipartite graph, whatever the ring in between).
    `exchanges`: how many an initiator starts per step, one after the other, each with a partner drawn anew.
    """

    learners: int
    edges: frozenset[Edge]
    partner: str = "neighbour"
    exchanges: int = 1

    def __post_init__(self) -> None:
        for i, j in self.edges:
            if not (0 <= i < self.learners and 0 <= j < self.learners) or i == j:
                last = self.learners - 1
                raise ConfigError(f"topology.edges has [{i}, {j}]; an edge joins two learners among 0 to {last}")
        if not _connected(self.learners, self.edges):
            raise ConfigError(f"the graph of {self.learners} learners is not connected; add edges until it is")
        if self.partner == "sender-receiver" and self.learners < 2:
            raise ConfigError('topology.partner = "sender-receiver" needs 2 learners or more; use "neighbour"')

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """For each learner, whom it may start an exchange with, in order."""
        if self.partner == "sender-receiver":
            receivers = tuple(range(1, self.learners, 2))
            return tuple(receivers if k % 2 == 0 else () for k in range(self.learners))
        found: list[set[int]] = [set() for _ in range(self.learners)]
        for i, j in self.edges:
            found[i].add(j)
            found[j].add(i)
        return tuple(tuple(sorted(each)) for each in found)

    @property
    def degree(self) -> int:
        """The largest number of partners that a learner has."""
        return max((len(each) for each in self.neighbours), default=0)

    def draw_partner(self, learner: int, stream: random.Random) -> int | None:
        """Whom `learner` asks next; None for a learner that starts no exchange."""
        partners = self.neighbours[learner]
        return stream.choice(partners) if partners else None

    def draw_partners(self, learner: int, stream: random.Random) -> list[int]:
        """Whom `learner` asks in this step, one after the other; none for a learner that starts no exchange."""
        drawn = (self.draw_partner(learner, stream) for _ in range(self.exchanges))
        return [partner for partner in drawn if partner is not None]

    def pair_probabilities(self) -> dict[Edge, float]:
        """The probability of each unordered pair in one exchange, all starting learners being equally active."""
        starters = [k for k in range(self.learners) if self.neighbours[k]]
        pairs: dict[Edge, float] = {}
        for k in starters:
            for j in self.neighbours[k]:
                share = 1 / (len(starters) * len(self.neighbours[k]))
                pairs[_edge(k, j)] = pairs.get(_edge(k, j), 0.0) + share
        return pairs

    def expected_square(self) -> Matrix:
        """E[AᵀA] of the exchanges of one step, exactly, all starting learners being equally active.

        A pair's matrix P is a projection. So for one exchange AᵀA = P, which differs from the identity in four places.
        Several exchanges of a step have the same initiator k: E[AᵀA] is the mean over k of Φ_k applied n times to the
        identity, with Φ_k(M) the mean of P M P over k's partners. That is not the n-th power of one exchange's.
        """
        if self.exchanges > 1 and self.learners > 1:
            starters = [k for k in range(self.learners) if self.neighbours[k]]
            total: Matrix = sum((self._repeated(k) for k in starters), np.zeros((self.learners, self.learners)))
            return total / len(starters)
        expected = np.eye(self.learners)
        for (i, j), probability in self.pair_probabilities().items():
            expected[[i, j], [i, j]] -= probability / 2
            expected[[i, j], [j, i]] += probability / 2
        return expected

    def _repeated(self, k: int) -> Matrix:
        """Φ_k, applied `exchanges` times to the identity."""
        square, partners = np.eye(self.learners), self.neighbours[k]
        for _ in range(self.exchanges):
            change = np.zeros_like(square)
            for j in partners:  # P M P − M for P = I − uuᵀ/2 and u = e_k − e_j, where M is symmetric
                along = (square[k] - square[j]) / 2  # uᵀM/2
                change[k] -= along
                change[j] += along
                change[:, k] -= along
                change[:, j] += along
                twice = (along[k] - along[j]) / 2  # uᵀMu/4
                change[[k, j], [k, j]] += twice
                change[[k, j], [j, k]] -= twice
            square = square + change / len(partners)
        return square

    @cached_property
    def rho(self) -> float:
        """max(|λ₂|, |λ_K|) of E[AᵀA]: one step's exchanges contract the expected squared spread by at least this."""
        if self.learners == 1:
            return 0.0
        eigenvalues = np.sort(np.linalg.eigvalsh(self.expected_square()))
        return float(max(abs(eigenvalues[-2]), abs(eigenvalues[0])))

    @property
    def rho_bar(self) -> float:
        """The paper's ρ̄, from ρ per step."""
        return rho_bar(self.rho, self.learners)


def build(topology: config.Topology, learners: int, seed: int = 0) -> Graph:
    """The graph that a configuration asks for."""
    if topology.partner == "sender-receiver":
        if topology.graph != "ring":
            raise ConfigError(
                f'topology.partner = "sender-receiver" lets every sender meet every receiver, so graph = '
                f'"{topology.graph}" would mean nothing; use graph = "ring" as the paper does, or partner = "neighbour"'
            )
        edges: Iterable[Edge] = (_edge(i, j) for i in range(0, learners, 2) for j in range(1, learners, 2))
    elif topology.graph == "edges":
        edges = (_edge(i, j) for i, j in topology.edges)
    elif topology.graph == "random-regular":
        edges = random_regular(learners, topology.degree, seed) if learners > 1 else ()
    elif topology.graph in GRAPHS:
        edges = GRAPHS[topology.graph](learners) if learners > 1 else ()
    else:
        raise ConfigError(f'topology.graph = "{topology.graph}" is unknown; use one of: {", ".join(GRAPHS)}, edges')
    return Graph(learners, frozenset(edges), topology.partner, topology.exchanges)


def mixing_matrix(learners: int, i: int, j: int) -> Matrix:
    """The doubly stochastic matrix of one exchange between i and j: both take the average."""
    matrix = np.eye(learners)
    matrix[[i, i, j, j], [i, j, i, j]] = 0.5
    return matrix


def _edge(i: int, j: int) -> Edge:
    return (i, j) if i < j else (j, i)


def _connected(learners: int, edges: Iterable[Edge]) -> bool:
    parent = list(range(learners))

    def root(k: int) -> int:
        while parent[k] != k:
            parent[k] = parent[parent[k]]
            k = parent[k]
        return k

    for i, j in edges:
        parent[root(i)] = root(j)
    return len({root(k) for k in range(learners)}) == 1


def _pair_up(learners: int, degree: int, draw: random.Random) -> set[Edge] | None:
    """One try at pairing `degree` stubs per learner without loops or double edges (the pairing model, with redraws)."""
    stubs = [k for k in range(learners) for _ in range(degree)]
    edges: set[Edge] = set()
    while stubs:
        draw.shuffle(stubs)
        left = []
        for i, j in zip(stubs[::2], stubs[1::2], strict=True):
            if i == j or _edge(i, j) in edges:
                left += [i, j]
            else:
                edges.add(_edge(i, j))
        if len(left) == len(stubs):
            return None
        stubs = left
    return edges
