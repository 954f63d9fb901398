"""CIFAR-10 (Krizhevsky, 2009) from its official files, binary or Python."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adp2sgd.data.folder import Source, check_labels, check_md5, download, download_to, find, read_bytes
from adp2sgd.data.images import Normalize
from adp2sgd.data.records import Records
from adp2sgd.errors import DataError
from adp2sgd.files import replacing

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
URL_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
MD5 = {
    BINARY: {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    PYTHON: {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
}
PIXELS = 3 * 32 * 32
NORMALIZE = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def load(data_dir: str | Path | None = None) -> Source:
    """50,000 + 10,000 images, uint8 [n, 3, 32, 32], every file's md5 verified; downloaded where it is not found.

    `prepare` normalizes by the published channel means and deviations, not by statistics of the records at hand.
    """
    folder = find((BINARY, PYTHON), ("test_batch.bin", "test_batch"), data_dir) or _fetch(download_to(data_dir))
    kind = BINARY if (folder / "test_batch.bin").is_file() else PYTHON
    read = {BINARY: _binary, PYTHON: _python}[kind]
    batches = [read(folder / name, md5) for name, md5 in MD5[kind].items()]
    inputs, targets = [batch.inputs for batch in batches[:-1]], [batch.targets for batch in batches[:-1]]
    train = Records(torch.cat(inputs), torch.cat(targets))
    return Source(train=train, test=batches[-1], classes=10, prepare=NORMALIZE)


def _binary(path: Path, md5: str) -> Records:
    """Records of 3,073 bytes: the label, then the red, green and blue planes."""
    content = read_bytes(path)
    if not content or len(content) % (1 + PIXELS):
        raise DataError(f"{path} is truncated ({len(content):,} bytes); delete it and fetch it again")
    check_md5(content, md5, path)
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return _records(rows[:, 0], rows[:, 1:], path)


def _python(path: Path, md5: str) -> Records:
    """A pickled dictionary with `labels` (a list) and `data`, uint8 [n, 3072]."""
    content = read_bytes(path)
    check_md5(content, md5, path)
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        labels, pixels = np.asarray(batch[b"labels"], np.int64), np.asarray(batch[b"data"], np.uint8)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{path} is not a CIFAR-10 batch ({error}); delete it and fetch it again") from error
    return _records(labels, pixels, path)


def _records(labels: npt.NDArray[np.integer], pixels: npt.NDArray[np.uint8], path: Path) -> Records:
    if pixels.shape != (len(labels), PIXELS):
        raise DataError(f"{path} has {len(labels)} labels and pixels of shape {pixels.shape}; fetch it again")
    return Records(torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32), check_labels(labels, 10, path))


_rebuild = np.empty(0).__reduce__()[0]  # numpy's own function, wherever this version keeps it
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _rebuild,
    ("numpy._core.multiarray", "_reconstruct"): _rebuild,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays and built-in containers. Any other name is refused, so a file can run no code."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def _fetch(root: Path) -> Path:
    """Download the official archive and keep its six binary files in `root`/cifar-10-batches-bin."""
    folder = root / BINARY
    archive = folder / f".{os.getpid()}.tar.gz"  # a name of its own: learners may start at the same time
    download(URL, URL_MD5, archive)
    try:
        with tarfile.open(archive) as tar:
            for name in MD5[BINARY]:
                member = tar.extractfile(f"{BINARY}/{name}")  # written by us under our own name: no path can escape
                with replacing(folder / name) as part:
                    part.write_bytes(member.read() if member else b"")
    finally:
        archive.unlink()
    return folder
