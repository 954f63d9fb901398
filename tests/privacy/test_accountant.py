"""Accounting and calibration against independent figures: the reference file, dp-accounting, Opacus, closed forms."""

from __future__ import annotations

import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adp2sgd.errors import ConfigError, PrivacyError
from adp2sgd.privacy import calibrate
from adp2sgd.privacy.accountant import Spent, epsilon
from adp2sgd.privacy.calibrate import noise_for, steps_for
from adp2sgd.privacy.mechanism import Composed, Guarantee, SampledGaussian, with_count

REFERENCE = Path(__file__).parent / "privacy_reference.json"
GRID = 1.002  # PLD may exceed the truth, and so RDP's bound, by the tolerance of its grid

# (rate, noise, steps, δ, accountant, adjacency, ε): by dp-accounting on fine grids, RDP by Opacus.
POINTS = [
    (256 / 60000, 1.1, 3510, 1e-5, "pld", "add-remove", 1.1329),
    (256 / 60000, 1.1, 3510, 1e-5, "rdp", "add-remove", 1.2804),
    (256 / 60000, 1.1, 3510, 1e-5, "pld", "replace-one", 1.9269),
    (1.0, 1.0, 1, 1e-5, "pld", "add-remove", 4.37718),
    (0.01, 1.0, 1000, 1e-5, "pld", "add-remove", 1.82824),
    (0.08192, 1.0, 3662, 1e-5, "pld", "add-remove", 45.930),
    (0.08192, 1.0, 3662, 1e-5, "rdp", "add-remove", 48.90),
    (0.08192, 2.0, 3662, 1e-5, "pld", "add-remove", 14.2603),
    (0.08192, 4.0, 3662, 1e-5, "pld", "replace-one", 13.030),
    (0.08192, 2.0, 23437, 1e-5, "pld", "add-remove", 49.7),  # a learner 10× faster than 15 others
    (256 / 50000, 2.0, 58594, 1e-5, "pld", "add-remove", 2.736),  # what the paper's rate would print
    (1.0, 2.0, 300, 1e-5, "pld", "add-remove", 73.62),  # 300 shuffled epochs: no amplification
    (1e-4, 50.0, 10**6, 1e-5, "pld", "add-remove", 0.004387),  # .035 on dp-accounting's default grid
]


def spent(rate: float, noise: float, steps: int, delta: float, *how: str) -> Spent:
    return epsilon(SampledGaussian(noise, rate), steps, delta, *how)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_known_points(point: tuple[float, float, int, float, str, str, float]) -> None:
    rate, noise, steps, delta, accountant, adjacency, expected = point
    answer = spent(rate, noise, steps, delta, accountant, adjacency)
    assert answer.epsilon == pytest.approx(expected, rel=1.5e-3)
    assert (answer.accountant, answer.adjacency) == (accountant, adjacency)


@pytest.mark.parametrize("point", json.loads(REFERENCE.read_text()), ids=lambda point: point["id"])
def test_reference_file(point: dict[str, Any]) -> None:
    if point["kind"] == "epsilon":
        adjacency = point["adjacency"].replace("_", "-")
        answer = spent(
            point["q"], point["noise_multiplier"], point["steps"], point["delta"], point["accountant"], adjacency
        )
        assert abs(answer.epsilon - point["expect"]) <= max(point["rel_tol"] * point["expect"], point["abs_tol"])
    else:
        noise = noise_for(epsilon=point["epsilon"], delta=point["delta"], sample_rate=point["q"], steps=point["steps"])
        assert noise == pytest.approx(point["expect_pld"], rel=point["rel_tol"])


def random_points(count: int, seed: int) -> list[tuple[float, float, int, float]]:
    draw = random.Random(seed)
    powers = [[draw.uniform(*ends) for ends in ((-4, 0), (-0.3, 1.7), (0, 6), (-9, -3))] for _ in range(count)]
    return [(10**rate, 10**noise, int(10**steps), 10**delta) for rate, noise, steps, delta in powers]


def close(spent: Spent) -> bool:
    """Whether the certified bounds on ε are in order, and as close as the accountant promises."""
    return spent.epsilon_lower <= spent.epsilon <= max(1.3 * spent.epsilon_lower, spent.epsilon_lower + 0.01)


