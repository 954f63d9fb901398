"""The learner and the flat model, without any engine."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from adp2sgd import models
from adp2sgd.config import Config, Privacy
from adp2sgd.data.records import Records
from adp2sgd.engine.setup import prepare
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.privatize import Gradient
from adp2sgd.task import Task
from adp2sgd.tasks import resolve
from conftest import make_learner


class Odd(nn.Module):
    """Tied weights, a frozen layer and BatchNorm in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(self.frozen(inputs)))))


def odd_task() -> Task:
    stream = torch.Generator().manual_seed(0)
    records = Records(torch.randn(40, 4, generator=stream), torch.randint(3, (40,), generator=stream))
    torch.manual_seed(3)
    module = Odd()
    return Task(model=lambda: module, train=records, test=records)


def test_parameters_are_views_into_one_vector() -> None:
    torch.manual_seed(0)
    model = FlatModel(Odd())
    assert len(model.weights) == 16 + 4 + 4 + 12 + 3  # tied once, frozen not at all
    assert len(model.buffers) == 8  # running mean and variance; the integer counter stays local
    model.weights.fill_(0.5)
    assert all(bool((p == 0.5).all()) for p in model.module.parameters() if p.requires_grad)
    assert not any(bool((p == 0.5).all()) for p in model.module.parameters() if not p.requires_grad)
    model.buffers.fill_(2.0)
    assert bool((model.module.get_buffer("norm.running_var") == 2).all())
    model.module(torch.randn(5, 4)).square().sum().backward()
    assert model.grad.count_nonzero() > 20
    assert set(model.named_views(model.weights)) == {
        "first.weight",
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    }


def test_tensors_of_an_odd_size_misalign_no_other() -> None:
    for name in ("efficientnet_b0", "shufflenet"):
        module = models.build(name)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        model = FlatModel(module)
        even = [piece for piece in model.slices + model.buffer_slices if piece.shape.numel() % 4 == 0]
        assert even
        assert all(piece.start % 4 == 0 for piece in even)
        assert sum(piece.shape.numel() for piece in model.slices) == len(model.weights)
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_mixed_dtypes_are_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match="one dtype"):
        FlatModel(module)
    shifted = nn.Linear(2, 2)
    shifted.register_buffer("mean", torch.zeros(2, dtype=torch.float64))  # beside float32 weights
    with pytest.raises(ValueError, match=r"parameters are torch.float32, its buffers torch.float64"):
        FlatModel(shifted)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.01}])
@pytest.mark.parametrize("name", ["quadratic", "digits/mlp", "own"])
def test_one_learner_is_plain_sgd_to_the_bit(name: str, options: dict[str, float]) -> None:
    task = odd_task() if name == "own" else resolve(name, {})
    torch.manual_seed(5)
    learner = make_learner(0, task, **options)
    torch.manual_seed(5)
    if name == "own":
        reference = Odd()
        reference.load_state_dict(learner._model.module.state_dict())
    else:
        reference = task.model()
    plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1, **options)
    for _ in range(20):
        learner.begin()
        batch = task.train.take(learner.sampler.rows)
        learner.update(learner.gradient())
        plain.zero_grad()
        if len(batch):
            (task.loss(reference(task.prepare(batch.inputs)), batch.targets).sum()).backward()
            for p in plain.param_groups[0]["params"]:
                p.grad /= 10
            plain.step()
    expected = FlatModel(reference)
    assert torch.equal(learner.weights, expected.weights)
    assert torch.allclose(learner.buffers, expected.buffers, rtol=1e-5, atol=1e-6)


def test_a_stale_gradient_is_taken_at_the_snapshot_and_applied_to_the_mixed_model() -> None:
    learner = make_learner(0)
    learner.begin()
    read, rows = learner.weights.clone(), learner.sampler.rows
    learner.mix(torch.zeros(3, dtype=torch.float64), torch.full((3,), 4.0, dtype=torch.float64))
    learner.update(learner.gradient())
    points = learner.sampler.task.train.inputs[rows]
    gradient = (len(rows) * read - points.sum(0)) / 10
    assert torch.allclose(learner.weights, read + 2.0 - 0.1 * gradient, rtol=0, atol=1e-14)


def test_float_buffers_travel_with_the_weights_and_integer_ones_do_not() -> None:
    task = odd_task()
    learner = make_learner(0, task)
    assert len(learner.state) == len(learner.weights) + 8
    before = learner.buffers.clone()
    learner.begin()
    gradient = learner.gradient()
    mean = learner.state.clone()
    learner.mix(learner.snapshot(), mean + 1)  # an exchange while the gradient was computed
    learner.update(gradient)
    assert gradient.buffers is not None
    assert torch.allclose(learner.buffers, before + 0.5 + gradient.buffers)


@pytest.mark.parametrize("mode", ["none", "paper", "private"])
def test_a_rehearsal_leaves_no_trace(mode: str, tmp_path: Path) -> None:
    """Steps after it are the same to the bit, and nothing is charged."""
    noise = {
        "none": Privacy(),
        "paper": Privacy(mode="paper", sigma=1.0),
        "private": Privacy(mode="private", noise_multiplier=1.0, delta=1e-5, clip_quantile=0.5, count_noise=4.0),
    }[mode]
    chosen = Config(task="digits/cnn", learners=2, epochs=1, seed=0, privacy=noise, options={"norm": "group"})
    for name in ("calm", "eager"):
        (tmp_path / name).mkdir()
    calm, eager = (prepare(chosen).learner(0, tmp_path / name) for name in ("calm", "eager"))
    eager.rehearse()
    assert eager.steps == 0
    assert eager.clip_norm == calm.clip_norm
    if eager.budget is not None and calm.budget is not None:
        assert eager.budget.guarantee() == calm.budget.guarantee()
    for learner in (calm, eager):
        learner.begin()
        learner.update(learner.gradient())
    assert torch.equal(calm.state, eager.state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_private_runs_switch_tf32_off() -> None:
    torch.set_float32_matmul_precision("high")
    private = Privacy(mode="private", noise_multiplier=1.0, delta=1e-5)
    prepare(Config(task="digits/cnn", device="cuda", precision="bfloat16", privacy=private))
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


def test_a_copy_of_the_optimizer_state_is_whole() -> None:
    """All its coordinates are equal after every update, so a copy from between two would show."""
    learner = make_learner(0, resolve("quadratic", {"records": 50, "dimension": 300_000}), momentum=0.9)
    done = threading.Event()

    def train() -> None:
        while not done.is_set():
            learner.update(Gradient(torch.ones_like(learner.weights)))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert all(
            float(copy.min()) == float(copy.max())
            for copy in (learner.optimizer_state()["velocity"] for _ in range(200))
        )
    finally:
        done.set()
        thread.join()
