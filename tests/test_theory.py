"""The paper's formulas at worked points, and what PAPER.md says is wrong with them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from adp2sgd import theory
from adp2sgd.errors import ConfigError
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.mechanism import SampledGaussian

PAPER = {"delta": 1e-5, "learners": 16, "smallest_shard": 3125, "steps": 58594, "batch_size": 256}
LARGER = PAPER | {"learners": 64, "steps": 234375}
RESNET = theory.Problem(
    learners=16, batch_size=256, smoothness=1, staleness=16, rho=1 - 1 / 15, gap=math.log(10),
    sample_variance=1, shard_variance=1, dimension=11_173_962,
)  # fmt: skip
SMALL = theory.Problem(
    learners=4, batch_size=8, smoothness=2, staleness=3, rho=1 - 1 / 3, gap=1.5,
    sample_variance=0.5, shard_variance=0.25, dimension=10,
)  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "mu", "alpha", "alpha_bound", "sigma", "failed"),
    [
        (1, 0.5, 24.026, -0.639, 0.15008, ("second",)),
        (9, 0.2, 2.599, 2.782, 0.02602, ()),
        (12, 0.1, 2.066, 2.620, 0.02841, ()),
        (50, 0.5, 1.461, 4.904, 0.00523, ("first",)),
    ],
)
def test_theorem_2(
    claim: float, mu: float, alpha: float, alpha_bound: float, sigma: float, failed: tuple[str, ...]
) -> None:
    answer = theory.theorem_2(epsilon=claim, mu=mu, **PAPER)
    assert answer.alpha == pytest.approx(alpha, abs=5e-4)
    assert answer.alpha_bound == pytest.approx(alpha_bound, abs=5e-4)
    assert answer.sigma == pytest.approx(sigma, abs=5e-6)
    assert answer.failed == failed
    assert answer.conditions_hold == (not failed)
    assert answer.epsilon == (None if failed else claim)


def test_theorem_2_is_its_own_lemmas() -> None:
    """σ from the theorem, put through the lemmas at the rate B/(K·n) and sensitivity 2G/B, gives back the claim."""
    answer = theory.theorem_2(epsilon=9, mu=0.2, **PAPER)
    step = theory.rdp_subsampled_gaussian(alpha=answer.alpha, rate=256 / 50000, sensitivity=2 / 256, sigma=answer.sigma)
    total = theory.rdp_composition([step] * PAPER["steps"])
    assert theory.rdp_to_dp(total, delta=1e-5) == pytest.approx(9, rel=1e-9)


@pytest.mark.parametrize(("claim", "setting", "truth"), [(12, PAPER, 15.3), (5, LARGER, 13.0)])
def test_a_neighbour_learns_more_than_theorem_2_claims(claim: float, setting: dict[str, int], truth: float) -> None:
    answer = theory.theorem_2(epsilon=claim, **setting)
    assert answer.conditions_hold
    real = theory.neighbour_epsilon(answer.sigma, **setting)
    assert real.on_mean_replace_one.epsilon == pytest.approx(truth, rel=0.01)
    assert real.on_mean_replace_one.epsilon > claim
    assert real.on_mean_replace_one.adjacency == "replace-one"
    assert real.on_sum.epsilon > 1000 * claim  # as Algorithm 1 is written, nothing is protected


def test_the_least_sigma_is_least() -> None:
    best = theory.theorem_2(epsilon=9, **PAPER)
    tried = [theory.theorem_2(epsilon=9, mu=mu / 50, **PAPER) for mu in range(1, 50)]
    assert best.conditions_hold
    assert best.sigma <= min(one.sigma for one in tried if one.conditions_hold)
    assert not theory.theorem_2(epsilon=0.01, **PAPER).conditions_hold


def test_remark_fails_at_the_first_step() -> None:
    assert theory.remark(epsilon=9, step=1, steps=58594) == pytest.approx(0.0372, abs=5e-5)
    sigma = theory.theorem_2(epsilon=9, **PAPER).sigma
    one_step = theory.neighbour_epsilon(sigma, **(PAPER | {"steps": 16}))
    assert one_step.on_mean_replace_one.epsilon == pytest.approx(0.19, abs=0.005)
    assert theory.remark(epsilon=9, step=58594, steps=58594) == 9
    with pytest.raises(ConfigError, match="step = 0"):
        theory.remark(epsilon=9, step=0, steps=10)


def test_rho_bar() -> None:
    assert theory.rho_bar(0.0, 2) == 0.5
    assert theory.rho_bar(0.25, 4) == pytest.approx(0.75 * (4 / 3 + 4))
    with pytest.raises(ConfigError, match=r"rho = 1.0 is not in \[0, 1\)"):
        theory.rho_bar(1.0, 4)


def test_theorem_1_by_hand() -> None:
    """Each constant written out again, term by term as in the paper."""
    lr, steps, sigma = 1e-5, 1000, 0.3
    k, b, smooth, tau, spread = 4, 8, 2, 3, theory.rho_bar(1 - 1 / 3, 4)
    mix = tau * 3 / 4 + spread
    c1 = 1 - 24 * lr**2 * b**2 * smooth**2 * mix
    c2 = (
        -(lr * b * smooth**2 / k + 6 * lr**2 * b**2 * smooth**3 / k**2 + 12 * lr**3 * b**3 * smooth**4 * tau**2 / k**3)
        * 4 * lr**2 * b**2 * mix / c1
        + lr * b / (2 * k) - lr**2 * b**2 * smooth / k**2 - 2 * lr**3 * b**3 * smooth**2 * tau**2 / k**3
    )  # fmt: skip
    c3 = (
        0.5 + lr * b * smooth * tau**2 / k
        + (6 * lr**2 * b**2 * smooth**2 + lr * k * b * smooth + 12 * lr**3 * b**3 * smooth**3 * tau**2 / k)
        * 2 * spread / c1
    )  # fmt: skip
    variance = 0.5 * b + 6 * 0.25 * b**2 + 10 * sigma**2
    answer = theory.theorem_1(SMALL, lr=lr, steps=steps, sigma=sigma)
    assert (answer.c1, answer.c2, answer.c3) == pytest.approx((c1, c2, c3), rel=1e-12)
    assert answer.bound == pytest.approx(2 * 1.5 * k / (lr * steps * b) + 2 * lr * smooth / (b * k) * variance)
    assert answer.failed == ()
    lemma = theory.consensus_lemma(SMALL, lr=lr, mean_gradient=0.7, sigma=sigma)
    assert lemma.bound == pytest.approx(
        4 * lr**2 * b**2 / c1 * mix * 0.7 + 2 * lr**2 * variance * spread / c1, rel=1e-12
    )


def test_failed_conditions_give_names_and_no_bound() -> None:
    too_fast = theory.theorem_1(SMALL, lr=0.1, steps=1000)
    assert (too_fast.bound, too_fast.c2, too_fast.failed) == (None, None, ("C1 > 0",))
    assert theory.consensus_lemma(SMALL, lr=0.1, mean_gradient=1).failed == ("C1 > 0",)
    slower = theory.theorem_1(SMALL, lr=1e-3, steps=1000)
    assert (slower.bound, slower.failed) == (None, ("C3 ≤ 1",))
    assert theory.theorem_1(SMALL, lr=1.99e-3, steps=1000).failed == ("C2 ≥ 0", "C3 ≤ 1")
    short = theory.proposition_1(SMALL, steps=100)
    assert short.bound is None
    assert "steps ≥ least_steps" in short.failed
    lemma = theory.rdp_subsampled_gaussian(alpha=30, rate=0.5, sensitivity=1, sigma=1)
    assert lemma.value is None
    assert len(lemma.failed) == 2
    assert theory.rdp_to_dp(theory.rdp_composition([lemma, lemma]), delta=1e-5) is None


def test_proposition_1_follows_from_theorem_1() -> None:
    rate = theory.proposition_1(SMALL, sigma=0.3)
    assert rate.failed == ()
    assert rate.bound == pytest.approx(rate.theorem.bound, rel=1e-9)
    assert theory.proposition_1(SMALL, steps=4 * rate.steps, sigma=0.3).bound == pytest.approx(rate.bound / 2)
    assert theory.proposition_1(replace(SMALL, learners=1, rho=0.0)).failed == ()


def test_proposition_1_does_not_always_give_its_c3() -> None:
    problem = replace(SMALL, smoothness=1, staleness=100)
    answer = theory.proposition_1(problem)
    assert answer.theorem.c3 == pytest.approx(1.068, abs=5e-4)
    assert (answer.bound, answer.failed) == (None, ("C3 ≤ 1",))


def test_propositions_ask_for_incompatible_steps() -> None:
    answer = theory.proposition_2(RESNET, epsilon=9, delta=1e-5, smallest_shard=3125, mu=0.2)
    assert answer.steps == pytest.approx(654, abs=0.5)
    assert answer.least_steps == pytest.approx(1.7e14, rel=0.01)
    assert answer.bound is None
    assert answer.failed == ("Proposition 1: steps ≥ least_steps", "Theorem 2: first condition")


def test_proposition_2_against_proposition_1() -> None:
    """It is Proposition 1 at its own T and Theorem 2's σ, but for the 1 in α that C4 leaves out."""
    easy = theory.Problem(
        learners=2, batch_size=1, smoothness=1, staleness=0, rho=0.0, gap=10.0,
        sample_variance=0, shard_variance=0, dimension=13,
    )  # fmt: skip
    answer = theory.proposition_2(easy, epsilon=9, delta=1e-5, smallest_shard=10_000, mu=0.2)
    assert answer.failed == ()
    rate = theory.proposition_1(easy, steps=round(answer.steps), sigma=answer.privacy.sigma)
    assert rate.failed == ()
    assert answer.bound is not None
    assert rate.bound is not None
    alpha = answer.privacy.alpha
    repaired = answer.bound * (1 + alpha / (alpha - 1) / 0.16) / (1 + 1 / 0.16)
    assert rate.bound == pytest.approx(repaired, rel=1e-6)
    assert rate.bound > 1.4 * answer.bound


def test_rdp_lemmas() -> None:
    assert theory.rdp_gaussian(alpha=4, sensitivity=2, sigma=3).value == pytest.approx(4 * 4 / 18)
    # The lemma bounds what it speaks of: below a sampled Gaussian's true divergence it would be void.
    sampled = theory.rdp_subsampled_gaussian(alpha=2, rate=0.001, sensitivity=1, sigma=2)
    assert sampled.value == pytest.approx(5 * 1e-6 * 2 / 4)
    assert sampled.value > math.log1p(1e-6 * math.expm1(1 / 4))  # exact at order 2
    claimed = theory.rdp_to_dp(theory.rdp_gaussian(alpha=5, sensitivity=1, sigma=1), delta=1e-5)
    assert claimed is not None
    assert claimed > epsilon(SampledGaussian(1.0, 1.0), 1, 1e-5).epsilon
    with pytest.raises(ConfigError, match="differ"):
        theory.rdp_composition([theory.rdp_gaussian(alpha=a, sensitivity=1, sigma=1) for a in (2, 3)])
    with pytest.raises(ConfigError, match="mu = 1"):
        theory.theorem_2(epsilon=1, mu=1, **PAPER)