def test_any_setting_answers_without_a_warning_and_within_rdp(capfd: pytest.CaptureFixture[str]) -> None:
    corners = [(1e-4, 0.5, 10**6, 1e-5), (1e-4, 50.0, 10**6, 1e-9), (0.99, 0.5, 10**6, 1e-5), (1e-4, 1.0, 1, 1e-3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate, noise, steps, delta in corners + random_points(30, seed=1):
            by_pld = spent(rate, noise, steps, delta)
            by_rdp = spent(rate, noise, steps, delta, "rdp")
            assert by_pld.epsilon <= by_rdp.epsilon * GRID + 1e-6, (rate, noise, steps, delta)
            assert (by_pld.accountant, by_pld.note) == ("pld", "")
            assert close(by_pld), (rate, noise, steps, delta)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_agrees_with_dp_accounting(adjacency: str) -> None:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    relation = {"add-remove": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace-one": NeighboringRelation.REPLACE_ONE}
    draw = random.Random(2)
    for _ in range(12):
        rate, noise, steps = 10 ** draw.uniform(-2, 0), 10 ** draw.uniform(0, 1), int(10 ** draw.uniform(0, 3))
        theirs = (
            from_gaussian_mechanism(
                noise,
                sampling_prob=rate,
                value_discretization_interval=rate / noise / 30,
                neighboring_relation=relation[adjacency],
            )
            .self_compose(steps)
            .get_epsilon_for_delta(1e-5)
        )
        ours = epsilon(SampledGaussian(noise, rate), steps, 1e-5, "pld", adjacency).epsilon
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6), (rate, noise, steps)


def test_agrees_with_opacus() -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    for rate, noise, steps in [(0.01, 1.0, 1000), (0.1, 2.0, 500), (0.08192, 4.0, 3662)]:
        prv, rdp = PRVAccountant(), RDPAccountant()
        prv.history = rdp.history = [(noise, rate, steps)]
        # Opacus adds up to eps_error = .01 to be safe.
        above = prv.get_epsilon(delta=1e-5) - spent(rate, noise, steps, 1e-5).epsilon
        assert -1e-3 <= above <= 0.02
        assert spent(rate, noise, steps, 1e-5, "rdp").epsilon == pytest.approx(rdp.get_epsilon(delta=1e-5), rel=2e-3)


def test_small_delta_is_not_lost_in_rounding() -> None:
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    # Nearly Gaussian: a sum of many small losses has standard deviation rate·√steps/noise. dp-accounting gives .0196.
    limit = get_epsilon_gaussian(50 / (1e-4 * 1000), 1e-12)
    assert spent(1e-4, 50.0, 10**6, 1e-12).epsilon == pytest.approx(limit, rel=2e-3)
    # Not nearly: the reference is a separate computation that integrates each cell. dp-accounting gives .78 to 2.4.
    assert spent(1e-4, 1.0, 10**6, 1e-12).epsilon == pytest.approx(0.8613, rel=1e-3)


SETTINGS = {
    "rate": st.floats(1e-2, 0.9),
    "noise": st.floats(0.8, 20),
    "steps": st.integers(1, 2000),
    "delta": st.floats(1e-9, 1e-3),
}


@settings(max_examples=12)
@given(**SETTINGS)
def test_grows_with_steps_and_rate_and_falls_with_noise_and_delta(
    rate: float, noise: float, steps: int, delta: float
) -> None:
    here = spent(rate, noise, steps, delta).epsilon
    for more in [
        spent(rate, noise, 2 * steps, delta),
        spent(min(1.0, 1.5 * rate), noise, steps, delta),
        spent(rate, noise / 1.3, steps, delta),
        spent(rate, noise, steps, delta / 10),
        spent(rate, noise, steps, delta, "pld", "replace-one"),
    ]:
        assert more.epsilon * GRID >= here


def test_composition() -> None:
    step = SampledGaussian(2.0, 0.1)
    assert epsilon(Composed(((step, 30), (step, 70))), 5, 1e-5) == epsilon(step, 500, 1e-5)
    other = SampledGaussian(4.0, 0.02)
    both = epsilon(Composed(((step, 100), (other, 1000))), 1, 1e-5).epsilon
    alone = epsilon(step, 100, 1e-5).epsilon
    assert alone < both < alone + epsilon(other, 1000, 1e-5).epsilon
    assert both <= epsilon(Composed(((step, 100), (other, 1000))), 1, 1e-5, "rdp").epsilon * GRID
    # Two unsampled Gaussians are one; beside a sampled mechanism they take part as such.
    pair = Composed(((SampledGaussian(3.0, 1.0), 2), (SampledGaussian(1.5, 1.0), 1)))
    one = SampledGaussian((2 / 9 + 1 / 2.25) ** -0.5, 1.0)
    assert epsilon(pair, 1, 1e-5).epsilon == pytest.approx(epsilon(one, 1, 1e-5).epsilon, rel=1e-9)
    mixed = epsilon(Composed(((one, 1), (SampledGaussian(50.0, 0.01), 1))), 1, 1e-5).epsilon
    assert mixed == pytest.approx(epsilon(one, 1, 1e-5).epsilon, rel=1e-3)
    assert epsilon(Composed(()), 1, 1e-5).epsilon == epsilon(step, 0, 1e-5).epsilon == 0


def test_only_poisson_sampling_amplifies() -> None:
    shuffled = epsilon(SampledGaussian(2.0, 0.08192, "reshuffled"), 300, 1e-5).epsilon
    assert shuffled == pytest.approx(spent(1.0, 2.0, 300, 1e-5).epsilon)
    assert shuffled > 5 * spent(0.08192, 2.0, 300, 1e-5).epsilon


def test_sum_and_count_are_one_gaussian() -> None:
    assert with_count(1.0, 10.0) == pytest.approx((1 + 1 / 400) ** -0.5)
    with pytest.raises(PrivacyError, match="count_noise = 0"):
        with_count(1.0, 0)


def test_noise_too_small_for_pld_falls_back_to_a_bound_that_says_so() -> None:
    answer = spent(0.5, 0.04, 10, 1e-5)
    assert answer.accountant == "rdp"
    assert "noise_multiplier = 0.04 is too small for PLD" in answer.note
    bound = spent(0.5, 0.04, 10, 1e-5, "pld", "replace-one")
    assert "sampling is not counted" in bound.note
    assert bound.epsilon == spent(1.0, 0.04, 10, 1e-5, "pld", "replace-one").epsilon
    assert bound.epsilon_lower == 0


@pytest.mark.parametrize(("noise", "expected"), [(1.0, 197), (2.0, 1412), (4.0, 6370)])
def test_steps_for_a_budget(noise: float, expected: int) -> None:
    steps = steps_for(epsilon=8, delta=1e-5, sample_rate=0.08192, noise_multiplier=noise)
    assert steps == expected
    assert spent(0.08192, noise, steps, 1e-5).epsilon <= 8 < spent(0.08192, noise, steps + 1, 1e-5).epsilon


def test_steps_at_a_tiny_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """RDP would allow no step at all: its best order is limited by the largest loss of a single step."""
    fine: list[int] = []

    def counted(mechanism: Composed, *how: Any, **tolerance: float) -> Spent:
        fine.append(mechanism.parts[-1][1]) if not tolerance else None
        return epsilon(mechanism, *how, **tolerance)

    monkeypatch.setattr(calibrate, "epsilon_of", counted)
    steps = steps_for(epsilon=0.05, delta=1e-8, sample_rate=1e-6, noise_multiplier=0.6)
    assert 3_500_000 < steps < 6_000_000
    assert steps % 100 == 0  # five digits
    assert spent(1e-6, 0.6, steps, 1e-8).epsilon <= 0.05 < spent(1e-6, 0.6, steps + 100, 1e-8).epsilon
    assert len(set(fine)) <= 8
    monkeypatch.setattr(calibrate, "MOST_STEPS", 10_000)
    assert steps_for(epsilon=8, delta=1e-5, sample_rate=0.01, noise_multiplier=4.0) == 10_000


@pytest.mark.parametrize(
    ("target", "rate", "steps", "adjacency"),
    [(3.0, 64 / 3125, 1250, "add-remove"), (0.3, 0.005, 200, "add-remove"), (4.0, 0.05, 300, "replace-one")],
)
def test_noise_for_a_budget(target: float, rate: float, steps: int, adjacency: str) -> None:
    noise = noise_for(epsilon=target, delta=1e-5, sample_rate=rate, steps=steps, adjacency=adjacency)
    assert spent(rate, noise, steps, 1e-5, "pld", adjacency).epsilon <= target
    assert spent(rate, noise * (1 - 5e-4), steps, 1e-5, "pld", adjacency).epsilon > target
    back = steps_for(epsilon=target, delta=1e-5, sample_rate=rate, noise_multiplier=noise, adjacency=adjacency)
    assert steps <= back <= steps * 1.01 + 1


def test_calibration_counts_what_was_spent_before() -> None:
    before = Composed(((SampledGaussian(2.0, 0.08192), 400),))
    how = {"delta": 1e-5, "sample_rate": 0.08192, "before": before}
    assert steps_for(epsilon=8, noise_multiplier=2.0, **how) == 1412 - 400
    assert steps_for(epsilon=1, noise_multiplier=2.0, **how) == 0
    assert noise_for(epsilon=8, steps=1000, **how) == pytest.approx(2.0, rel=0.02)
    with pytest.raises(PrivacyError, match="epsilon = 1 is not reached"):
        noise_for(epsilon=1, steps=1000, **how)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SampledGaussian(1.0, 1.5), PrivacyError, "sample_rate = 1.5"),
        (lambda: SampledGaussian(0.0, 0.5), PrivacyError, "noise_multiplier = 0.0"),
        (lambda: SampledGaussian(math.nan, 0.5), PrivacyError, "noise_multiplier = nan"),
        (lambda: spent(0.1, 1.0, 10, 1.0), PrivacyError, r"delta = 1.0 is not in \(0, 1\)"),
        (lambda: epsilon(SampledGaussian(1.0, 0.1), 10, None), PrivacyError, "delta is missing"),
        (lambda: spent(0.1, 1.0, -1, 1e-5), ConfigError, "steps = -1"),
        (lambda: spent(0.1, 1.0, 10, 1e-5, "gdp"), ConfigError, "'gdp' is unknown; use one of pld, rdp"),
        (lambda: spent(0.1, 1.0, 10, 1e-5, "pld", "x"), ConfigError, "use one of add-remove, replace-one"),
        (lambda: spent(0.1, 1.0, 10, 1e-5, "rdp", "replace-one"), PrivacyError, "use accountant = 'pld'"),
        (lambda: epsilon("laplace", 1, 1e-5), PrivacyError, "'laplace' cannot be accounted"),  # type: ignore[arg-type]
        (lambda: noise_for(epsilon=0, delta=1e-5, sample_rate=0.1, steps=9), PrivacyError, "epsilon = 0"),
        (lambda: noise_for(epsilon=1, delta=None, sample_rate=0.1, steps=9), PrivacyError, "delta is missing"),
        (lambda: noise_for(epsilon=1, delta=1e-5, sample_rate=0.1, steps=0), ConfigError, "steps = 0"),
        (lambda: noise_for(epsilon=1e-9, delta=1e-9, sample_rate=1.0, steps=10**6), PrivacyError, "is not reached"),
    ],
)
def test_refusals_are_one_line_with_the_value(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_seeded_guarantee_says_what_it_describes() -> None:
    guarantee = Guarantee(
        epsilon=3.0, epsilon_spent=2.5, delta=1e-5, adjacency="add-remove", accountant="pld", sampler="poisson",
        steps=90, max_steps=100, seeded=True,
    )  # fmt: skip
    assert "describes the mechanism, not this run" in str(guarantee)
    assert "\n" not in str(guarantee)
    assert "per record" in str(guarantee)


def test_one_gaussian_lies_between_its_bounds_to_fifty_digits() -> None:
    """δ of the closed form at both ends, for noise from 0.001 to 1e6 and δ down to 1e-15."""
    import mpmath as mp
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    from adp2sgd.privacy.gaussian import gaussian_epsilon

    draw = random.Random(4)
    with mp.workdps(50):

        def exact(eps: float, noise: float) -> mp.mpf:
            e, z = mp.mpf(eps), mp.mpf(noise)
            return mp.ncdf(1 / (2 * z) - e * z) - mp.exp(e) * mp.ncdf(-1 / (2 * z) - e * z)

        for _ in range(100):
            noise, delta = 10 ** draw.uniform(-3, 6), 10 ** draw.uniform(-15, -0.1)
            found = gaussian_epsilon(noise, delta)
            assert exact(found.upper, noise) <= delta * (1 + (1e-9 if not found.upper else 0))
            assert not found.upper or exact(found.lower, noise) >= delta
            assert found.upper == pytest.approx(found.lower, rel=3e-8)
    for noise, delta in [(0.3, 1e-5), (1.0, 1e-12), (8.0, 1e-3), (50.0, 1e-6)]:
        assert gaussian_epsilon(noise, delta).upper == pytest.approx(get_epsilon_gaussian(noise, delta), rel=1e-6)
