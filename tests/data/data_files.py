"""Small files in the real format of every data source, and how a refusal must read."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import pickle
import re
import struct
import threading
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from adp2sgd.data import cifar10, heart, idx
from adp2sgd.errors import Adp2sgdError, DataError

SHARED = Path(__file__).parents[3] / "shared" / "data"


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


PATIENT = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"


def heart_files(root: Path, lines: dict[str, list[str]] | None = None) -> Path:
    where = root / "heart_disease"
    where.mkdir(parents=True)
    for age, hospital in enumerate(heart.HOSPITALS, 30):
        rows = [f"{age},1,4,{100 + i},0,?,0,127,0,.7,1,?,?,{i % 5}" for i in range(20)]
        (where / f"processed.{hospital}.data").write_text("\n".join((lines or {}).get(hospital, rows)) + "\n")
    return where


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


def write_image(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def pixels(seed: int, shape: tuple[int, ...] = (6, 8, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
