"""UCI Heart Disease (CC BY 4.0) from four hospitals: the natural data of sites that keep their records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from adp2sgd.data.folder import Source, download, download_to, find, held_out, read_bytes
from adp2sgd.data.records import Records
from adp2sgd.errors import DataError

URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
FOLDER = "heart_disease"
HOSPITALS = {  # name → md5 of the published file
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
TEST_FRACTION = 0.25

COLUMNS = (
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
    "slope",
    "ca",
    "thal",
)
RANGES = {  # what a clinician would call possible; chosen from the meaning of the column, not from these records
    "age": (20.0, 90.0),  # years
    "trestbps": (80.0, 200.0),  # resting blood pressure, mmHg
    "chol": (100.0, 400.0),  # serum cholesterol, mg/dl
    "thalach": (60.0, 210.0),  # highest heart rate, 1/min
    "oldpeak": (-3.0, 6.0),  # ST depression by exercise, mm
    "ca": (0.0, 3.0),  # coloured major vessels
}
ZERO_IS_MISSING = ("trestbps", "chol")  # two hospitals wrote 0 where it was not measured
CATEGORIES = {
    "sex": (0.0, 1.0),
    "cp": (1.0, 2.0, 3.0, 4.0),  # kind of chest pain
    "fbs": (0.0, 1.0),  # fasting blood sugar over 120 mg/dl
    "restecg": (0.0, 1.0, 2.0),
    "exang": (0.0, 1.0),  # angina by exercise
    "slope": (1.0, 2.0, 3.0),
    "thal": (3.0, 6.0, 7.0),
}


def load(data_dir: str | Path | None = None, hospitals: tuple[str, ...] = tuple(HOSPITALS)) -> Source:
    """303 + 294 + 123 + 200 patients with their hospital as site; target 1 where a disease was found (num > 0).

    `hospitals`: whose files are read; those of others need not be there.

    Nothing is fitted: numbers are scaled from fixed medical ranges to [−1, 1] (0 where missing), categories are
    one-hot, and each column has an indicator of being missing. About a quarter of each hospital is held out, by a hash
    of the record itself. Files are checked against their md5 when downloaded; at rest they may be the site's own.
    """
    for name in hospitals:
        if name not in HOSPITALS:
            raise DataError(f'hospital "{name}" is unknown; use one of: {", ".join(HOSPITALS)}')
    if not hospitals:
        raise DataError(f"hospitals is empty; use one of: {', '.join(HOSPITALS)}")
    folder = find((FOLDER, "heart-disease"), (f"processed.{hospitals[-1]}.data",), data_dir)
    if folder is None:
        folder = download_to(data_dir) / FOLDER
        for hospital in hospitals:
            download(f"{URL}processed.{hospital}.data", HOSPITALS[hospital], folder / f"processed.{hospital}.data")
    lines, sites = [], []
    for site, hospital in enumerate(hospitals):
        rows = _lines(folder / f"processed.{hospital}.data")
        lines += rows
        sites += [site] * len(rows)
    values = np.stack([_values(line, where) for line, where in lines])
    records = Records(_encode(values), torch.from_numpy(values[:, -1] > 0).long(), torch.tensor(sites), hospitals)
    test = torch.tensor([held_out(line.encode(), TEST_FRACTION) for line, _ in lines])
    return Source(train=records.take((~test).nonzero()[:, 0]), test=records.take(test.nonzero()[:, 0]), classes=2)


def _lines(path: Path) -> list[tuple[str, str]]:
    """The records of one hospital, each with its place for messages."""
    text = read_bytes(path).decode("ascii", "replace")
    return [(line.strip(), f"{path}, line {n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def _values(line: str, where: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The columns of one record, then the diagnosis; NaN where missing."""
    fields = line.split(",")
    if len(fields) != len(COLUMNS) + 1:
        raise DataError(f"{where} has {len(fields)} fields instead of {len(COLUMNS) + 1}; restore the file")
    values = np.array(
        [_number(field, f"{where}: {name}") for name, field in zip((*COLUMNS, "num"), fields, strict=True)]
    )
    if not 0 <= values[-1] <= 4:
        raise DataError(f"{where}: the diagnosis (num) is outside 0 … 4; correct the record")
    for name, known in CATEGORIES.items():
        value = values[COLUMNS.index(name)]
        if not (np.isnan(value) or value in known):
            raise DataError(f"{where}: {name} is none of {known}; correct the record or write ?")
    return values


def _number(field: str, where: str) -> float:
    try:
        return float("nan") if field.strip() in ("?", "-9") else float(field)
    except ValueError:
        raise DataError(f"{where} is not a number; use one, or ? where it is missing") from None


def _encode(values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> torch.Tensor:
    """[n, 14] → float32 [n, features], one record at a time."""
    features = []
    for column, name in enumerate(COLUMNS):
        value = values[:, column].copy()
        if name in ZERO_IS_MISSING:
            value[value == 0] = np.nan
        if name in RANGES:
            low, high = RANGES[name]
            features.append(np.clip(2 * (value - low) / (high - low) - 1, -1, 1))
        else:
            features += [np.where(np.isnan(value), np.nan, value == known) for known in CATEGORIES[name]]
        features.append(np.isnan(value))
    return torch.from_numpy(np.nan_to_num(np.stack(features, axis=1)).astype(np.float32))
