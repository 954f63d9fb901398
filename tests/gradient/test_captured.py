"""Steps that are captured once and replayed: what may be, what may not, and that filling rows up changes nothing."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from adp2sgd import device
from adp2sgd.device import CapturedGraphs, repeatable
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import bookkeeping
from adp2sgd.gradient.bookkeeping import PAD, BookKeeping
from adp2sgd.gradient.choose import Automatic, build
from adp2sgd.gradient.loop import Loop
from adp2sgd.models import MODELS
from adp2sgd.models.blocks import ImageClassifier
from adp2sgd.task import cross_entropy

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def images(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.randint(0, 10, (n,), generator=generator)


def network() -> FlatModel:
    torch.manual_seed(0)
    return FlatModel(MODELS["cnn"](size=8, channels=1, norm="group"))


class Moody(nn.Module):
    """Chooses in Python: a tape would choose once for ever."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else 2 * x


def test_only_modules_that_do_the_same_at_every_call_are_captured() -> None:
    assert repeatable(MODELS["resnet18"](norm="group"), cross_entropy)
    assert not repeatable(nn.Sequential(nn.Linear(2, 2), Moody()), cross_entropy)
    assert not repeatable(nn.Linear(2, 2), lambda outputs, targets: outputs.sum(1))
    calm = Moody()
    calm.repeatable = True  # type: ignore[assignment]
    assert repeatable(nn.Sequential(calm), nn.CrossEntropyLoss(reduction="none"))


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("records", [1, PAD - 1, PAD, PAD + 3])
def test_rows_that_fill_up_a_batch_add_nothing(records: int, copies: int) -> None:
    model = network()
    inputs, targets = images(records * copies)
    targets = targets[::copies].repeat_interleave(copies)
    clipper = BookKeeping(model, cross_entropy, copies=copies)
    given = (inputs, targets, *clipper._scalars(0.5, records))
    padded = clipper._padded(given, -records % PAD)
    assert len(padded[0]) // copies % PAD == 0
    total, norms = clipper._sum(*padded)
    expected = Loop(model, cross_entropy, copies=copies).clipped_sum(inputs, targets, 0.5)
    torch.testing.assert_close(total.double(), expected.total, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norms[:records], expected.norms, rtol=1e-4, atol=1e-6)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have clippers take batches as a GPU would, on a CPU; gives the rows of each pass."""
    passes: list[int] = []

    def work(self: BookKeeping, inputs: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        passes.append(len(inputs))
        return plain(self, inputs, *rest)

    plain = BookKeeping._sum
    monkeypatch.setattr(BookKeeping, "_sum", work)
    monkeypatch.setattr(bookkeeping, "on_gpu", lambda device: True)
    return passes


@pytest.mark.parametrize("copies", [1, 2])
def test_all_passes_have_one_size_whatever_the_batch(copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = as_on_a_gpu(monkeypatch)
    clipper = BookKeeping(network(), cross_entropy, copies=copies, expected=30)
    for records in (1, 16, 30, 48, 60, 97):
        inputs, targets = images(records * copies)
        targets = targets[::copies].repeat_interleave(copies)
        found = clipper.clipped_sum(inputs, targets, 0.5)
        expected = Loop(clipper.model, cross_entropy, copies=copies).clipped_sum(inputs, targets, 0.5)
        torch.testing.assert_close(found.total.double(), expected.total, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.norms, expected.norms, rtol=1e-4, atol=1e-6)
    assert set(passes) == {48 * copies}  # 30 and two deviations, filled up to a multiple of 16


@pytest.mark.parametrize(
    ("expected", "piece", "size"), [(60, 128, 80), (256, 128, 96), (30, 20, 16), (30, 15, 15), (1, None, 16)]
)
def test_a_pass_has_room_for_most_batches_or_an_even_share_of_them(
    expected: int, piece: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    assert BookKeeping(network(), cross_entropy, piece=piece, expected=expected)._at_once == size


def test_a_record_that_is_not_finite_does_not_change_how_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = as_on_a_gpu(monkeypatch)
    clipper = BookKeeping(network(), cross_entropy, expected=30)
    inputs, targets = images(20)
    without = clipper.clipped_sum(inputs[1:], targets[1:], 0.5)
    inputs[0] = float("nan")
    found = clipper.clipped_sum(inputs, targets, 0.5)
    assert torch.equal(found.total, without.total)
    assert torch.equal(found.norms[1:], without.norms)
    assert torch.isinf(found.norms[0])
    assert set(passes) == {48}


def test_with_dropout_too_a_huge_record_does_not_change_the_size_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = as_on_a_gpu(monkeypatch)
    torch.manual_seed(0)
    clipper = BookKeeping(FlatModel(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2))), cross_entropy, expected=30)
    clipper.model.module.train()
    inputs, targets = torch.randn(20, 8), torch.zeros(20, dtype=torch.int64)
    inputs[0] = 0
    inputs[0, 0] = 3e38  # twice that, where it is not dropped, is infinite
    for _ in range(20):
        clipper.clipped_sum(inputs, targets, 1.0)
    assert set(passes) == {48}


class Counting(nn.Module):
    """Counts its calls, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(x, 0.5)


