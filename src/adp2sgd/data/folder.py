"""Where data lives, how it gets there, and what every data source returns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adp2sgd.data.records import Records
from adp2sgd.errors import DataError
from adp2sgd.files import replacing

if TYPE_CHECKING:
    from adp2sgd.data.encoder import Encoder
    from adp2sgd.data.image_encoder import ImageEncoder


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A data set in memory. `prepare` treats records one by one and uses public constants only.

    `fitted` names whatever was computed from the records themselves; private mode then refuses the data.
    """

    train: Records
    test: Records
    classes: int  # outputs of the model; 1 where the target is a number
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.float  # batch as stored → what the model reads
    fitted: str | None = None
    identifier: str | None = None  # what seems to tell whose a record is, where records have no units
    loss: Callable[[Tensor, Tensor], Tensor] | None = None  # one per record; None: the cross-entropy
    metrics: tuple[str, ...] = ("accuracy",)
    encoder: Encoder | ImageEncoder | None = None  # turns new inputs into records without the training data


def cache_folder() -> Path:
    """The per-user folder for downloads: $XDG_CACHE_HOME/adp2sgd, by default ~/.cache/adp2sgd."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "adp2sgd"


def find(names: Sequence[str], markers: Sequence[str], data_dir: str | Path | None = None) -> Path | None:
    """The first folder that holds one of the `markers` (files that are written last); None where there is none.

    Looked through in turn: `data_dir`, $ADP2SGD_DATA, the user's cache; in each of them first the standard subfolders
    `names`, then the folder itself.
    """
    for root in _roots(data_dir):
        for folder in (*(root / name for name in names), root):
            if any((folder / marker).is_file() for marker in markers):
                return folder
    return None


def download_to(data_dir: str | Path | None = None) -> Path:
    """Where a download belongs: the first of `data_dir`, $ADP2SGD_DATA and the user's cache that is set."""
    return _roots(data_dir)[0]


def _roots(data_dir: str | Path | None) -> list[Path]:
    named = {"the data folder": data_dir, "--data-dir or ADP2SGD_DATA": os.environ.get("ADP2SGD_DATA")}
    roots = []
    for name, value in named.items():
        if value:
            if not Path(value).is_dir():
                raise DataError(f"{name} {value} is not a folder; create it or correct the path")
            roots.append(Path(value))
    return [*roots, cache_folder()]


def download(url: str, md5: str, to: Path) -> None:
    """Fetch `url` into the file `to`, which appears only once it is complete and its checksum is right."""
    with replacing(to) as part:
        try:
            found = _fetch(url, part)
        except (OSError, HTTPException) as error:
            raise DataError(
                f"could not download {url} ({getattr(error, 'reason', error)}); put the folder "
                f"{to.parent.name} under {to.parent.parent}, or set ADP2SGD_DATA to the folder that holds it"
            ) from error
        if found != md5:
            raise DataError(f"{url} has md5 {found} instead of {md5}: a damaged download or another file; try again")


def _fetch(url: str, part: Path) -> str:
    """Write what `url` holds to `part`, with a progress bar on standard error; returns its md5."""
    from urllib.request import urlopen

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    digest = hashlib.md5(usedforsecurity=False)
    with (
        urlopen(url, timeout=30) as answer,
        part.open("wb") as out,
        Progress(*columns, console=Console(stderr=True)) as bar,
    ):
        size = answer.headers.get("Content-Length")
        task = bar.add_task(url.rsplit("/", 1)[-1], total=int(size) if size else None)
        while block := answer.read(1 << 20):
            out.write(block)
            digest.update(block)
            bar.advance(task, len(block))
    return digest.hexdigest()


def read_bytes(path: Path) -> bytes:
    """The file's content; a missing file is named in one line."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path.absolute()} ({error.strerror}); correct the path or restore it") from None


def check_md5(content: bytes, md5: str, path: Path) -> None:
    """Refuse content that differs from the official file."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(f"{path} has md5 {found}, the official file {md5}; delete it and fetch it again")


def check_labels(labels: npt.NDArray[np.integer], classes: int, where: object) -> Tensor:
    """The labels as int64; refuses any outside 0 … classes − 1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{where}: label number {wrong[0] + 1} is outside 0 … {classes - 1}; correct the file or the number of "
            "classes"
        )
    return torch.from_numpy(labels.astype(np.int64))


def held_out(content: bytes, fraction: float) -> bool:
    """Whether a record belongs to the test set: decided by its own content, so no other record can change it."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") < fraction * 2**64
