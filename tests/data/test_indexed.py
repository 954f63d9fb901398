"""Datasets that are read by index: the same records, batches and runs as tensors in memory, in bounded memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import adp2sgd
from adp2sgd import Config, ConfigError, Optimizer, Privacy, Records, RunError, Task
from adp2sgd.config import Data
from adp2sgd.data.batches import PoissonBatches
from adp2sgd.data.feed import Ahead, Resident
from adp2sgd.data.indexed import as_records
from adp2sgd.errors import OtherProcessError, kind
from adp2sgd.randomness.streams import Streams
from conftest import ROOT

STREAM = torch.Generator().manual_seed(0)
X = torch.randn(120, 3, generator=STREAM)
Y = (X.sum(dim=1) > 0).long()
SECRET = "the patient in bed 7654321"


class Indexed(Dataset[Any]):
    """The tensors above, one record at a time; notes which process read it."""

    def __init__(self, rows: range, bad: int | None = None) -> None:
        self.rows, self.bad = rows, bad

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.rows[index] == self.bad:
            raise ValueError(SECRET)
        return X[self.rows[index]], Y[self.rows[index]]


class Where(Indexed):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(os.getpid())]), 0


def net() -> nn.Module:
    return nn.Linear(3, 2)


def tasks(bad: int | None = None) -> tuple[Task, Task]:
    """The same task in memory and by index."""
    memory = Task(model=net, train=(X[:100], Y[:100]), test=(X[100:], Y[100:]))
    return memory, Task(model=net, train=Indexed(range(100), bad), test=Indexed(range(100, 120), bad))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_tensors_in_memory(workers: int) -> None:
    memory, dataset = (task.train for task in tasks())
    batches = [PoissonBatches(100, 8, Streams(0, 0)) for _ in range(2)]
    one = Resident(memory, batches[0], torch.device("cpu"))
    other = Ahead(dataset.with_workers(workers), batches[1], torch.device("cpu"))
    for step in [0, 1, 2, *range(15), 7, 3]:  # a run that resumes goes to any step
        assert torch.equal(one.draw(step), other.draw(step))
        for mine, theirs in zip(one.take(), other.take(), strict=True):
            assert torch.equal(mine, theirs)


def test_an_empty_batch_has_the_shapes_of_records() -> None:
    records = as_records(Indexed(range(100)))
    inputs, targets = records.read(torch.empty(0, dtype=torch.int64))
    assert (inputs.shape, targets.dtype) == ((0, 3), torch.int64)


def test_workers_are_other_processes_and_end_with_their_reader() -> None:
    records = as_records(Where(range(100))).with_workers(2)
    feed = Ahead(records, PoissonBatches(100, 8, Streams(0, 0)), torch.device("cpu"))
    seen = set()
    for step in range(20):
        feed.draw(step)
        seen |= set(feed.take()[0].flatten().int().tolist())
    assert seen
    assert os.getpid() not in seen
    readers = [psutil.Process(pid) for pid in seen]
    del feed, records
    gone, alive = psutil.wait_procs(readers, timeout=10)
    assert (len(gone), alive) == (len(readers), [])


def test_workers_end_when_their_process_is_killed(tmp_path: Path) -> None:
    program = """
