"""Data sources: each is read from small files in its real format, and from the real data where it is at hand."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import math
import os
import pickle
import re
import struct
import tarfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from adp2sgd.data import cifar10, folder, heart, idx, images, kaldi, table
from adp2sgd.data.augment import crop_and_flip
from adp2sgd.errors import Adp2sgdError, ConfigError, DataError

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data folder, no cache, no network: what a test finds is what it made."""
    monkeypatch.delenv("ADP2SGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    monkeypatch.setattr(heart, "URL", "http://127.0.0.1:9/")


@contextlib.contextmanager
def refused(*parts: str, error: type[Adp2sgdError] = DataError, never: Iterable[str] = ()) -> Iterator[None]:
    """The block fails with one line that holds all `parts` and, after a semicolon, the fix. Neither it, beside the
    paths of files, nor what a traceback would show with it holds any of `never`."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message, message
    for part in parts:
        assert part in message, message
    shown = re.sub(r"/\S+", "", "".join(traceback.format_exception_only(caught.value)))
    chained = caught.value.__cause__ or (None if caught.value.__suppress_context__ else caught.value.__context__)
    for value in never:
        assert value not in f"{shown} {chained}"


@contextlib.contextmanager
def served(root: Path) -> Iterator[str]:
    """A web server for the files under `root`."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


# --- where data lives ---------------------------------------------------------------------------------------------


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


# --- CIFAR-10 -----------------------------------------------------------------------------------------------------


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes as Python 2 did, which is how the official files were made."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def python2_pickle(value: object) -> bytes:
    out = io.BytesIO()
    Python2Pickler(out, protocol=2).dump(value)
    return out.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def cifar_files(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch, records: int = 4) -> Path:
    """Six small batches in the official format, with their checksums taken for the official ones."""
    where = root / kind
    where.mkdir(parents=True)
    rng = np.random.default_rng(0)
    checksums = {}
    for name in cifar10.MD5[kind]:
        labels, data = rng.integers(0, 10, records), rng.integers(0, 256, (records, 3072), dtype=np.uint8)
        if kind == cifar10.BINARY:
            content = np.column_stack([labels.astype(np.uint8), data]).tobytes()
        else:
            content = python2_pickle({"labels": labels.tolist(), "data": data, "batch_label": name})
        (where / name).write_bytes(content)
        checksums[name] = md5(content)
    monkeypatch.setitem(cifar10.MD5, kind, checksums)
    return where


def put(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a CIFAR-10 file together with its official checksum."""
    path.write_bytes(content)
    monkeypatch.setitem(cifar10.MD5[path.parent.name], path.name, md5(content))


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


# --- MNIST and Fashion-MNIST --------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_files(where: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> dict[str, np.ndarray]:
    where.mkdir(parents=True)
    rng = np.random.default_rng(1)
    arrays = {}
    for n, names in ((6, idx.TRAIN), (3, idx.TEST)):
        arrays[names[0]] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[names[1]] = rng.integers(0, 10, n, dtype=np.uint8)
    for name, array in arrays.items():
        content = idx_bytes(array)
        stored = gzip.compress(content) if packed else content
        (where / (f"{name}.gz" if packed else name)).write_bytes(stored)
        monkeypatch.setitem(idx.SETS["fashion"].raw_md5, name, md5(content))
        monkeypatch.setitem(idx.SETS["fashion"].gz_md5, name, md5(stored))
    return arrays


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


# --- Kaldi archives -----------------------------------------------------------------------------------------------


Utterances = dict[str, tuple[np.ndarray, np.ndarray]]


def utterances(speakers: tuple[str, ...], features: int = 5) -> Utterances:
    rng = np.random.default_rng(len(speakers))
    lengths = dict(zip([f"{s}-{i}" for s in speakers for i in range(3)], rng.integers(15, 70, 30), strict=False))
    lengths[f"{speakers[0]}-0"] = 42  # exactly two windows
    return {
        key: (rng.normal(7, 2, (n, features)).astype(np.float32), rng.integers(0, 9, n).astype(np.int32))
        for key, n in lengths.items()
    }


def kaldi_folder(where: Path, speech: Utterances, absolute: bool = False) -> Path:
    import kaldiio

    where.mkdir(parents=True)
    for kind, part in (("feats", 0), ("ali", 1)):
        kaldiio.save_ark(
            str(where / f"{kind}.ark"),
            {key: both[part] for key, both in speech.items()},
            scp=str(where / f"{kind}.scp"),
        )
        if not absolute:
            scp = where / f"{kind}.scp"
            scp.write_text(scp.read_text().replace(f"{where}/", ""))
    (where / "utt2spk").write_text("".join(f"{key} {key.split('-')[0]}\n" for key in speech))
    return where


def naive_deltas(x: np.ndarray) -> np.ndarray:
    """Slope over ±2 frames and its slope, with the first and last frame of `x` repeated; frame by frame."""

    def at(t: int) -> np.ndarray:
        return x[min(max(t, 0), len(x) - 1)].astype(np.float64)

    def slope(t: int) -> np.ndarray:
        return sum(k * (at(t + k) - at(t - k)) for k in (1, 2)) / 10

    curve = [sum(k * (slope(t + k) - slope(t - k)) for k in (1, 2)) / 10 for t in range(len(x))]
    return np.concatenate([x, [slope(t) for t in range(len(x))], curve], axis=1)


@pytest.mark.parametrize("absolute", [False, True])
def test_kaldi_windows_equal_a_loop_over_frames(absolute: bool, tmp_path: Path) -> None:
    train, test = utterances(("a", "b", "c")), utterances(("d", "e"))
    kaldi_folder(tmp_path / "speech" / "train", train, absolute)
    kaldi_folder(tmp_path / "speech" / "test", test, absolute)
    source = kaldi.load(tmp_path, classes=9)
    assert source.fitted is None
    for records, speech in ((source.train, train), (source.test, test)):
        inputs, targets, owners = [], [], []
        for key, (frames, labels) in speech.items():
            full = naive_deltas(frames)
            full[:, :5] -= 7
            full /= np.repeat([2, 0.3, 0.1], 5)
            for start in range(0, len(frames) - 20, 21):
                inputs.append(full[start : start + 21])
                targets.append(labels[start : start + 21])
                owners.append(key.split("-")[0])
        assert records.inputs.shape == (len(inputs), 21, 15)
        assert records.inputs.dtype == torch.float32
        np.testing.assert_allclose(records.inputs.numpy(), np.array(inputs), atol=1e-4)
        assert np.array_equal(records.targets.numpy(), np.array(targets))
        assert records.sites is not None
        assert [records.site_names[s] for s in records.sites] == owners


def test_kaldi_split_by_named_speakers(tmp_path: Path) -> None:
    kaldi_folder(tmp_path / "speech", utterances(("a", "b", "c")))
    source = kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    assert source.train.sites is not None
    assert source.test.sites is not None
    assert {source.train.site_names[s] for s in source.train.sites} == {"a", "c"}
    assert {source.test.site_names[s] for s in source.test.sites} == {"b"}
    with refused("test speaker z"):
        kaldi.load(tmp_path, classes=9, test_speakers=["b", "z"])


def test_kaldi_statistics_per_speaker_are_named(tmp_path: Path) -> None:
    kaldi_folder(tmp_path / "speech", utterances(("a", "b", "c")))
    source = kaldi.load(tmp_path, classes=9, test_speakers=["b"], normalize="speaker")
    assert source.fitted is not None
    assert "speaker" in source.fitted
    assert source.train.sites is not None
    own = source.train.inputs[source.train.sites == 0].flatten(0, 1)
    assert own.mean(0).abs().max() < 1e-4
    assert (own.std(0, correction=0) - 1).abs().max() < 1e-3
    with refused("normalize = 'site'", "fixed", "speaker", error=ConfigError):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"], normalize="site")


def kaldi_fault(where: Path, fault: str) -> None:
    """Damage one thing in a Kaldi folder."""
    ali, feats = (where / "ali.scp").read_text().splitlines(), (where / "feats.scp").read_text().splitlines()
    ark = (where / "feats.ark").read_bytes()
    match fault:
        case "no alignment":
            (where / "ali.scp").write_text("\n".join(ali[1:]))
        case "no speaker":
            (where / "utt2spk").write_text("a-1 a\n")
        case "other length":
            keys = [line.split()[0] for line in ali]
            places = [line.split()[1] for line in ali]
            (where / "ali.scp").write_text("\n".join(f"{k} {p}" for k, p in zip(keys, places[::-1], strict=True)))
        case "truncated":
            (where / "feats.ark").write_bytes(ark[: len(ark) * 2 // 3])
        case "truncated labels":
            (where / "ali.ark").write_bytes((where / "ali.ark").read_bytes()[:-7])
        case "no ark":
            (where / "feats.ark").unlink()
        case "offset":
            (where / "feats.scp").write_text("\n".join([f"{feats[0].rsplit(':')[0]}:3", *feats[1:]]))
        case "bad line":
            (where / "feats.scp").write_text("\n".join([feats[0].split()[0], *feats[1:]]))


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("no alignment", ("ali.scp", "a-0")),
        ("no speaker", ("utt2spk", "a-0")),
        ("other length", ("a-0", "one row per frame")),
        ("truncated", ("feats.ark", "write")),
        ("truncated labels", ("ali.ark", "truncated")),
        ("no ark", ("feats.ark", "cannot read")),
        ("offset", ("feats.ark", "no binary Kaldi array")),
        ("bad line", ("feats.scp, line 1",)),
    ],
)
def test_kaldi_refuses_damaged_folders(fault: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    where = kaldi_folder(tmp_path / "speech", utterances(("a", "b")))
    kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    kaldi_fault(where, fault)
    with refused(*parts):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"])


def test_kaldi_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with refused("speech/train/feats.scp", "ADP2SGD_DATA"):
        kaldi.load(tmp_path, classes=9)
    speech = utterances(("a", "b"))
    kaldi_folder(tmp_path / "one" / "speech", speech)
    with refused("label number", "outside 0 … 7"):
        kaldi.load(tmp_path / "one", classes=8, test_speakers=["b"])
    for part in ("train", "test"):
        kaldi_folder(tmp_path / "both" / "speech" / part, speech)
    with refused("speaker a", "both"):
        kaldi.load(tmp_path / "both", classes=9)
    kaldi_folder(tmp_path / "odd" / "speech", {**speech, "b-9": utterances(("c",), features=6)["c-0"]})
    with refused("b-9", "6 features", "others 5"):
        kaldi.load(tmp_path / "odd", classes=9, test_speakers=["b"])


@pytest.mark.parametrize("place", ["touch HERE/pwned |", "| touch HERE/pwned", "feats.ark:4[ touch HERE/pwned |"])
def test_kaldi_never_runs_commands_from_an_scp(place: str, tmp_path: Path) -> None:
    where = kaldi_folder(tmp_path / "speech", utterances(("a", "b")))
    (where / "feats.scp").write_text(f"a-0 {place.replace('HERE', str(tmp_path))}\n")
    with refused("feats.scp, line 1", "FILE:OFFSET", never=("pwned",)):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    assert not (tmp_path / "pwned").exists()


def test_kaldi_never_runs_pickles_from_an_archive(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "was here"),)

    where = kaldi_folder(tmp_path / "speech", utterances(("a", "b")))
    (where / "feats.ark").write_bytes(b"a-0 PKL" + pickle.dumps(Evil()))
    with refused("no binary Kaldi array"):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    assert not (tmp_path / "was here").exists()


def test_real_speech(real_data: Callable[[str], Path]) -> None:
    source = kaldi.load(real_data("speech"), classes=320)
    assert source.train.inputs.shape == (29_646, 21, 120)
    assert source.test.inputs.shape == (7_608, 21, 120)
    assert source.train.targets.shape == (29_646, 21)
    assert source.train.sites is not None
    assert source.test.sites is not None
    assert len(source.train.sites.unique()) == 48
    assert not set(source.train.sites.tolist()) & set(source.test.sites.tolist())
    for part in source.train.inputs[::50].split(40, dim=2):  # the public constants suit the data
        assert part.mean().abs() < 0.2
        assert 0.8 < part.std() < 1.2


# --- heart disease ------------------------------------------------------------------------------------------------


PATIENT = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"


def heart_files(root: Path, lines: dict[str, list[str]] | None = None) -> Path:
    where = root / "heart_disease"
    where.mkdir(parents=True)
    for age, hospital in enumerate(heart.HOSPITALS, 30):
        rows = [f"{age},1,4,{100 + i},0,?,0,127,0,.7,1,?,?,{i % 5}" for i in range(20)]
        (where / f"processed.{hospital}.data").write_text("\n".join((lines or {}).get(hospital, rows)) + "\n")
    return where


def test_heart_encodes_by_public_ranges(tmp_path: Path) -> None:
    heart_files(tmp_path, {"va": [PATIENT.replace("145.0", f"{100 + i}") for i in range(21)]})
    source = heart.load(tmp_path)
    records = source.train
    assert records.sites is not None
    assert records.site_names == tuple(heart.HOSPITALS)
    assert records.inputs.shape[1] == 38
    assert source.fitted is None
    row = records.inputs[records.sites == 3][0].tolist()
    age, sex, pain = row[0:2], row[2:5], row[5:10]
    assert age == pytest.approx([2 * 43 / 70 - 1, 0])
    assert sex == [0, 1, 0]
    assert pain == [1, 0, 0, 0, 0]
    assert row[-4:] == [0, 1, 0, 0]  # thal = 6
    swiss = records.inputs[records.sites == 2][0].tolist()
    assert swiss[-4:] == [0, 0, 0, 1]  # thal = ?
    assert swiss[12:14] == [0, 1]  # cholesterol 0 was not measured
    assert records.inputs.abs().max() <= 1


def test_removing_a_patient_changes_no_other(tmp_path: Path) -> None:
    """Sensitivity from the raw files: neighbours differ in one row of one set, and in nothing else."""
    rows = [PATIENT.replace("145.0", f"{100 + i}").replace("233.0", f"{150 + 7 * i}") for i in range(40)]
    heart_files(tmp_path / "all", {"va": rows})
    for removed in (0, 17, 39):
        heart_files(tmp_path / str(removed), {"va": rows[:removed] + rows[removed + 1 :]})
        whole, less = heart.load(tmp_path / "all"), heart.load(tmp_path / str(removed))
        gone = 0
        for full, part in ((whole.train, less.train), (whole.test, less.test)):
            left = [tuple(row) for row in full.inputs.tolist()]
            for row in part.inputs.tolist():
                left.remove(tuple(row))
            gone += len(left)
        assert gone == 1


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (PATIENT[:-2], ("13 fields", "14")),
        (PATIENT[:-1] + "5", ("diagnosis", "0 … 4")),
        (PATIENT[:-1] + "?", ("diagnosis",)),
        (PATIENT.replace("145.0", "HIGH"), ("trestbps is not a number",)),
        ("63.0,1.0,9" + PATIENT[10:], ("cp is none of",)),
    ],
)
def test_heart_refuses_damaged_records(line: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    heart_files(tmp_path, {"hungarian": [PATIENT, line]})
    with refused("processed.hungarian.data, line 2", *parts, never=("HIGH", "9", "5", "?;")):
        heart.load(tmp_path)


def test_heart_refuses_an_incomplete_folder(tmp_path: Path) -> None:
    (heart_files(tmp_path) / "processed.cleveland.data").unlink()
    with refused("processed.cleveland.data", "cannot read"):
        heart.load(tmp_path)


@pytest.mark.skipif(not (SHARED / "heart_disease").is_dir(), reason="the real data is not at hand")
def test_real_heart_teaches_more_together_than_alone() -> None:
    from sklearn.linear_model import LogisticRegression

    source = heart.load(SHARED)
    train, test = source.train, source.test
    assert train.sites is not None
    assert test.sites is not None
    assert (train.sites.bincount() + test.sites.bincount()).tolist() == [303, 294, 123, 200]
    assert all(0.15 < part < 0.35 for part in (test.sites.bincount() / torch.tensor([303, 294, 123, 200])).tolist())

    def mean_accuracy(rows: torch.Tensor) -> float:
        model = LogisticRegression(max_iter=2000).fit(train.inputs[rows].numpy(), train.targets[rows].numpy())
        right = torch.from_numpy(model.predict(test.inputs.numpy())) == test.targets
        return sum(right[test.sites == site].float().mean().item() for site in range(4)) / 4

    alone = [mean_accuracy(train.sites == site) for site in range(4)]
    pooled = mean_accuracy(train.sites >= 0)
    assert pooled > 0.8
    assert pooled > max(alone)


# --- the user's own table -----------------------------------------------------------------------------------------


def patients(n: int = 200, seed: int = 0) -> dict[str, list[object]]:
    rng = np.random.default_rng(seed)
    return {
        "age": [int(a) for a in rng.integers(20, 90, n)],
        "kind": [("mild", "severe", None)[k] for k in rng.integers(0, 3, n)],
        "clinic": [("north", "south")[k] for k in rng.integers(0, 2, n)],
        "ill": [int(k) for k in rng.integers(0, 2, n)],
    }


def write_table(path: Path, columns: dict[str, list[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), path)
    else:
        rows = [columns, *zip(*columns.values(), strict=True)]
        path.write_text("".join(",".join("" if v is None else str(v) for v in row) + "\n" for row in rows))
    return path


DECLARED = {
    "label": "ill",
    "classes": (0, 1),
    "ranges": {"age": (0, 100)},
    "categories": {"kind": ("mild", "severe")},
}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table_with_a_site_column(suffix: str, tmp_path: Path) -> None:
    columns = patients()
    source = table.load(write_table(tmp_path / f"t{suffix}", columns), site="clinic", **DECLARED)
    assert source.fitted is None
    assert source.classes == 2
    assert source.train.site_names == ("north", "south")
    assert len(source.train) + len(source.test) == 200
    assert 25 < len(source.test) < 75  # the hash is fixed: no false alarm
    expected = sorted(
        [age / 50 - 1, 0, kind == "mild", kind == "severe", kind is None, clinic == "south", ill]
        for age, kind, clinic, ill in zip(*columns.values(), strict=True)
    )
    found = []
    for records in (source.train, source.test):
        assert records.sites is not None
        found += torch.cat([records.inputs, records.sites[:, None], records.targets[:, None]], 1).tolist()
    np.testing.assert_allclose(sorted(found), np.array(expected, float), atol=1e-6)


def test_table_with_one_file_per_site(tmp_path: Path) -> None:
    columns = {name: values for name, values in patients().items() if name != "clinic"}
    write_table(tmp_path / "sites" / "berlin.csv", {name: values[:120] for name, values in columns.items()})
    write_table(tmp_path / "sites" / "athens.csv", {name: values[120:] for name, values in columns.items()})
    source = table.load(tmp_path / "sites", **DECLARED)
    assert source.train.site_names == ("athens", "berlin")
    assert source.train.inputs.shape[1] == 5  # the site is no feature
    assert source.train.sites is not None
    assert source.test.sites is not None
    assert (source.train.sites.bincount() + source.test.sites.bincount()).tolist() == [80, 120]
    write_table(tmp_path / "sites" / "cairo.csv", {"age": [1], "ill": [0]})
    with refused("cairo and athens differ in their columns"):
        table.load(tmp_path / "sites", **DECLARED)


def test_table_splits_by_a_column(tmp_path: Path) -> None:
    columns = {**patients(), "part": ["train"] * 150 + ["test"] * 50}
    source = table.load(write_table(tmp_path / "t.csv", columns), split="part", site="clinic", **DECLARED)
    assert source.test.targets.tolist() == columns["ill"][150:]
    columns["part"][7] = "dev"
    with refused("record 8", "column 'part' is neither train nor test", never=("dev",)):
        table.load(write_table(tmp_path / "t.csv", columns), split="part", **DECLARED)


def test_table_names_everything_that_it_fitted(tmp_path: Path) -> None:
    columns = {**patients(), "part": ["train"] * 150 + ["test"] * 50}
    columns["age"][3] = None
    path = write_table(tmp_path / "t.csv", columns)
    source = table.load(path, label="ill", site="clinic", split="part")
    assert source.fitted is not None
    for name in ("'age'", "'kind'", "'ill'"):
        assert name in source.fitted
    ages = source.train.inputs[:, 0]
    known = torch.arange(150) != 3
    assert ages[known].mean().abs() < 1e-5
    assert ages[known].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert source.train.inputs[3, :2].tolist() == [0, 1]
    for left_out in ("ranges", "categories", "classes"):  # each of them alone is enough to say so
        fewer = {name: value for name, value in DECLARED.items() if name != left_out}
        assert table.load(path, site="clinic", split="part", **fewer).fitted is not None


def test_adding_a_record_to_a_table_moves_no_other(tmp_path: Path) -> None:
    columns = patients()
    more = {name: [value, *columns[name]] for name, value in zip(columns, (44, "mild", "south", 1), strict=True)}
    before = table.load(write_table(tmp_path / "a.csv", columns), site="clinic", **DECLARED)
    after = table.load(write_table(tmp_path / "b.csv", more), site="clinic", **DECLARED)
    grown = [len(after.train) - len(before.train), len(after.test) - len(before.test)]
    assert sorted(grown) == [0, 1]
    for old, new, extra in ((before.train, after.train, grown[0]), (before.test, after.test, grown[1])):
        assert torch.equal(new.inputs[extra:], old.inputs)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"label": "sick"}, ("'sick' is none of the 4", "first line")),
        ({"classes": (0, 2)}, ("'ill' is none of the classes", "'2'")),
        ({"categories": {"kind": ("mild",)}}, ("kind", "none of its categories ['mild']")),
        ({"categories": {}, "ranges": {"age": (0, 100), "kind": (0, 1)}}, ("kind", "categories")),
        ({"ranges": {"age": (5, 5)}}, ("age", "low < high")),
        ({"ranges": {"age": (-math.inf, 5)}}, ("age", "finite")),
        ({"ranges": {"age": (-1e308, 1e308)}}, ("age", "finite")),
        ({"classes": (0, 1, 1)}, ("[0, 1, 1]", "twice")),
        ({"test_fraction": 0.0}, ("no test set",)),
    ],
)
def test_table_refuses_what_does_not_fit(change: dict[str, object], parts: tuple[str, ...], tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", patients())
    with refused(*parts, error=Adp2sgdError):
        table.load(path, **{**DECLARED, **change})


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ("OLD,mild,1,train", {"ranges": {"age": (0, 100)}}, "the value in column 'age' is no number"),
        ("iNf,mild,1,train", {}, "the value in column 'age' is not finite"),
        (
            "40,WILD,1,train",
            {"categories": {"kind": ("mild",)}},
            "the value in column 'kind' is none of its categories",
        ),
        ("40,mild,SICK,train", {"classes": (0, 1)}, "the value in column 'ill' is none of the classes"),
        ("40,mild,?,train", {}, "lacks a label"),
        ("40,mild,1,BOTH", {"split": "part"}, "the value in column 'part' is neither train nor test"),
    ],
)
def test_a_wrong_value_is_named_by_its_place_and_never_shown(
    row: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    rows = ["age,kind,ill,part", "30,mild,0,train", "31,mild,1,test"]
    (tmp_path / "north.csv").write_text("\n".join([*rows, "32,mild,0,train"]))
    (tmp_path / "south.csv").write_text("\n".join([*rows, row]))
    cells = [cell for cell in row.split(",") if cell.isupper() or cell == "iNf"]
    for path in (tmp_path, tmp_path / "south.csv"):
        with refused("south.csv, record 3: ", words, never=cells):
            table.load(path, **{"label": "ill", "test_fraction": 0.5, **changes})


def test_a_file_without_a_header_shows_no_record(tmp_path: Path) -> None:
    """Its first line is one, and not the names of columns."""
    record = "71.5,HIV,71.5"
    (tmp_path / "t.csv").write_text(f"{record}\n40,mild,1\n")
    with refused("t.csv", "columns 1 and 3 alike", never=("71.5", "HIV")):
        table.load(tmp_path / "t.csv", label="ill")
    (tmp_path / "t.csv").write_text("71.5,HIV,1\n40,mild,0\n")
    with refused("t.csv", "'ill' is none of the 3", never=("71.5", "HIV"), error=ConfigError):
        table.load(tmp_path / "t.csv", label="ill")
    (tmp_path / "s.csv").write_text("age,kind,ill\n40,mild,0\n")
    with refused("t and s differ in their columns", never=("71.5", "HIV")):
        table.load(tmp_path, label="ill")


def test_bytes_of_a_damaged_file_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"age,ill\n1\xe9,0\n")
    with refused("t.csv", "UTF-8", "byte 9", never=("e9",)):
        table.load(tmp_path / "t.csv", label="ill")
    where = kaldi_folder(tmp_path / "speech", utterances(("a", "b")))
    (where / "utt2spk").write_bytes(b"a-0 \xe9\n")
    with refused("utt2spk", "UTF-8", "byte 4", never=("e9",)):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    for i in range(8):
        write_image(tmp_path / "scans" / "a" / f"{i}.png", pixels(i))
    path = tmp_path / "scans" / "a" / "3.png"
    path.write_bytes(path.read_bytes()[:33] + b"\0\0\0\4S\1CR\0\0\0\0\0\0\0\0")
    with refused("3.png", "damaged", never=("S\\x01CR",)):
        images.load(tmp_path / "scans")


def test_a_file_is_a_site_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "north.csv").write_text("age,site,ill\n1,arm,0\n2,leg,1\n")
    (tmp_path / "south.csv").write_text("age,site,ill\n3,leg,0\n4,arm,1\n")
    with refused("column 'site' besides", "options.site"):
        table.load(tmp_path, label="ill", test_fraction=0.5)
    assert table.load(tmp_path, label="ill", test_fraction=0.5, site="site").train.site_names == ("arm", "leg")
    ignored = table.load(tmp_path, label="ill", test_fraction=0.5, ignore=["site"]).train
    assert (ignored.site_names, ignored.inputs.shape[1]) == (("north", "south"), 2)
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace("site", "limb"))
    for site in (None, "site"):
        assert table.load(tmp_path, label="ill", test_fraction=0.5, site=site).train.site_names == ("north", "south")
    (tmp_path / "north.CSV").write_text("age,limb,ill\n5,arm,0\n")
    with refused("two files of one name", "north.CSV"):
        table.load(tmp_path, label="ill", test_fraction=0.5)


def test_table_refuses_damaged_files(tmp_path: Path) -> None:
    with refused("nowhere.csv", "cannot read"):
        table.load(tmp_path / "nowhere.csv", label="ill")
    with refused(".xlsx", ".parquet"):
        table.load(tmp_path / "t.xlsx", label="ill")
    (tmp_path / "empty").mkdir()
    with refused("holds no", "one per site"):
        table.load(tmp_path / "empty", label="ill")
    (tmp_path / "t.csv").write_text("age,ill\n")
    with refused("no record"):
        table.load(tmp_path / "t.csv", label="ill")
    (tmp_path / "t.csv").write_text("age,ill\n1,0\n2\n")
    with refused("record 2", "1 fields"):
        table.load(tmp_path / "t.csv", label="ill")
    (tmp_path / "t.csv").write_text("age,age\n1,0\n")
    with refused("columns 1 and 2 alike"):
        table.load(tmp_path / "t.csv", label="age")
    whole = write_table(tmp_path / "t.parquet", patients()).read_bytes()
    (tmp_path / "t.parquet").write_bytes(whole[: len(whole) // 2])
    with refused("t.parquet", "Parquet"):
        table.load(tmp_path / "t.parquet", label="ill")


# --- the user's own images ----------------------------------------------------------------------------------------


def write_image(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def pixels(seed: int, shape: tuple[int, ...] = (6, 8, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_image_folder_with_sites(tmp_path: Path) -> None:
    seed = 0
    for site in ("south", "north"):
        for name in ("sick", "healthy"):
            for i in range(10):
                write_image(tmp_path / site / name / f"{i}.png", pixels(seed))
                seed += 1
    source = images.load(tmp_path, classes=("healthy", "sick"), sites=True)
    assert source.fitted is None
    assert source.train.site_names == ("north", "south")
    assert len(source.train) + len(source.test) == 40
    assert source.train.inputs.shape[1:] == (3, 6, 8)
    found = {
        (records.site_names[s], int(t), bytes(x.permute(1, 2, 0).contiguous().numpy()))
        for records in (source.train, source.test)
        for x, t, s in zip(records.inputs, records.targets, records.sites, strict=True)
    }
    expected = {
        (site, int(name == "sick"), bytes(pixels(20 * (site == "north") + 10 * (name == "healthy") + i)))
        for site in ("south", "north")
        for name in ("sick", "healthy")
        for i in range(10)
    }
    assert found == expected
    prepared = source.prepare(source.train.inputs)
    assert torch.allclose(prepared, source.train.inputs / 127.5 - 1, atol=1e-5)


def test_image_folder_with_train_and_test_in_grey(tmp_path: Path) -> None:
    for part, n in (("train", 4), ("test", 2)):
        for i in range(n):
            write_image(tmp_path / part / "a" / f"{i}.png", pixels(i, (5, 5)))
            write_image(tmp_path / part / "b" / f"{i}.jpg", pixels(i, (9, 9)))
    source = images.load(tmp_path, channels=1, size=(5, 5))
    assert source.train.inputs.shape == (8, 1, 5, 5)
    assert source.test.targets.tolist() == [0, 0, 1, 1]
    assert source.fitted is not None
    assert torch.equal(source.test.inputs[1, 0], torch.from_numpy(pixels(1, (5, 5))))
    with refused("9×9", "5×5", "size="):
        images.load(tmp_path, channels=1)


def test_image_folder_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with refused("nowhere", "does not exist"):
        images.load(tmp_path / "nowhere")
    with refused("holds no", ".png"):
        images.load(tmp_path)
    for i in range(20):
        write_image(tmp_path / "a" / f"{i}.png", pixels(i))
    with refused("class folder 'a'", "['b']"):
        images.load(tmp_path, classes=["b"])
    with refused("layout", "site/class"):
        images.load(tmp_path, sites=True)
    with refused("channels = 2", "[1, 3]"):
        images.load(tmp_path, channels=2)
    with refused("no test image"):
        images.load(tmp_path, test_fraction=0.0)
    path = tmp_path / "a" / "3.png"
    path.write_bytes(path.read_bytes()[:100])
    with refused("3.png", "damaged"):
        images.load(tmp_path)


# --- augmentation -------------------------------------------------------------------------------------------------


def outcomes(n: int, seed: int, padding: int = 4) -> list[tuple[int, int, bool]]:
    """(down, right, mirrored) of each image, read off one bright pixel pair far from the border."""
    size = 16
    inputs = torch.zeros(n, 1, size, size)
    inputs[:, 0, 7, 7], inputs[:, 0, 7, 8] = 1.0, 2.0
    moved = crop_and_flip(inputs, torch.Generator().manual_seed(seed), padding)
    one, two = (moved == 1).nonzero(), (moved == 2).nonzero()
    mirrored = (two[:, 3] < one[:, 3]).tolist()
    left = torch.minimum(one[:, 3], two[:, 3])
    return list(zip((7 - one[:, 2]).tolist(), (7 - left).tolist(), mirrored, strict=True))


def test_shifts_are_uniform_and_half_are_mirrored() -> None:
    n, kinds = 81 * 2 * 200, 81 * 2
    drawn = outcomes(n, seed=0)
    counts = {outcome: drawn.count(outcome) for outcome in set(drawn)}
    assert {abs(d) for d, _, _ in counts} == set(range(5))
    assert len(counts) == kinds
    # χ² with 161 degrees of freedom exceeds 240 with probability 5e-5: the false-alarm rate for a new seed.
    expected = n / kinds
    assert sum((c - expected) ** 2 / expected for c in counts.values()) < 240
    # The share of mirrored images is within 4 standard errors of ½: false-alarm rate 6e-5.
    share = sum(mirrored for _, _, mirrored in drawn) / n
    assert abs(share - 0.5) < 4 * 0.5 / n**0.5


@pytest.mark.parametrize(("shape", "padding"), [((64, 3, 32, 32), 4), ((40, 1, 7, 5), 2), ((3, 2, 4, 4), 0)])
def test_crop_and_flip_equals_a_loop_over_images(shape: tuple[int, ...], padding: int) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = crop_and_flip(inputs, torch.Generator().manual_seed(2), padding)
    height, width = shape[2:]
    padded = torch.zeros(shape[0], shape[1], height + 2 * padding, width + 2 * padding)
    padded[:, :, padding : padding + height, padding : padding + width] = inputs
    for image, got in zip(padded, result, strict=True):
        crops = [
            image[:, top : top + height, left : left + width]
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        ]
        assert any(torch.equal(got, crop) or torch.equal(got, crop.flip(2)) for crop in crops)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_augmentation_on_the_gpu_equals_the_cpu() -> None:
    inputs = torch.randn((64, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    expected = crop_and_flip(inputs, torch.Generator().manual_seed(2))
    assert torch.equal(crop_and_flip(inputs.cuda(), torch.Generator().manual_seed(2)).cpu(), expected)
    moved = crop_and_flip(inputs.cuda(), torch.Generator("cuda").manual_seed(2))
    assert moved.is_cuda
    assert moved.shape == inputs.shape


def test_augmentation_follows_its_generator_alone() -> None:
    inputs = torch.arange(8 * 3 * 16 * 16).view(8, 3, 16, 16).to(torch.uint8)
    before = torch.get_rng_state()
    one, same, other = (crop_and_flip(inputs, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.dtype == torch.uint8  # raw images too; the border is then black
    assert torch.equal(torch.get_rng_state(), before)
    assert crop_and_flip(inputs[:0], torch.Generator()).shape == (0, 3, 16, 16)  # Poisson batches may be empty
