"""MNIST and Fashion-MNIST, from small files in their real format."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from adp2sgd.data import idx
from adp2sgd.errors import ConfigError
from data_files import idx_bytes, idx_files, md5, refused, served

pytestmark = pytest.mark.usefixtures("nothing_of_this_machine")


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = idx_files(tmp_path / "FashionMNIST" / "raw", monkeypatch, packed)
    source = idx.load("fashion", tmp_path)
    assert source.train.inputs.shape == (6, 1, 28, 28)
    assert source.test.inputs.shape == (3, 1, 28, 28)
    assert np.array_equal(source.train.inputs[:, 0].numpy(), arrays[idx.TRAIN[0]])
    assert np.array_equal(source.test.targets.numpy(), arrays[idx.TEST[1]])
    expected = (arrays[idx.TRAIN[0]][2, 3, 4] / 255 - 0.2860) / 0.3530
    assert source.prepare(source.train.inputs)[2, 0, 3, 4].item() == pytest.approx(expected, abs=1e-5)


def test_idx_is_downloaded_from_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = idx_files(tmp_path / "web", monkeypatch, packed=True)
    with served(tmp_path / "web") as url:
        monkeypatch.setitem(idx.SETS, "fashion", idx.Official(**{**vars(idx.SETS["fashion"]), "url": url}))
        source = idx.load("fashion")
    assert np.array_equal(source.test.inputs[:, 0].numpy(), arrays[idx.TEST[0]])
    assert (tmp_path / "cache" / "adp2sgd" / "fashion-mnist" / f"{idx.TEST[1]}.gz").is_file()


def test_idx_refuses_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "fashion"
    arrays = idx_files(where, monkeypatch, packed=False)
    with refused("cifar", "fashion", "mnist", error=ConfigError):
        idx.load("cifar", tmp_path)
    images_file, labels_file = where / idx.TRAIN[0], where / idx.TRAIN[1]
    good = images_file.read_bytes()
    for content, part in (
        (good[:-1], "truncated"),
        (b"\0\0\x08\x01" + good[4:], "not an idx file"),
        (good[:2], "not an idx file"),
        (good[:-1] + bytes([good[-1] ^ 1]), "md5"),
    ):
        images_file.write_bytes(content)
        with refused(images_file.name, part, "fetch it again"):
            idx.load("fashion", tmp_path)
    images_file.write_bytes(good)
    wrong = idx_bytes(np.full_like(arrays[idx.TRAIN[1]], 10))
    labels_file.write_bytes(wrong)
    monkeypatch.setitem(idx.SETS["fashion"].raw_md5, labels_file.name, md5(wrong))
    with refused("label number"):
        idx.load("fashion", tmp_path)
    images_file.unlink()
    (where / f"{images_file.name}.gz").write_bytes(gzip.compress(good)[:-20])
    with refused(f"{images_file.name}.gz", "truncated"):
        idx.load("fashion", tmp_path)
