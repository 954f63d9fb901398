"""Noise and batch membership: the right distribution, from the right place, never twice."""

import copy
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from scipy import stats

from adp2sgd.errors import PrivacyError, RunError
from adp2sgd.randomness.noise import GRID_BITS, PIECE, NoiseSource

FALSE_ALARM = 1e-3  # of each statistical test below, had its seed not been fixed


def source(purpose="test"):
    return NoiseSource.from_seed(11, 0, purpose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_million_draws_are_normal_at_the_stated_scale(dtype):
    vector = torch.full((1_000_000,), 5.0, dtype=dtype)
    source(str(dtype)).add_normal(vector, 3.0)
    assert stats.kstest(((vector.double() - 5) / 3).numpy(), "norm").pvalue > FALSE_ALARM


@pytest.mark.parametrize("threshold", [3.0, 4.0, 4.7])
def test_tails_hold_what_they_should(threshold):
    size = 2_000_000
    beyond = int((source("tails").normal(size).abs() > threshold).sum())
    assert stats.binomtest(beyond, size, 2 * stats.norm.sf(threshold)).pvalue > FALSE_ALARM


def test_draws_are_uncorrelated():
    draws = source("pairs").normal(PIECE)
    cosines, sines = draws.view(2, -1)  # one radius each
    for left, right in ((draws[:-1], draws[1:]), (cosines, sines), (cosines.abs(), sines.abs())):
        assert stats.pearsonr(left.numpy(), right.numpy()).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("word", "radius"), [(0, math.sqrt(130 * math.log(2))), (2**63 - 1, math.sqrt(math.log(4)))])
def test_extreme_words_give_finite_normals_beyond_nine_sigma(monkeypatch, word, radius):
    def fill(self, out):
        out[:] = word.to_bytes(8, "little") * (len(out) // 8)

    monkeypatch.setattr(NoiseSource, "_next_bytes", fill)
    draws = source().normal(10)
    assert torch.hypot(draws[:5], draws[5:]).allclose(torch.tensor(radius, dtype=torch.float64))


def test_largest_word_gives_zero_and_not_nan(monkeypatch):
    monkeypatch.setattr(NoiseSource, "_next_bytes", lambda self, out: out.__setitem__(slice(None), b"\xff" * len(out)))
    assert source().normal(7).abs().max() == 0


@pytest.mark.parametrize("size", [0, 1, 2, 7, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_every_element_gets_its_own_noise(size):
    draws = source().normal(size)
    assert len(draws) == size
    assert len(draws.unique()) == size  # a repeated float64 normal has probability below 1e-5 here
    vector = torch.zeros(size)
    source().add_normal(vector, 1.0)
    assert (vector.double() - draws).abs().max() <= 2.0**-GRID_BITS if size else len(vector) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.0317, 250.0])
def test_sums_are_rounded_once_onto_a_grid_that_ignores_the_input(dtype, scale):
    inputs = source("inputs").normal(10_001).mul_(20 * scale).to(dtype)
    noise = source().normal(len(inputs)) * scale
    vector = inputs.clone()
    source().add_normal(vector, scale)
    grid = 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS)
    assert torch.equal(vector.double() / grid, (vector.double() / grid).round())
    assert (vector.double() - (inputs.double() + noise)).abs().max() <= grid / 2 * (1 + 1e-9)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_no_noise_is_refused(scale):
    with pytest.raises(PrivacyError, match="noise scale"):
        source().add_normal(torch.zeros(3), scale)


def test_poisson_batches_have_the_stated_rate_for_each_record_and_pair():
    n, rate, trials = 50, 0.3, 4000
    drawn = source("batches")
    member = torch.zeros(trials, n)
    for row in member:
        row[drawn.bernoulli(n, rate)] = 1
    counts = member.sum(0).numpy()
    assert stats.chisquare(counts, f_exp=[counts.mean()] * n).pvalue > FALSE_ALARM
    assert stats.binomtest(int(member.sum()), n * trials, rate).pvalue > FALSE_ALARM
    spread = member.sum(1).var().item() / (n * rate * (1 - rate))  # 1 only if records come independently
    assert abs(spread - 1) < stats.norm.isf(FALSE_ALARM / 2) * math.sqrt(2 / trials)


