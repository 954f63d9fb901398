"""What several test files share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from adp2sgd import config
from adp2sgd.config import Config
from adp2sgd.data import cifar10, heart
from adp2sgd.data.batches import Batch, PoissonBatches
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.privatize import GradientStep, PlainStep
from adp2sgd.learner import Learner
from adp2sgd.optimizer import Optimizer
from adp2sgd.progress import Progress
from adp2sgd.randomness.noise import NoiseSource
from adp2sgd.randomness.streams import Streams
from adp2sgd.sampler import Sampler
from adp2sgd.task import Task
from adp2sgd.tasks import resolve
from command import Command

ROOT = Path(__file__).parents[1]
REAL_DATA = ROOT.parent / "shared" / "data"
FOLDERS = {"cifar10": "cifar-10-batches-bin", "speech": "speech", "heart": "heart_disease"}

settings.register_profile("same", deadline=None, derandomize=True)  # a change fails for what it changed
settings.load_profile("same")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # the tests' models are small, and the cores are shared


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)  # whichever tests ran before in the same process


@pytest.fixture(scope="session")
def real_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name → the folder that holds the real data set, unpacked once; the test is skipped where it is not at hand."""
    given = os.environ.get("ADP2SGD_DATA")

    @cache
    def folder(name: str) -> Path:
        if given and (Path(given) / FOLDERS[name]).is_dir():
            return Path(given)
        if not (REAL_DATA / "unpack.py").is_file():
            pytest.skip("the real data is not at hand")
        root = tmp_path_factory.mktemp(name)
        unpack = [sys.executable, REAL_DATA / "unpack.py", name, root]
        subprocess.run(unpack, check=True, stdout=subprocess.DEVNULL)
        return root

    return folder


@pytest.fixture
def quadratic_config() -> Config:
    """A small run whose gradients can be written down."""
    return Config(
        task="quadratic",
        learners=4,
        epochs=2,
        batch_size=8,
        seed=1,
        device="cpu",
        options={"records": 200, "dimension": 3},
        optimizer=config.Optimizer(lr=0.1),
    )


def make_learner(number: int, task: Task | None = None, **optimizer: Any) -> Learner:
    """A learner on its own, outside any engine."""
    task = task or resolve("quadratic", {"records": 50, "dimension": 3})
    streams, model = Streams(0, number), FlatModel(task.model())
    batches = PoissonBatches(len(task.train), 10, streams)
    return Learner(
        number=number,
        model=model,
        sampler=Sampler(task, task.train, batches, streams, model.device),
        gradient_step=PlainStep(task.loss),
        optimizer=Optimizer(config.Optimizer(**{"lr": 0.1, **optimizer}), model.weights),
        progress=Progress(number, steps_per_epoch=5.0),
        streams=streams,
    )


def gradient_of(step: GradientStep, model: FlatModel, batch: Batch, source: NoiseSource) -> Tensor:
    """What a learner descends with."""
    return step.noise(model, step.clip(model, batch), batch, source).vector


def adp2sgd(*arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line in a real process."""
    command = [sys.executable, "-m", "adp2sgd", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


@pytest.fixture
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data folder, no cache, no network: what a test finds is what it made."""
    monkeypatch.delenv("ADP2SGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    monkeypatch.setattr(heart, "URL", "http://127.0.0.1:9/")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread and one seed: sums have one order, and a failing example can be run again."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
