"""Graphs, partner choice and the spectral quantities of one exchange."""

import itertools
import math
import random

import numpy as np
import pytest

from adp2sgd import config, topology
from adp2sgd.errors import ConfigError


def graph(name: str, learners: int, partner: str = "neighbour", **options: object) -> topology.Graph:
    return topology.build(config.Topology(graph=name, partner=partner, **options), learners)


@pytest.mark.parametrize("learners", [3, 4, 5, 8, 16, 33])
def test_ring_has_the_closed_form(learners: int) -> None:
    expected = 1 - (1 - math.cos(2 * math.pi / learners)) / learners
    assert graph("ring", learners).rho == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("learners", [2, 3, 8, 16])
def test_complete_has_the_closed_form(learners: int) -> None:
    assert graph("complete", learners).rho == pytest.approx(1 - 1 / (learners - 1), abs=1e-9)


@pytest.mark.parametrize("learners", [4, 8, 16, 32])  # with two learners every exchange is a full average: ρ = 0
def test_sender_receiver_has_the_closed_form(learners: int) -> None:
    built = graph("ring", learners, "sender-receiver")
    assert built.rho == pytest.approx(1 - 1 / learners, abs=1e-9)
    assert (built.degree, len(built.edges)) == (
        learners // 2,
        learners**2 // 4,
    )  # whom a sender may meet, and all pairs


@pytest.mark.parametrize(
    ("name", "partner"), [*((name, "neighbour") for name in (*topology.GRAPHS, "edges")), ("ring", "sender-receiver")]
)
@pytest.mark.parametrize("exchanges", [1, 2, 3])
def test_expected_square_is_the_average_over_the_draws(name: str, partner: str, exchanges: int) -> None:
    """E[AᵀA] by enumeration of who starts and whom it draws, with the matrices multiplied out."""
    edges = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (0, 4))
    built = graph(name, 8, partner, exchanges=exchanges, **({"edges": edges} if name == "edges" else {}))
    starters = [k for k in range(8) if built.neighbours[k]]
    total = np.zeros((8, 8))
    for k in starters:
        for partners in itertools.product(built.neighbours[k], repeat=exchanges):
            matrix = np.eye(8)
            for j in partners:
                matrix = topology.mixing_matrix(8, k, j) @ matrix
            assert np.allclose(matrix.sum(0), 1)
            assert np.allclose(matrix.sum(1), 1)
            total += matrix.T @ matrix / len(starters) / len(built.neighbours[k]) ** exchanges
    assert np.allclose(total, built.expected_square(), atol=1e-12)
    eigenvalues = np.sort(np.linalg.eigvalsh(total))
    assert built.rho == pytest.approx(max(abs(eigenvalues[-2]), abs(eigenvalues[0])), abs=1e-9)
    assert 0 <= built.rho < 1


def test_rho_bar_is_the_papers_formula() -> None:
    built = graph("ring", 16)
    root = math.sqrt(built.rho)
    assert built.rho_bar == pytest.approx(15 / 16 * (1 / (1 - built.rho) + 2 * root / (1 - root) ** 2), rel=1e-12)


def test_degrees() -> None:
    found = {name: graph(name, 16).degree for name in topology.GRAPHS}
    assert found == {
        "ring": 2,
        "torus": 4,
        "complete": 15,
        "hypercube": 4,
        "exponential": 7,
        "random-regular": 4,
        "star": 15,
    }
    regular = graph("random-regular", 50, degree=3)
    assert {len(each) for each in regular.neighbours} == {3}
    for learners, degree in ((40, 38), (24, 22), (41, 20), (6, 3), (5, 4)):
        dense = graph("random-regular", learners, degree=degree)
        assert {len(each) for each in dense.neighbours} == {degree}


@pytest.mark.parametrize("name", topology.GRAPHS)
@pytest.mark.parametrize("learners", [1, 2])
def test_tiny_worlds(name: str, learners: int) -> None:
    if name == "random-regular" and learners == 2:
        pytest.skip("two learners have no regular graph of degree 4")
    built = graph(name, learners)
    assert built.degree == learners - 1


def test_neighbour_draws_are_uniform() -> None:
    """5,000 draws among 4 neighbours: each count within 5 standard deviations (false alarms below 1e-5)."""
    built = graph("torus", 16)
    stream = random.Random(1)
    draws = [built.draw_partner(5, stream) for _ in range(5000)]
    assert set(draws) == set(built.neighbours[5])
    spread = math.sqrt(5000 * 0.25 * 0.75)
    assert all(abs(draws.count(j) - 1250) < 5 * spread for j in built.neighbours[5])


def test_the_first_partner_of_a_step_does_not_depend_on_how_many_follow() -> None:
    one, three = graph("torus", 16), graph("torus", 16, exchanges=3)
    for seed in range(20):
        partners = three.draw_partners(5, random.Random(seed))
        assert len(partners) == 3
        assert one.draw_partners(5, random.Random(seed)) == partners[:1]
        assert one.draw_partner(5, random.Random(seed)) == partners[0]
    assert graph("ring", 4, "sender-receiver", exchanges=3).draw_partners(1, random.Random(0)) == []


def test_receivers_start_nothing() -> None:
    built = graph("ring", 5, "sender-receiver")
    assert [built.draw_partner(k, random.Random(0)) is None for k in range(5)] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("options", "learners", "words"),
    [
        ({"graph": "rign"}, 4, "rign"),
        ({"edges": ((0, 1), (2, 3))}, 4, "not connected"),
        ({"edges": ((0, 7),)}, 4, r"\[0, 7\]"),
        ({"edges": ((1, 1),)}, 2, r"\[1, 1\]"),
        ({"graph": "hypercube"}, 6, "power of two"),
        ({"graph": "torus"}, 7, "prime"),
        ({"graph": "random-regular", "degree": 3}, 5, "degree"),
        ({"graph": "ring", "partner": "sender-receiver"}, 1, "2 learners"),
        ({"exchanges": 0}, 4, "topology.exchanges = 0"),
    ],
)
def test_impossible_graphs_are_refused_in_one_line(options: dict[str, object], learners: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        topology.build(config.Topology(**options), learners)
    assert "\n" not in str(caught.value)
