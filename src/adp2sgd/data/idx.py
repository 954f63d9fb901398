"""MNIST and Fashion-MNIST from their official idx files, gzipped or not."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from adp2sgd.data.folder import Source, check_labels, check_md5, download, download_to, find, read_bytes
from adp2sgd.data.images import Normalize
from adp2sgd.data.records import Records
from adp2sgd.errors import ConfigError, DataError

TRAIN = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@dataclass(frozen=True, kw_only=True)
class Official:
    """Where a set is published, with the md5 of its files as published (gz) and unpacked (raw)."""

    url: str
    folders: tuple[str, ...]
    gz_md5: dict[str, str]
    raw_md5: dict[str, str]
    prepare: Normalize


SETS = {
    "mnist": Official(
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        folders=("mnist", "MNIST/raw"),
        gz_md5={
            "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        raw_md5={
            "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        },
        prepare=Normalize((0.1307,), (0.3081,)),
    ),
    "fashion": Official(
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        folders=("fashion-mnist", "fashion", "FashionMNIST/raw"),
        gz_md5={
            "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        raw_md5={
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
        prepare=Normalize((0.2860,), (0.3530,)),
    ),
}


def load(name: str, data_dir: str | Path | None = None) -> Source:
    """60,000 + 10,000 images, uint8 [n, 1, 28, 28], every file's md5 verified; downloaded where it is not found.

    `prepare` normalizes by the published mean and deviation, not by statistics of the records at hand.
    """
    if name not in SETS:
        raise ConfigError(f"data set {name!r} is unknown; use one of {sorted(SETS)}")
    official = SETS[name]
    folder = find(official.folders, (TEST[1], f"{TEST[1]}.gz"), data_dir)
    if folder is None:
        folder = download_to(data_dir) / official.folders[0]
        for file, md5 in official.gz_md5.items():
            download(f"{official.url}{file}.gz", md5, folder / f"{file}.gz")
    train, test = (_records(folder, *files, official) for files in (TRAIN, TEST))
    return Source(train=train, test=test, classes=10, prepare=official.prepare)


def _records(folder: Path, images: str, labels: str, official: Official) -> Records:
    pixels = _read(folder, images, 3, official.raw_md5[images])
    targets = check_labels(_read(folder, labels, 1, official.raw_md5[labels]), 10, folder / labels)
    return Records(torch.from_numpy(pixels.copy()).unsqueeze(1), targets)


def _read(folder: Path, name: str, dimensions: int, md5: str) -> npt.NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes: 0, 0, 8, dimensions, then each size as a big-endian uint32."""
    raw = (folder / name).is_file()
    path = folder / (name if raw else f"{name}.gz")
    content = read_bytes(path)
    try:
        content = content if raw else gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or truncated ({error}); delete it and fetch it again") from error
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path} is not an idx file of {dimensions} dimensions; delete it and fetch it again")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != np.prod(shape, dtype=np.int64):
        raise DataError(f"{path} holds {len(content) - start:,} bytes for shape {shape}: truncated; fetch it again")
    check_md5(content, md5, path)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