def test_membership_compares_64_bits_with_the_rate(monkeypatch):
    rate = 0.08192
    bound = int(rate * 2.0**64)
    for unsigned, member in ((bound - 1, True), (bound, False), (0, True), (2**64 - 1, False)):
        word = torch.tensor([unsigned - 2**63])
        monkeypatch.setattr(NoiseSource, "_words", lambda self, n, word=word: word.expand(n))
        assert len(source().bernoulli(5, rate)) == (5 if member else 0)


def test_batches_at_the_limits():
    assert source().bernoulli(9, 1.0).tolist() == list(range(9))
    assert len(source().bernoulli(9, 0.0)) == 0
    assert len(source().bernoulli(0, 0.5)) == 0
    large = source().bernoulli(3 * PIECE, 0.5)
    assert bool((large.diff() > 0).all())
    assert large.max() >= 2 * PIECE
    for rate in (1.01, -0.1, math.nan):
        with pytest.raises(PrivacyError, match="sample_rate"):
            source().bernoulli(9, rate)


def test_permutations_are_uniform():
    drawn = source("orders")
    orders = [tuple(drawn.permutation(4).tolist()) for _ in range(4800)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_a_seed_gives_the_same_draws_and_says_so():
    assert source().seeded
    assert "seed 11" in source().name
    assert torch.equal(source().normal(5), source().normal(5))
    others = [(12, 0, "test"), (11, 1, "test"), (11, "0", "test"), (11, 0, "tests"), (1, 10, "test")]
    draws = [NoiseSource.from_seed(*other).normal(1).item() for other in [(11, 0, "test"), *others]]
    assert len(set(draws)) == 6


def test_fresh_sources_share_nothing_across_processes_and_starts():
    first = NoiseSource.fresh()
    assert not first.seeded
    assert first.name == "AES-256-CTR, operating-system entropy"
    script = "from adp2sgd.randomness.noise import NoiseSource as N; print(N.fresh().normal(1).item())"
    starts = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in "12"]
    draws = [float(start.stdout) for start in starts]
    draws += [first.normal(1).item(), first.normal(1).item(), NoiseSource.fresh().normal(1).item()]
    assert len(set(draws)) == 5


def test_generators_for_augmentation_differ():
    drawn = source()
    assert drawn.torch_generator().initial_seed() != drawn.torch_generator().initial_seed()


def test_the_number_of_threads_is_put_back_even_after_a_failure(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        source().add_normal(torch.zeros(5), 1.0)
        assert torch.get_num_threads() == 3
        monkeypatch.setattr(NoiseSource, "_next_bytes", lambda self, out: out.release() or out[0])
        with pytest.raises(ValueError, match="released"):
            source().normal(5)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied_or_stored(clone):
    with pytest.raises(RunError, match="fresh"):
        clone(NoiseSource.fresh())


def test_its_key_is_not_shown():
    key = bytes(range(32))
    shown = repr(NoiseSource(key, "test", seeded=True)) + str(vars(NoiseSource(key, "test", seeded=True)))
    assert repr(key)[2:-1] not in shown
    assert key.hex() not in shown


def test_a_forked_child_is_refused_and_the_parent_goes_on():
    drawn = NoiseSource.fresh()
    child = os.fork()
    if child == 0:
        refused = 0
        for draw in (
            lambda: drawn.normal(2),
            lambda: drawn.bernoulli(3, 0.5),
            lambda: drawn.add_normal(torch.zeros(2), 1),
        ):
            try:
                draw()
            except RunError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert len(drawn.normal(2)) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_normals_are_float64_of_the_device_and_the_name_says_so():
    drawn = source("gpu")
    vector = torch.full((5_000_001,), 5.0, device="cuda")
    drawn.add_normal(vector, 3.0)
    assert stats.kstest(((vector.double() - 5) / 3).cpu().numpy(), "norm").pvalue > FALSE_ALARM
    assert drawn.normal(3, "cuda").dtype == torch.float64
    assert "cuda generator" in drawn.name
    assert drawn.name == drawn.name_on("cuda")


def test_noise_may_go_elsewhere_and_be_divided():
    """The same draws in place and into another vector of another type; what was read stays as it was."""
    vector = torch.linspace(-5, 5, 70_001, dtype=torch.float64)
    place, kept = torch.empty(len(vector)), vector.clone()
    source().add_normal(vector, 3.0, out=place, divisor=8.0)
    assert torch.equal(vector, kept)
    source().add_normal(vector, 3.0)
    assert torch.equal(place, (vector / 8).float())
