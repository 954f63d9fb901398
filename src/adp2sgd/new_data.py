"""New data for a finished model: read from files, predicted, evaluated."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adp2sgd.data.encoder import Encoder
from adp2sgd.data.image_encoder import ImageEncoder
from adp2sgd.errors import ConfigError, DataError
from adp2sgd.metrics import Figures
from adp2sgd.model_folder import Model, load_model
from adp2sgd.run_folder import Folder
from adp2sgd.tasks import resolve
from adp2sgd.tree import Inputs

TARGETS = "targets"  # the name of the targets in a file of arrays


@dataclass(frozen=True, eq=False, repr=False)
class NewData:
    """Inputs as the model's training stored them, a name for each row, and its targets where they are known."""

    inputs: Inputs
    names: list[str]
    targets: Tensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """One row per input: its name, what the model says, and for classes with what probability."""

    header: list[str]
    rows: list[list[Any]]

    def text(self) -> str:
        """As CSV."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.header, *self.rows])
        return out.getvalue()


def read_new(model: Model, path: Path, *, labelled: bool = False) -> NewData:
    """A table, images or arrays, whichever the model reads; `labelled`: with targets."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give a file or folder that does, from {Path.cwd()}")
    encoder = model.encoder
    if isinstance(encoder, ImageEncoder):
        files = encoder.list(path)
        return NewData(encoder.encode(files), list(map(str, files)), encoder.targets(files) if labelled else None)
    if isinstance(encoder, Encoder):
        table = encoder.read(path)
        if labelled and encoder.target.column not in table.columns:
            raise DataError(f"{path} has no column {encoder.target.column!r}, the label; add it, or use predict")
        names = [str(row + 1) for row in range(len(table))]
        return NewData(encoder.inputs(table), names, encoder.targets(table) if labelled else None)
    return _read_arrays(model, path, labelled)


def _read_arrays(model: Model, path: Path, labelled: bool) -> NewData:
    arrays = _arrays(path)
    targets = arrays.pop(TARGETS, None)
    if labelled and targets is None:
        raise DataError(f'{path} holds no array "{TARGETS}"; add one, or use predict')
    layout = model.facts["inputs"]
    wanted = layout["names"] or [f"inputs{k}" for k in range(len(layout["parts"]))]
    if len(wanted) == 1 and len(arrays) == 1:
        wanted = list(arrays)
    for name in wanted:
        if name not in arrays:
            raise DataError(f'{path} holds no array "{name}"; the model reads: {", ".join(wanted)}')
    chosen = {name: arrays[name] for name in wanted}
    rows = chosen if layout["names"] else tuple(chosen.values()) if len(chosen) > 1 else next(iter(chosen.values()))
    inputs = model.encoded(rows)
    names = [str(row + 1) for row in range(len(next(iter(chosen.values()))))]
    return NewData(inputs, names, torch.as_tensor(targets) if labelled else None)


def _arrays(path: Path) -> dict[str, Any]:
    """The arrays of a file by name. Nothing is unpickled."""
    try:
        if path.suffix == ".npy":
            return {"inputs": np.load(path, allow_pickle=False)}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return dict(load_file(path))
    except Exception as error:
        raise DataError(
            f"{path} is damaged or holds no plain arrays ({type(error).__name__}); write it again"
        ) from None
    raise DataError(f"{path} is neither .npy nor .npz nor .safetensors, which a model without a table's encoder reads")


def predictions(model: Model, data: NewData) -> Predictions:
    """What the model says of each row."""
    outputs = model.outputs(data.inputs)
    told = model.told(outputs)
    what = "file" if isinstance(model.encoder, ImageEncoder) else "row"
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1 and model.facts["classes"]:
        sure = outputs.softmax(dim=1).amax(dim=1).tolist()
        rows = [[name, each, f"{p:.6f}"] for name, each, p in zip(data.names, told, sure, strict=True)]
        return Predictions([what, "prediction", "probability"], rows)
    return Predictions([what, "prediction"], [[name, each] for name, each in zip(data.names, told, strict=True)])


def evaluated(run: Path, data: Path | None, trust: str | None) -> tuple[Figures, int]:
    """Loss and metrics on labelled data, or on the held-out records of the run's task; and how many records."""
    model = load_model(run, trust)
    if data is not None:
        new = read_new(model, data, labelled=True)
        assert new.targets is not None
        return model.evaluate(new.inputs, new.targets), len(new.targets)
    settings = Folder.open(run).settings
    if ":" in settings.task and trust is None:
        raise ConfigError(f'task = "{settings.task}" is your own; give --data, or --trust {settings.task}')
    task = resolve(trust or settings.task, settings.options, private=settings.privacy.mode == "private")
    inputs, targets = task.test.read(torch.arange(len(task.test)))
    return model.evaluate(inputs, targets), len(targets)
