"""A table of the user's own: CSV or Parquet, with a site column or one file per site.

Messages name the file, the record's number and the column. They never hold a cell; nor a name from the first line,
which in a file without a header is a record.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from adp2sgd.data.folder import Source, held_out, read_bytes
from adp2sgd.data.records import Records
from adp2sgd.errors import ConfigError, DataError

MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "null", "None"})
SPLITS = {"train": False, "test": True}

Column = list[str]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Where = Callable[[int], str]
"""A row's file, and its number there."""


@dataclass(frozen=True, kw_only=True)
class _Schema:
    """What the user declared about the columns; `fitted` collects what had to be taken from the records instead.
    `where` tells the place of a row that contradicts it."""

    ranges: Mapping[str, tuple[float, float]]
    categories: Mapping[str, Sequence[str]]
    where: Where
    fitted: list[str] = field(default_factory=list)


def load(
    path: str | Path,
    *,
    label: str,
    classes: Sequence[object] | None = None,
    site: str | None = None,
    split: str | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    categories: Mapping[str, Sequence[object]] | None = None,
    ignore: Sequence[str] = (),
    test_fraction: float = 0.25,
) -> Source:
    """Inputs float32 [n, features]: every column but `label`, `site`, `split` and `ignore`, in the file's order.

    `path` is one file, or a folder with one file per site. Numbers are scaled from `ranges[column]` to [−1, 1] and
    clipped, `categories[column]` are one-hot, and each column has an indicator of being missing. What is not declared
    (ranges, categories, classes) is taken from the records, and `fitted` names it: private training then refuses.
    Rows are held out by `split` (values train and test) or by a hash of their own content.
    """
    ignore = [ignore] if isinstance(ignore, str) else ignore
    table, where = _read(Path(path), site, ignore)
    site = "site" if Path(path).is_dir() and site is None else site
    named = {"label": label, "site": site, "split": split}
    declared = {name: [str(value) for value in values] for name, values in (categories or {}).items()}
    schema = _Schema(ranges=ranges or {}, categories=declared, where=where)
    for name in [*(name for name in named.values() if name), *schema.ranges, *schema.categories, *ignore]:
        if name not in table:
            raise ConfigError(
                f"column {name!r} is none of the {len(table)} that the first line of {path} names; correct the name "
                "or that line"
            )
    test = _test_rows(table, split, test_fraction, where)
    targets, names = _targets(table[label], label, classes, schema)
    owners, site_names = _codes(table[site]) if site else (None, ())
    features = [name for name in table if name not in {*named.values(), *ignore}]
    if not features:
        raise DataError(f"{path} has no column besides {[n for n in named.values() if n]}; add the features")
    inputs = np.concatenate([_encode(name, table[name], ~test, schema) for name in features], axis=1)
    records = Records(torch.from_numpy(inputs.astype(np.float32)), targets, owners, site_names)
    train, held = (records.take(torch.from_numpy(np.flatnonzero(rows))) for rows in (~test, test))
    return Source(train=train, test=held, classes=len(names), fitted=", ".join(schema.fitted) or None)


def _read(path: Path, site: str | None, ignore: Sequence[str]) -> tuple[dict[str, Column], Where]:
    """The columns by name, as text, and where each row stands. A folder's files are stacked; unless the column `site`
    tells the owner, the file's name does, in a column `site`."""
    if not path.is_dir():
        return _read_file(path), lambda row: f"{path}, record {row + 1}"
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in READERS)
    if not files:
        raise DataError(f"{path} holds no {' or '.join(READERS)} file; put one per site there")
    if len({file.stem for file in files}) < len(files):
        raise DataError(f"{path} holds two files of one name in {[file.name for file in files]}; each file is a site")
    tables = {file.stem: _read_file(file) for file in files}
    columns = list(next(iter(tables.values())))
    for name, table in tables.items():
        if set(table) != set(columns):
            raise DataError(f"{path}: {name} and {files[0].stem} differ in their columns; give all the same first line")
    joined = {name: [value for table in tables.values() for value in table[name]] for name in columns}
    places = [(file, row) for file, table in zip(files, tables.values(), strict=True) for row in range(_rows(table))]
    if site is None and "site" in joined and "site" not in ignore:
        fix = 'set options.site = "site" to go by it, or put it into options.ignore'
        raise DataError(f"each file in {path} is a site, and they have a column 'site' besides; {fix}")
    if site is None or "site" not in joined:
        joined["site"] = [file.stem for file, _ in places]
    return joined, lambda row: f"{places[row][0]}, record {places[row][1] + 1}"


def _rows(table: dict[str, Column]) -> int:
    return len(next(iter(table.values()), ()))


def _read_file(path: Path) -> dict[str, Column]:
    if not path.suffix and not path.exists():
        raise DataError(f"{path} does not exist; give a file or folder that does, from {Path.cwd()}")
    if path.suffix.lower() not in READERS:
        raise DataError(f"{path} is neither {' nor '.join(READERS)}; convert it to one of them")
    table = READERS[path.suffix.lower()](path)
    if not _rows(table):
        raise DataError(f"{path} holds no record; the first line names the columns, each further line is a record")
    return table


def _read_csv(path: Path) -> dict[str, Column]:
    try:
        rows = [row for row in csv.reader(io.StringIO(read_bytes(path).decode("utf-8-sig"), newline="")) if row]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8 (from byte {error.start} on); save it as such") from None
    except csv.Error:
        raise DataError(f"{path} is no CSV file; save it as such") from None
    header = [name.strip() for name in rows[0]] if rows else []
    if len(set(header)) < len(header):
        twice = next(place for place, name in enumerate(header) if name in header[:place])
        raise DataError(
            f"{path}: the first line names columns {header.index(header[twice]) + 1} and {twice + 1} alike; rename one"
        )
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise DataError(f"{path}, record {number - 1} has {len(row)} fields instead of {len(header)}; complete it")
    columns = zip(*rows[1:], strict=True) if len(rows) > 1 else ([] for _ in header)
    return {name: [value.strip() for value in column] for name, column in zip(header, columns, strict=True)}


