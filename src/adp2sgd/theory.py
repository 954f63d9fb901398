"""The paper's statements as labelled functions: what it claims, under which conditions, and what that truly buys.

Names follow the code; docs/algorithm.md maps each symbol. Nothing here is a privacy guarantee: the paper's privacy
statements are computed faithfully so that they can be compared, and `neighbour_epsilon` says what they are worth.
Where the conditions of a statement fail, the answer names them and gives no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from adp2sgd.errors import ConfigError
from adp2sgd.privacy.accountant import Spent, check_delta
from adp2sgd.privacy.accountant import epsilon as epsilon_of
from adp2sgd.privacy.mechanism import SampledGaussian


def rho_bar(rho: float, learners: int) -> float:
    """ρ̄ of Theorem 1: how far mixing spreads one update before it dies out. `rho`: the spectral gap's ρ in [0, 1)."""
    if not 0 <= rho < 1:
        raise ConfigError(f"rho = {rho} is not in [0, 1); the graph must be connected")
    root = math.sqrt(rho)
    return (learners - 1) / learners * (1 / (1 - rho) + 2 * root / (1 - root) ** 2)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The constants of assumptions 1 and 2. All describe the true problem; in practice they are estimates.

    `smoothness` L: Lipschitz constant of the gradients. `sample_variance` ς²: of one record's gradient within a shard.
    `shard_variance` υ²: of the shards' gradients around the global one. `gap`: F(w⁰) − F*. `staleness` τ: the largest,
    in global steps. `rho`: per step (`Graph.rho`). `dimension` d: number of weights.
    """

    learners: int
    batch_size: int
    smoothness: float
    staleness: float
    rho: float
    gap: float
    sample_variance: float
    shard_variance: float
    dimension: int

    @property
    def rho_bar(self) -> float:
        return rho_bar(self.rho, self.learners)

    @property
    def _mixing(self) -> float:
        """τ(K−1)/K + ρ̄, which all constants share."""
        return self.staleness * (self.learners - 1) / self.learners + self.rho_bar

    def _noise(self, sigma: float) -> float:
        """ς²B + 6υ²B² + dσ²: variance of one noised *sum* of gradients."""
        batch = self.batch_size
        return self.sample_variance * batch + 6 * self.shard_variance * batch**2 + self.dimension * sigma**2


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """`bound` on the mean of E‖∇F(θ)‖² over the run; None where a condition fails, and `failed` says which."""

    bound: float | None
    c1: float
    c2: float | None
    c3: float | None
    rho_bar: float
    failed: tuple[str, ...]


def theorem_1(problem: Problem, *, lr: float, steps: int, sigma: float = 0.0) -> Convergence:
    """Theorem 1 (utility) for a constant learning rate on the *summed* gradient and noise σ per coordinate of the sum.

    Assumes unbiased gradients (clipping breaks that), bounded variances, independence of worker, batch and delay, and
    staleness at most τ. Unsound spots: p_k enters only through F, so it says nothing of a run whose shares drift.
    """
    p, eta = problem, lr
    k, b, smooth, tau = p.learners, p.batch_size, p.smoothness, p.staleness
    c1 = _c1(p, eta)
    failed, c2, c3 = [], None, None
    if c1 > 0:
        ebl = eta * b * smooth
        drift = ebl / k + 6 * ebl**2 / k**2 + 12 * ebl**3 * tau**2 / k**3
        c2 = (
            -drift * smooth * 4 * (eta * b) ** 2 * p._mixing / c1
            + eta * b / (2 * k)
            - (eta * b) ** 2 * smooth / k**2
            - 2 * (eta * b) ** 3 * smooth**2 * tau**2 / k**3
        )
        c3 = 0.5 + ebl * tau**2 / k + (6 * ebl**2 + k * ebl + 12 * ebl**3 * tau**2 / k) * 2 * p.rho_bar / c1
        failed += ["C2 ≥ 0"] * (c2 < 0) + ["C3 ≤ 1"] * (c3 > 1)
    else:
        failed.append("C1 > 0")
    bound = 2 * p.gap * k / (eta * steps * b) + 2 * eta * smooth / (b * k) * p._noise(sigma)
    return Convergence(bound=None if failed else bound, c1=c1, c2=c2, c3=c3, rho_bar=p.rho_bar, failed=tuple(failed))


def _c1(problem: Problem, lr: float) -> float:
    return 1 - 24 * (lr * problem.batch_size * problem.smoothness) ** 2 * problem._mixing


@dataclass(frozen=True, kw_only=True)
class Consensus:
    """`bound` on the mean over the run of E Σ p_k‖θ̂ − ŵ_k‖²; None where `failed` names a condition."""

    bound: float | None
    c1: float
    failed: tuple[str, ...]


def consensus_lemma(problem: Problem, *, lr: float, mean_gradient: float, sigma: float = 0.0) -> Consensus:
    """The lemma on T₃: how far the local models lie from their average, as the gradients see them.

    `mean_gradient`: the mean over the run of E‖Σ p_k ∇F_k(ŵ_k)‖². Same assumptions as Theorem 1; needs only C1 > 0.
    """
    p, c1 = problem, _c1(problem, lr)
    if c1 <= 0:
        return Consensus(bound=None, c1=c1, failed=("C1 > 0",))
    from_gradients = 4 * (lr * p.batch_size) ** 2 / c1 * p._mixing * mean_gradient
    return Consensus(bound=from_gradients + 2 * lr**2 * p._noise(sigma) * p.rho_bar / c1, c1=c1, failed=())


@dataclass(frozen=True, kw_only=True)
class Rate:
    """`least_steps`: the smallest T that Proposition 1 admits. `bound` holds for `steps` steps at learning rate `lr`.

    `theorem` is Theorem 1 at those settings: it shows where the proposition's T does not give what its proof needs.
    """

    least_steps: int
    steps: int
    lr: float
    bound: float | None
    failed: tuple[str, ...]
    theorem: Convergence


def proposition_1(problem: Problem, *, steps: int | None = None, sigma: float = 0.0) -> Rate:
    """Proposition 1: the rate O(1/√T) with η = K/(B√T), for `steps` steps or else for the fewest admitted.

    Unsound: the T it asks for does not always give C3 ≤ 1 (K=4, complete, τ=100: 1.068), so a failed condition of
    Theorem 1 voids the bound here too. The bound is on the sum's scale: σ² is divided by B².
    """
    p, least = problem, _least_steps(problem)
    taken = least if steps is None else steps
    lr = p.learners / (p.batch_size * math.sqrt(taken))
    theorem = theorem_1(p, lr=lr, steps=taken, sigma=sigma)
    failed = (("steps ≥ least_steps",) if taken < least else ()) + theorem.failed
    bound = (2 * p.gap + 2 * p.smoothness * p._noise(sigma) / p.batch_size**2) / math.sqrt(taken)
    return Rate(least_steps=least, steps=taken, lr=lr, bound=None if failed else bound, failed=failed, theorem=theorem)


def _least_steps(problem: Problem) -> int:
    k, tau, spread = problem.learners, problem.staleness, problem.rho_bar
    terms = [192 * problem._mixing, 1024 * k**2 * spread**2, 64 * tau**2 / k**2]
    if k > 1:
        stale = (8 * math.sqrt(6) * tau ** (2 / 3) + 8) ** 2
        terms.append(math.sqrt(k - 1) / k ** (1 / 6) * stale * (tau + spread * k / (k - 1)) ** (2 / 3))
    return max(1, math.ceil(problem.smoothness**2 * k**2 * max(terms)))


@dataclass(frozen=True, kw_only=True)
class PaperNoise:
    """Theorem 2's answer. `sigma` and `alpha` are what its formulas give; `epsilon` is the claim, None where it fails.

    Conditions: "first" is ε ≤ 10B²Tα/(3K²n²μ), "second" is α ≤ `alpha_bound`.
    """

    sigma: float
    alpha: float
    alpha_bound: float
    epsilon: float | None
    failed: tuple[str, ...]

    @property
    def conditions_hold(self) -> bool:
        return not self.failed


def theorem_2(
    *,
    epsilon: float,
    delta: float,
    learners: int,
    smallest_shard: int,
    steps: int,
    batch_size: int,
    mu: float | None = None,
    lipschitz: float = 1.0,
) -> PaperNoise:
    """Theorem 2 (privacy): the σ that it claims to give (ε, δ), replace-one, after `steps` global steps.

    Without `mu`: the least σ whose conditions hold, over 999 values of μ. Batches are drawn without replacement.
    Unsound in three ways. It bounds the sensitivity of the *mean* gradient by 2G/B, while Algorithm 1 noises the *sum*:
    σ is too small by B. Its rate B/(K·n) assumes that nobody knows which worker was active, but a neighbour sees whose
    model it receives. And it takes p_k = 1/K. See `neighbour_epsilon`.
    """
    _check_theorem_2(epsilon, mu, lipschitz)
    if min(learners, steps, batch_size) < 1 or batch_size > smallest_shard:
        raise ConfigError(
            f"learners = {learners}, steps = {steps}, batch_size = {batch_size} of {smallest_shard} records: "
            "each is at least 1, and a batch at most the smallest shard"
        )
    log_delta, total = math.log(1 / check_delta(delta)), learners * smallest_shard

    def at(mu: float) -> PaperNoise:
        alpha = log_delta / ((1 - mu) * epsilon) + 1
        share = total**2 * mu * epsilon
        alpha_bound = math.log(total * share / (share * batch_size + 5 * steps * alpha * batch_size**3))
        failed = ("first",) * (epsilon > 10 * batch_size**2 * steps * alpha / (3 * total**2 * mu))
        failed += ("second",) * (alpha > alpha_bound)
        return PaperNoise(
            sigma=lipschitz * math.sqrt(20 * steps * alpha / share),
            alpha=alpha,
            alpha_bound=alpha_bound,
            epsilon=None if failed else epsilon,
            failed=failed,
        )

    if mu is not None:
        return at(mu)
    return min((at(index / 1000) for index in range(1, 1000)), key=lambda one: (len(one.failed), one.sigma))


def _check_theorem_2(epsilon: float, mu: float | None, lipschitz: float) -> None:
    if mu is not None and not 0 < mu < 1:
        raise ConfigError(f"mu = {mu} is not in (0, 1); it splits ε between divergence and conversion, try 0.2")
    for name, value in (("epsilon", epsilon), ("lipschitz", lipschitz)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} = {value} is not positive and finite; use a value above 0")


def remark(*, epsilon: float, step: int, steps: int) -> float:
    """The Remark: ε√(t/T), claimed for the models at step t under Theorem 2's conditions.

    Unsound for a neighbour at small t: at ε=9 (K=16, the least σ) the first step is claimed to cost .037 and costs .19,
    because one step's ε is set by its own noise and rate, not by its share of the run.
    """
    if not 1 <= step <= steps:
        raise ConfigError(f"step = {step} is not in 1 … {steps}; use a step of the run")
    return math.sqrt(step / steps) * epsilon


@dataclass(frozen=True, kw_only=True)
class Utility:
    """Proposition 2: T, and the bound on E‖∇F(θ̃)‖² after it. `least_steps` is what Proposition 1 asks for."""

    steps: float
    bound: float | None
    least_steps: int
    privacy: PaperNoise
    failed: tuple[str, ...]


def proposition_2(
    problem: Problem, *, epsilon: float, delta: float, smallest_shard: int, mu: float, lipschitz: float = 1.0
) -> Utility:
    """Proposition 2 (utility under privacy). Needs Proposition 1's T and Theorem 2's conditions at its own T.

    Unsound: at the paper's sizes the two ask for incompatible T (ResNet-18, ε=9: 1.7e14 against 654); C4 leaves out the
    1 in α, so that the bound lies below the one it is derived from; it inherits all that is wrong with Theorem 2. Its θ̃
    is printed as a sum of models where a mean is meant.
    """
    p = problem
    size = p.gap + p.smoothness * (p.sample_variance / p.batch_size + 6 * p.shard_variance)
    total, log_delta = p.learners * smallest_shard, math.log(1 / check_delta(delta))
    steps = 2 * size * (total * epsilon) ** 2 / (40 * p.dimension * p.smoothness * lipschitz**2 * log_delta)
    privacy = theorem_2(
        epsilon=epsilon,
        delta=delta,
        learners=p.learners,
        smallest_shard=smallest_shard,
        steps=max(1, round(steps)),
        batch_size=p.batch_size,
        mu=mu,
        lipschitz=lipschitz,
    )
    least = _least_steps(p)
    failed = ("Proposition 1: steps ≥ least_steps",) * (steps < least)
    failed += tuple(f"Theorem 2: {name} condition" for name in privacy.failed)
    c4 = 4 * math.sqrt(5) * (1 + 1 / (p.batch_size**2 * mu * (1 - mu)))
    bound = c4 * lipschitz * math.sqrt(p.dimension * p.smoothness * size * log_delta) / (total * epsilon)
    return Utility(steps=steps, bound=None if failed else bound, least_steps=least, privacy=privacy, failed=failed)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A Rényi divergence of order `alpha`; None where `failed` names a condition of the lemma."""

    alpha: float
    value: float | None
    failed: tuple[str, ...] = ()