def test_a_trial_leaves_the_model_and_the_generators_as_they_are() -> None:
    model = FlatModel(nn.Sequential(Counting(), nn.Linear(8, 2)))
    before = torch.get_rng_state()
    clipper = build(model, cross_entropy, piece=64)
    assert isinstance(clipper, Automatic)
    clipper.settle(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64))
    assert clipper.chosen is clipper.bookkeeping
    assert torch.equal(torch.get_rng_state(), before)
    assert model.module[0].calls == 0


@pytest.mark.gpu
@NEEDS_GPU
def test_replayed_sums_equal_the_loop() -> None:
    """Clip norm, weights, batch size and data change between replays; nothing of the tape may stick."""
    model = network()
    on_gpu = FlatModel(MODELS["cnn"](size=8, channels=1, norm="group"), "cuda")
    clipper = BookKeeping(on_gpu, cross_entropy)
    generator = torch.Generator().manual_seed(1)
    for round_ in range(4 * (device.SETTLED + 2)):
        model.weights.add_(torch.randn(len(model.weights), generator=generator), alpha=0.01)
        on_gpu.weights.copy_(model.weights)
        inputs, targets = images(PAD + round_ % 4)
        clip = 0.1 * (1 + round_ % 3)
        found = clipper.clipped_sum(inputs.cuda(), targets.cuda(), clip)
        expected = Loop(model, cross_entropy).clipped_sum(inputs, targets, clip)
        torch.testing.assert_close(found.total.cpu().double(), expected.total, rtol=1e-3, atol=1e-4 * clip)
        torch.testing.assert_close(found.norms.cpu(), expected.norms, rtol=1e-3, atol=1e-4)
    assert clipper._captured[True]._graphs


@pytest.mark.gpu
@NEEDS_GPU
def test_a_record_that_is_not_finite_stays_out_of_a_replayed_sum() -> None:
    model = network()
    model = FlatModel(model.module, "cuda")
    clipper = BookKeeping(model, cross_entropy)
    inputs, targets = (t.cuda() for t in images(PAD))
    for _ in range(device.SETTLED + 2):
        clipper.clipped_sum(inputs, targets, 1.0)
    assert clipper._captured[True]._graphs
    expected = clipper.clipped_sum(inputs[1:], targets[1:], 1.0)
    bad = inputs.clone()
    bad[0] = float("nan")
    expected_total = expected.total.clone()
    found = clipper.clipped_sum(bad, targets, 1.0)
    assert torch.isinf(found.norms[0])
    torch.testing.assert_close(found.total, expected_total, rtol=1e-4, atol=1e-5)


def test_a_filling_row_that_dropout_makes_infinite_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill up copy the first record but draw their own dropout, and 0 times infinity is no number."""
    model = network()
    clipper = BookKeeping(model, cross_entropy)
    given = images(PAD - 1)
    expected = clipper.clipped_sum(*given, 1.0)

    def replayed(inputs: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        norms = torch.ones(len(inputs))
        norms[-1] = float("inf")
        return torch.full_like(model.weights, float("nan")), norms

    monkeypatch.setattr(clipper, "_captured", {True: replayed})
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr("adp2sgd.gradient.bookkeeping.laid_out", lambda inputs: inputs)
    found = clipper.clipped_sum(*given, 1.0)
    torch.testing.assert_close(found.total, expected.total)


def test_a_batch_of_another_size_is_never_replayed() -> None:
    seen: list[int] = []
    work = CapturedGraphs(lambda inputs, targets: seen.append(len(inputs)))
    for size in (4, 4, 4, 4, 3, 4, 0):
        work(torch.zeros(size, 2), torch.zeros(size))
    assert seen == [4, 4, 4, 4, 3, 4, 0]


@pytest.mark.gpu
@NEEDS_GPU
def test_capturing_goes_on_after_too_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "MOST_GRAPHS", 1)
    doubled = CapturedGraphs(lambda x: 2 * x)
    for size in (3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4):
        x = torch.rand(size, device="cuda")
        torch.testing.assert_close(doubled(x), 2 * x)
    assert len(doubled._graphs) == 1


def test_every_classifier_of_a_process_is_compiled_and_every_batch_size_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All share one `forward`, of which torch by itself makes eight compiled forms and then silently none."""
    made: list[list[object]] = []  # the inputs of each compiled form

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        made.append(inputs)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", torch._dynamo.config.recompile_limit)
    torch._dynamo.reset()
    for layers in range(1, 11):
        run = device.compiled(ImageClassifier([nn.Conv2d(3, 3, 1) for _ in range(layers)], 3, 2), fixed=True)
        for batch in (4, 8) if layers == 10 else (4,):
            run(torch.zeros(batch, 3, 2, 2))
    assert len(made) == 11
    assert all(isinstance(each, Tensor) for inputs in made for each in inputs), "a size was left open"
    torch._dynamo.reset()