def _read_parquet(path: Path) -> dict[str, Column]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow; install adp2sgd[parquet] or save the table as CSV") from error
    content = pyarrow.BufferReader(read_bytes(path))
    try:
        table = pyarrow.parquet.read_table(content)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged or no Parquet file ({type(error).__name__}); write it again") from None
    return {name: ["" if v is None else str(v) for v in table[name].to_pylist()] for name in table.column_names}


READERS = {".csv": _read_csv, ".parquet": _read_parquet}


def _test_rows(table: dict[str, Column], split: str | None, fraction: float, where: Where) -> Bools:
    """Which rows are held out. By content: adding or removing a record never moves another."""
    if split is None:
        rows = zip(*(table[name] for name in sorted(table)), strict=True)
        test = np.array([held_out("\x1f".join(row).encode(), fraction) for row in rows])
    else:
        for row, value in enumerate(table[split]):
            if value not in SPLITS:
                allowed = " nor ".join(SPLITS)
                raise DataError(f"{where(row)}: the value in column {split!r} is neither {allowed}; correct it")
        test = np.array([SPLITS[value] for value in table[split]])
    if test.all() or not test.any():
        raise DataError(f"{len(test)} records give no {'training' if test.all() else 'test'} set; change the split")
    return test


def _targets(
    column: Column, label: str, classes: Sequence[object] | None, schema: _Schema
) -> tuple[torch.Tensor, Sequence[str]]:
    """Class indices and the names of the classes."""
    if classes is None:
        for row, value in enumerate(column):
            if value in MISSING:
                raise DataError(f"{schema.where(row)}: column {label!r} lacks a label; drop such records")
        schema.fitted.append(f"classes of {label!r} (declare options.classes)")
        return _codes(column)
    index = {str(name): i for i, name in enumerate(classes)}
    if len(index) < len(classes):
        raise ConfigError(f"options.classes = {list(classes)} names a class twice; give each once")
    for row, value in enumerate(column):
        if value not in index:
            raise DataError(
                f"{schema.where(row)}: the value in column {label!r} is none of the classes {list(index)}; correct it "
                "or the classes"
            )
    return torch.tensor([index[value] for value in column]), list(index)


def _codes(column: Column) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Each value's place among the sorted distinct values, and these values."""
    names, codes = np.unique(np.array(column), return_inverse=True)
    return torch.from_numpy(codes.astype(np.int64)), tuple(names.tolist())


def _encode(name: str, column: Column, train: Bools, schema: _Schema) -> Floats:
    """[n, width]: the scaled number or the one-hot category, zero where missing; then the indicator of missing."""
    missing = np.array([value in MISSING for value in column])
    if name in schema.categories:
        values = _one_hot(name, column, missing, schema.categories[name], schema.where)
    elif name in schema.ranges:
        low, high = schema.ranges[name]
        if not 0 < high - low < np.inf:
            raise ConfigError(f"ranges: {name} = ({low}, {high}) is no range; give finite (low, high) with low < high")
        numbers = _numbers(name, column, missing, schema.where)
        values = np.clip(2 * (numbers - low) / (high - low) - 1, -1, 1)[:, None]
    else:
        values = _fit(name, column, missing, train, schema)
    return np.column_stack([np.where(missing[:, None], 0.0, values), missing])


def _fit(name: str, column: Column, missing: Bools, train: Bools, schema: _Schema) -> Floats:
    """Not declared: standardize numbers by the training records, or take the categories that occur."""
    if not _numeric(column, missing):
        schema.fitted.append(f"categories of {name!r} (declare options.categories, or options.ignore it)")
        known = sorted({value for value, gone in zip(column, missing, strict=True) if not gone})
        return _one_hot(name, column, missing, known, schema.where)
    schema.fitted.append(f"mean and deviation of {name!r} (declare options.ranges)")
    numbers = _numbers(name, column, missing, schema.where)
    seen = numbers[train & ~missing]
    mean, std = (seen.mean(), seen.std()) if len(seen) else (0.0, 1.0)
    return ((numbers - mean) / (std or 1.0))[:, None]


def _numeric(column: Column, missing: Bools) -> bool:
    try:
        _ = [float(value) for value, gone in zip(column, missing, strict=True) if not gone]
    except ValueError:
        return False
    return True


def _numbers(name: str, column: Column, missing: Bools, where: Where) -> Floats:
    """The column as numbers, zero where missing."""
    numbers = np.zeros(len(column))
    for row in _present(missing):
        try:
            numbers[row] = float(column[row])
        except ValueError:
            raise DataError(
                f"{where(row)}: the value in column {name!r} is no number; correct it or declare its categories"
            ) from None
        if not np.isfinite(numbers[row]):
            raise DataError(f"{where(row)}: the value in column {name!r} is not finite; correct it or leave it empty")
    return numbers


def _one_hot(name: str, column: Column, missing: Bools, known: Sequence[str], where: Where) -> Floats:
    index = {value: i for i, value in enumerate(known)}
    for row in _present(missing):
        if column[row] not in index:
            raise DataError(
                f"{where(row)}: the value in column {name!r} is none of its categories {list(known)}; correct it or "
                "add a category"
            )
    codes = np.array([index.get(value, 0) for value in column])
    rows: Floats = np.eye(len(known))[codes]
    return rows


def _present(missing: Bools) -> list[int]:
    rows: list[int] = np.flatnonzero(~missing).tolist()
    return rows
