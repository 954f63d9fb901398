"""Where data lie: folders, the environment, the cache, downloads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adp2sgd.data import cifar10, folder, heart
from data_files import md5, refused, served

pytestmark = pytest.mark.usefixtures("nothing_of_this_machine")


def test_find_looks_in_the_given_folder_then_the_environment_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, named, cache = tmp_path / "given", tmp_path / "named", tmp_path / "cache" / "adp2sgd"
    for root in (given, named, cache):
        (root / "set").mkdir(parents=True)
        (root / "set" / "marker").touch()
    monkeypatch.setenv("ADP2SGD_DATA", str(named))
    for data_dir, expected in ((given, given), (None, named)):
        assert folder.find(("other", "set"), ("marker",), data_dir) == expected / "set"
    (named / "set" / "marker").unlink()
    assert folder.find(("set",), ("marker",)) == cache / "set"
    assert folder.find(("set",), ("marker",), given / "set") == given / "set"  # the folder itself
    assert folder.find(("set",), ("no such file",), given) is None


def test_a_named_folder_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(str(tmp_path / "nowhere"), "create it or correct"):
        folder.find(("set",), ("marker",), tmp_path / "nowhere")
    monkeypatch.setenv("ADP2SGD_DATA", str(tmp_path / "nowhere"))
    with refused("ADP2SGD_DATA", "create it or correct"):
        heart.load()


def test_download_keeps_only_a_complete_file_with_the_right_checksum(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "file.bin").write_bytes(content)
    to = tmp_path / "data" / "set" / "file.bin"
    with served(tmp_path / "web") as url:
        with refused(md5(content), "try again"):
            folder.download(f"{url}file.bin", "0" * 32, to)
        assert list(to.parent.iterdir()) == []
        folder.download(f"{url}file.bin", md5(content), to)
        with refused("could not download", "File not found", "put the folder set under", "ADP2SGD_DATA"):
            folder.download(f"{url}missing", md5(content), to)
    assert to.read_bytes() == content
    assert list(to.parent.iterdir()) == [to]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "file.bin" in captured.err


def test_without_network_the_message_says_where_to_put_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("could not download", "cifar-10-batches-bin", str(tmp_path), "ADP2SGD_DATA"):
        cifar10.load(tmp_path)
    with refused("could not download", "heart_disease", str(tmp_path / "cache" / "adp2sgd")):
        heart.load()


def test_a_record_is_held_out_by_its_own_content() -> None:
    held = [folder.held_out(f"record {i}".encode(), 0.25) for i in range(4000)]
    assert 900 < sum(held) < 1100  # the hash is fixed: no false alarm
    assert not folder.held_out(b"x", 0.0)
    assert folder.held_out(b"x", 1.0)