def rdp_gaussian(*, alpha: float, sensitivity: float, sigma: float) -> Divergence:
    """Lemma (Gaussian mechanism): α·Δ²/(2σ²). Exact for noise N(0, σ²) on a query of that sensitivity."""
    return Divergence(alpha=alpha, value=alpha * sensitivity**2 / (2 * sigma**2))


def rdp_subsampled_gaussian(*, alpha: float, rate: float, sensitivity: float, sigma: float) -> Divergence:
    """Lemma (subsampled Gaussian, uniform without replacement, replace-one): 5γ²αΔ²/σ².

    Needs σ²/Δ² ≥ 1.5 and α ≤ log(1/(γ(1 + σ²/Δ²))). Not for Poisson batches, which is what this package draws.
    """
    ratio = (sigma / sensitivity) ** 2
    failed = ("σ²/Δ² ≥ 1.5",) * (ratio < 1.5)
    failed += ("α ≤ log(1/(γ(1 + σ²/Δ²)))",) * (alpha > math.log(1 / (rate * (1 + ratio))))
    return Divergence(alpha=alpha, value=None if failed else 5 * rate**2 * alpha / ratio, failed=failed)


def rdp_composition(parts: Iterable[Divergence]) -> Divergence:
    """Lemma (composition): divergences of one order add up, also when each step may depend on the ones before."""
    parts = tuple(parts)
    orders = {part.alpha for part in parts}
    if len(orders) != 1:
        raise ConfigError(f"orders {sorted(orders)} differ; compose divergences of one order alpha")
    failed = tuple(dict.fromkeys(name for part in parts for name in part.failed))
    value = None if failed else sum(part.value or 0.0 for part in parts)
    return Divergence(alpha=orders.pop(), value=value, failed=failed)


