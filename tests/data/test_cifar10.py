"""CIFAR-10, from small files in its real formats."""

from __future__ import annotations

import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from adp2sgd.data import cifar10
from data_files import cifar_files, md5, put, python2_pickle, refused, served

pytestmark = pytest.mark.usefixtures("nothing_of_this_machine")


def test_cifar10_python_and_binary_files_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = cifar_files(tmp_path / "a", cifar10.BINARY, monkeypatch)
    cifar_files(tmp_path / "b", cifar10.PYTHON, monkeypatch)
    one, other = cifar10.load(tmp_path / "a"), cifar10.load(tmp_path / "b")
    for mine, theirs in ((one.train, other.train), (one.test, other.test)):
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.targets, theirs.targets)
    assert one.train.inputs.shape == (20, 3, 32, 32)
    assert one.train.inputs.dtype == torch.uint8
    row = (binary / "data_batch_2.bin").read_bytes()[3073 : 2 * 3073]  # the second record of the second batch
    assert one.train.targets[5] == row[0]
    assert one.train.inputs[5, 1, 2, 3] == row[1 + 1024 + 2 * 32 + 3]
    prepared = one.prepare(one.train.inputs)
    assert prepared[5, 1, 2, 3].item() == pytest.approx((row[1 + 1024 + 67] / 255 - 0.4822) / 0.2435, abs=1e-5)
    assert pickle.loads(pickle.dumps(one.prepare)) == one.prepare  # learners are processes


@pytest.mark.parametrize("kind", [cifar10.BINARY, cifar10.PYTHON])
def test_cifar10_refuses_damaged_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = cifar_files(tmp_path, kind, monkeypatch)
    path = where / next(iter(cifar10.MD5[kind]))
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with refused(path.name, "truncated" if kind == cifar10.BINARY else "md5", "fetch it again"):
        cifar10.load(tmp_path)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with refused(path.name, "md5", "fetch it again"):
        cifar10.load(tmp_path)
    path.unlink()
    with refused(path.name, "cannot read", "correct the path"):
        cifar10.load(tmp_path)


def test_cifar10_refuses_labels_and_shapes_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = cifar_files(tmp_path, cifar10.BINARY, monkeypatch) / "test_batch.bin"
    put(binary, bytes([10]) + binary.read_bytes()[1:], monkeypatch)
    with refused("label number 1 is outside 0 … 9", "test_batch.bin"):
        cifar10.load(tmp_path)
    python = cifar_files(tmp_path / "py", cifar10.PYTHON, monkeypatch) / "test_batch"
    pixels = np.zeros((1, 3072), np.uint8)
    for batch, part in (
        ({"labels": [256], "data": pixels}, "label number 1"),
        ({"labels": [1, 2], "data": pixels}, "(1, 3072)"),
        ({"labels": [1], "data": pixels[:, :-1]}, "(1, 3071)"),
        ({"labels": [1]}, "data"),
    ):
        put(python, python2_pickle(batch), monkeypatch)
        with refused("test_batch", part):
            cifar10.load(tmp_path / "py")


def test_cifar10_pickles_can_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "was here"),)

    path = cifar_files(tmp_path, cifar10.PYTHON, monkeypatch) / "test_batch"
    put(path, pickle.dumps({b"labels": [0], b"data": Evil()}, protocol=4), monkeypatch)
    with refused("test_batch", "mkdir"):
        cifar10.load(tmp_path)
    assert not (tmp_path / "was here").exists()


def test_cifar10_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar_files(tmp_path / "web", cifar10.BINARY, monkeypatch)
    archive = tmp_path / "web" / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "web" / cifar10.BINARY, cifar10.BINARY)
    monkeypatch.setattr(cifar10, "URL_MD5", md5(archive.read_bytes()))
    with served(tmp_path / "web") as url:
        monkeypatch.setattr(cifar10, "URL", f"{url}cifar-10-binary.tar.gz")
        first = cifar10.load()
    again = cifar10.load()  # the server is gone
    assert torch.equal(first.train.inputs, again.train.inputs)
    kept = sorted(path.name for path in (tmp_path / "cache" / "adp2sgd" / cifar10.BINARY).iterdir())
    assert kept == sorted(cifar10.MD5[cifar10.BINARY])


def test_real_cifar10(real_data: Callable[[str], Path]) -> None:
    source = cifar10.load(real_data("cifar10"))
    assert source.train.inputs.shape == (50_000, 3, 32, 32)
    assert source.test.inputs.shape == (10_000, 3, 32, 32)
    assert source.train.targets.bincount().tolist() == [5000] * 10
    assert source.test.targets.bincount().tolist() == [1000] * 10
    means = torch.stack([source.train.inputs[:, c].float().mean() / 255 for c in range(3)])
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    prepared = source.prepare(source.train.inputs[::10])
    assert prepared.mean((0, 2, 3)).abs().max() < 0.02
    assert (prepared.std((0, 2, 3)) - 1).abs().max() < 0.02
    assert source.fitted is None