import os, sys, torch
from torch.utils.data import Dataset
from adp2sgd.data.indexed import as_records
class Pids(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.tensor([float(os.getpid())]), 0
reader = as_records(Pids()).with_workers(1).reader
print(int(reader.submit([0]).result()[0]), flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([worker], timeout=10)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["none", "private"])
def test_a_run_by_index_is_the_run_in_memory_to_the_bit(mode: str, workers: int) -> None:
    memory, dataset = tasks()
    privacy = Privacy(mode="private", epsilon=4.0, delta=1e-3) if mode == "private" else Privacy()
    config = Config(learners=2, epochs=3, batch_size=10, seed=0, optimizer=Optimizer(lr=0.2), privacy=privacy)
    one = adp2sgd.simulate(config, task=memory)
    other = adp2sgd.simulate(config.replace(data=Data(workers=workers)), task=dataset)
    assert other.curve == one.curve
    assert other.guarantee == one.guarantee


@pytest.mark.processes
def test_learner_processes_read_by_index_with_workers_of_their_own(tmp_path: Path) -> None:
    config = Config(
        learners=2, epochs=4, batch_size=10, optimizer=Optimizer(lr=0.3), data=Data(workers=1),
        privacy=Privacy(mode="private", noise_multiplier=0.5, delta=1e-3),
    )  # fmt: skip
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    run = adp2sgd.train(config, tmp_path / "run", task=tasks()[1])
    assert run.accuracy is not None
    assert run.accuracy > 0.7
    assert [each.state for each in run.learners] == ["ended", "ended"]
    time.sleep(0.5)
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before | {child for child in after if psutil.Process(child).name() == "resource_tracker"}


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_dataset_raises_is_told_by_file_and_line(workers: int) -> None:
    records = tasks(bad=5)[1].train.with_workers(workers)
    with pytest.raises((ValueError, OtherProcessError)) as caught:
        records.fetch(torch.tensor([4, 5])).result()
    assert kind(caught.value).startswith("ValueError at test_indexed.py, line ")
    assert SECRET not in kind(caught.value)
    assert SECRET in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("bad", [50, 110])
def test_private_mode_withholds_what_a_dataset_says(bad: int, workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    privacy = Privacy(mode="private", noise_multiplier=1.0, delta=1e-3)
    config = Config(learners=1, epochs=20, batch_size=30, seed=0, privacy=privacy, data=Data(workers=workers))
    with pytest.raises((RunError, ConfigError), match=r"dataset (fails )?\(ValueError at test_indexed.py") as caught:
        adp2sgd.simulate(config, task=tasks(bad)[1])
    assert SECRET not in str(caught.value) + "".join(capfd.readouterr())


def test_what_needs_all_labels_says_so() -> None:
    config = Config(learners=2, epochs=1, batch_size=8, seed=0, data=Data(partition="dirichlet"))
    with pytest.raises(ConfigError, match="attribute targets"):
        adp2sgd.simulate(config, task=tasks()[1])
    labelled = Indexed(range(100))
    labelled.targets = Y[:100].tolist()  # type: ignore[attr-defined]
    task = Task(model=net, train=labelled, test=(X[100:], Y[100:]))
    assert adp2sgd.simulate(config, task=task).metrics == adp2sgd.simulate(config, task=tasks()[0]).metrics


def test_fixed_work_is_refused_for_what_is_read_by_index() -> None:
    privacy = Privacy(mode="private", noise_multiplier=1.0, delta=1e-3, fixed_work=True)
    with pytest.raises(ConfigError, match="fixed_work needs records in memory"):
        adp2sgd.simulate(Config(learners=1, batch_size=8, privacy=privacy), task=tasks()[1])


def test_sites_of_a_dataset() -> None:
    records = as_records(Indexed(range(100)), sites=torch.arange(100) % 2, site_names=("north", "south"))
    task = Task(model=net, train=records, test=Records(X[100:], Y[100:], torch.arange(20) % 2, ("north", "south")))
    run = adp2sgd.simulate(Config(learners=2, epochs=1, batch_size=8, seed=0, data=Data(partition="site")), task=task)
    assert [each.site for each in run.learners] == ["north", "south"]
    assert set(run.sites) == {"north", "south"}


def test_reading_ahead_hides_the_time_of_reading() -> None:
    """Four workers read batches that take 20 ms each while the learner computes for 5 ms."""

    class Slow(Indexed):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.02)
            return super().__getitem__(index)

    class One:
        expected, rows = 1.0, 1

        def draw(self, step: int) -> torch.Tensor:
            return torch.tensor([random.randrange(100)])

        def counted(self, rows: torch.Tensor) -> int | None:
            return None

    def seconds(workers: int) -> float:
        feed = Ahead(as_records(Slow(range(100))).with_workers(workers), One(), torch.device("cpu"))
        feed.draw(0)
        began = time.monotonic()
        for step in range(40):
            feed.draw(step)
            feed.take()
            time.sleep(0.005)
        return time.monotonic() - began

    assert threading.active_count() < 50
    assert seconds(4) < 0.6 * seconds(0)


def test_memory_stays_bounded_by_what_is_drawn() -> None:
    """Held-out records are evaluated in pieces of at most 64 MiB."""
    from adp2sgd.engine.evaluate import PIECE_BYTES, pieces

    class Big(Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return np.full(2 << 20, index, np.float32), 0  # 8 MiB

    found = [len(targets) for _, targets in pieces(as_records(Big()))]
    assert sum(found) == 40
    assert max(found) == PIECE_BYTES // ((8 << 20) + 8)


class Centred(Indexed):
    """Couples the records of a batch, where it is asked for a batch."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [(X[each] - X[indices].mean(dim=0), Y[each]) for each in indices]


def test_a_record_is_read_alone() -> None:
    records = as_records(Centred(range(100)))
    for private in (False, True):
        inputs, _ = records.with_workers(0, private=private).read(torch.tensor([3, 4, 5]))
        assert torch.equal(inputs, X[3:6])


class Mixed(Indexed):
    """Record 7 has types of its own."""

    def __getitem__(self, index: int) -> Any:
        return (X[index].double(), 1.5) if index == 7 else (X[index], 1)


def test_the_type_of_one_record_does_not_convert_the_others() -> None:
    records = as_records(Mixed(range(100)))
    inputs, targets = records.with_workers(0, private=True).read(torch.tensor([7, 3]))
    assert torch.equal(inputs, X[[7, 3]])
    assert targets.tolist() == [1, 1]
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    with pytest.raises(adp2sgd.DataError, match="differ in shape, type or structure"):
        records.read(torch.tensor([7, 3]))  # 1.5 as an integer would lose a half


class Augmented(Indexed):
    """Random numbers from all three global generators."""

    def __getitem__(self, index: int) -> Any:
        return np.array([torch.rand(()).item(), np.random.rand(), random.random()]), 0


@pytest.mark.parametrize("workers", [0, 1])
def test_under_privacy_every_item_has_random_numbers_of_its_own(workers: int) -> None:
    records = as_records(Augmented(range(100)))
    pools = [records.with_workers(workers, private=True) for _ in range(2)]
    seen = []
    for pool in pools:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        seen.append(pool.fetch(torch.tensor([3, 4, 5])).result()[0])
        pool.reader.close()
        here = [torch.rand(()).item(), np.random.rand(), random.random()]
        torch.manual_seed(0)
        assert here == [torch.rand(()).item(), np.random.RandomState(0).rand(), random.Random(0).random()]
    assert len(torch.cat(seen).unique()) == 18


def test_a_private_run_reads_privately() -> None:
    from adp2sgd.engine.setup import prepare

    for mode in ("none", "private"):
        privacy = Privacy(mode="private", noise_multiplier=1.0, delta=1e-3) if mode == "private" else Privacy()
        setup = prepare(Config(learners=1, batch_size=8, privacy=privacy), tasks()[1])
        own = setup.site(0).task
        assert [part.reader.private for part in (own.train, own.test)] == 2 * [mode == "private"]