def rdp_to_dp(divergence: Divergence, *, delta: float) -> float | None:
    """Lemma (conversion): ε = divergence + log(1/δ)/(α − 1). Sound but loose; None where the divergence is."""
    if divergence.value is None:
        return None
    return divergence.value + math.log(1 / check_delta(delta)) / (divergence.alpha - 1)


@dataclass(frozen=True, kw_only=True)
class NeighbourEpsilon:
    """What σ buys a learner against a neighbour who sees whose model it receives, under three readings of the paper."""

    on_sum: Spent
    on_mean: Spent
    on_mean_replace_one: Spent


def neighbour_epsilon(
    sigma: float,
    *,
    delta: float,
    learners: int,
    smallest_shard: int,
    steps: int,
    batch_size: int,
    lipschitz: float = 1.0,
) -> NeighbourEpsilon:
    """ε by our PLD accountant, with the learner's own rate B/n and its own T/K steps.

    `on_sum`: noise on the sum, as Algorithm 1 says; `on_mean`: on the mean, which Theorem 2 has in mind; both with
    Poisson batches and add-remove. `on_mean_replace_one`: the theorem's own terms, batches of fixed size without
    replacement, where a replaced record moves the sum by 2G. Assumes gradients of norm at most G = `lipschitz`.
    """
    rate, own_steps = min(1.0, batch_size / smallest_shard), round(steps / learners)

    def spent(noise: float) -> Spent:
        return epsilon_of(SampledGaussian(noise, rate), own_steps, delta, "pld")

    # Without replacement, the worst replaced record looks like an added one at twice the distance.
    on_sum, replaced = sigma / lipschitz, spent(sigma / lipschitz * batch_size / 2)
    return NeighbourEpsilon(
        on_sum=spent(on_sum),
        on_mean=spent(on_sum * batch_size),
        on_mean_replace_one=replace(replaced, adjacency="replace-one"),
    )
