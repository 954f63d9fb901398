"""A table of the user's own: CSV or Parquet, with a site column or one file per site.

Messages name the file, the record's number and the column. They never hold a cell; nor a name from the first line,
which in a file without a header is a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from adp2sgd.data import features
from adp2sgd.data.encoder import Encoder
from adp2sgd.data.features import MISSING, Bools, Feature
from adp2sgd.data.folder import Source, held_out
from adp2sgd.data.records import Records, Units
from adp2sgd.data.tablefile import Column, Format, Table, Where, read
from adp2sgd.data.target import TARGETS, Target, category_values, declared_classes, fitted_classes, number_target
from adp2sgd.data.units import looks_like_people
from adp2sgd.errors import ConfigError, DataError

SPLITS = {"train": False, "test": True}


def load(
    path: str | Path,
    *,
    label: str,
    target: str = "class",
    classes: Sequence[object] | None = None,
    class_weights: Mapping[str, float] | None = None,
    site: str | None = None,
    unit: str | None = None,
    split: str | None = None,
    ranges: Mapping[str, Sequence[object]] | None = None,
    categories: Mapping[str, Sequence[object]] | None = None,
    ignore: Sequence[str] = (),
    test_fraction: float = 0.25,
    delimiter: str | None = None,
    encoding: str | None = None,
    decimal: str = ".",
    date_format: str | None = None,
) -> Source:
    """Inputs float32 [n, features]: every column but `label`, `site`, `unit`, `split` and `ignore`, in the file's
    order.

    `path` is one file, or a folder with one file per site. Numbers and dates are scaled from `ranges[column]` to
    [−1, 1] and clipped, `categories[column]` are one-hot, and each column has an indicator of being missing. The label
    is one of `classes`, or a number that is scaled from its range (`target = "number"`). What is not declared is taken
    from the records, and `fitted` names it: private training then refuses. Rows are held out by `split` (values train
    and test) or by a hash of their own content. `unit` is the column that tells whose a record is: all records of a
    unit are held out together or not at all, and a private run protects the unit as a whole.
    """
    ignore = [ignore] if isinstance(ignore, str) else ignore
    written = Format(delimiter=delimiter, encoding=encoding, decimal=decimal, date_format=date_format)
    ranges, categories, classes = ranges or {}, categories or {}, classes or None
    table = read(Path(path), written, site=site, ignore=ignore)
    site = "site" if Path(path).is_dir() and site is None else site
    roles = [name for name in (label, site, unit, split) if name]
    _check_names(path, table, [*roles, *ranges, *categories, *ignore])
    names = [name for name in table.columns if name not in {*roles, *ignore}]
    if not names:
        raise DataError(f"{path} has no column besides {roles}; add the features")
    test = _test_rows(table, split, unit, test_fraction)
    schema = _Schema(table, written, ranges, categories, ~test)
    chosen = schema.target(label, target, classes, class_weights)
    encoder = Encoder(features=tuple(map(schema.feature, names)), target=chosen, written=written)
    source = _source(table, encoder, test, site, unit)
    return replace(source, fitted=schema.fitted)


def _source(table: Table, encoder: Encoder, test: Bools, site: str | None, unit: str | None) -> Source:
    """The table's rows as records, in two parts."""
    owners, site_names = _sites(table.columns[site], site, table.where) if site else (None, ())
    units = None if unit is None else Units.named(table.columns[unit], unit)
    records = Records(encoder.inputs(table), encoder.targets(table), owners, site_names, units)
    train, held = (records.take(torch.from_numpy(np.flatnonzero(rows))) for rows in (~test, test))
    target = encoder.target
    return Source(
        train=train,
        test=held,
        classes=target.outputs,
        identifier=looks_like_people(table.columns) if unit is None else None,
        loss=target.loss,
        metrics=target.metrics,
        encoder=encoder,
    )


def _check_names(path: str | Path, table: Table, names: Sequence[str]) -> None:
    for name in names:
        if name not in table.columns:
            count = len(table.columns)
            alone = "; if its delimiter is not a comma, set options.delimiter" if count == 1 else ""
            raise ConfigError(
                f"column {name!r} is none of the {count} that the first line of {path} names; correct the name or that "
                f"line{alone}"
            )


class _Schema:
    """What the user declared about the columns. An empty list, which `adp2sgd init` leaves where it does not know, is
    the same as no declaration: `fitted` names what was taken from the records instead."""

    def __init__(
        self,
        table: Table,
        written: Format,
        ranges: Mapping[str, Sequence[object]],
        categories: Mapping[str, Sequence[object]],
        train: Bools,
    ) -> None:
        self.table, self.written, self.train = table, written, train
        self.ranges, self.categories = (
            {name: each for name, each in given.items() if each != []} for given in (ranges, categories)
        )
        self._measured: list[str] = []
        self._texts: list[str] = []
        self._label: list[str] = []

    @property
    def fitted(self) -> str | None:
        """In words, with the option that declares it."""
        parts = {
            "mean and deviation of {} (declare options.ranges)": self._measured,
            "categories of {} (declare options.categories, or options.ignore it)": self._texts,
            "classes of {} (declare options.classes)": self._label,
        }
        told = [text.format(", ".join(map(repr, names))) for text, names in parts.items() if names]
        return ", ".join(told) or None

    def feature(self, name: str) -> Feature:
        """How the column `name` is encoded."""
        if name in self.categories and name in self.ranges:
            raise ConfigError(f"column {name!r} has options.ranges and options.categories; remove one of them")
        if name in self.categories:
            return self._one_hot(name, self.categories[name])
        if name in self.ranges:
            return features.scaled(name, self.ranges[name], self.written)
        found = features.fitted(name, self.table.columns[name], self.train, self.table.where, self.written)
        (self._texts if isinstance(found, features.OneHot) else self._measured).append(name)
        return found

    @staticmethod
    def _one_hot(name: str, values: object) -> features.OneHot:
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigError(f'options.categories: {name} = {values!r} is no list; write {name} = ["a", "b"]')
        told = f"options.categories: {name} = {list(values)}"
        return features.OneHot(column=name, values=category_values(told, values))

    def target(self, label: str, kind: str, classes: Sequence[object] | None, weights: object) -> Target:
        """How the label is encoded."""
        column, where = self.table.columns[label], self.table.where
        if kind not in TARGETS:
            raise ConfigError(f'options.target = "{kind}" is unknown; use one of: {", ".join(TARGETS)}')
        if kind == "number":
            if classes is not None or weights is not None:
                raise ConfigError('options.target = "number" has no classes; remove options.classes and class_weights')
            if label not in self.ranges:
                self._measured.append(label)
            return number_target(label, column, self.ranges.get(label), self.train, where, self.written)
        if label in self.ranges or label in self.categories:
            raise ConfigError(
                f"the label {label!r} has a range or categories; declare options.classes, or set options.target = "
                '"number" with its range'
            )
        if classes is not None:
            return declared_classes(label, classes, weights)
        self._label.append(label)
        return fitted_classes(label, column, where, self.written, weights)


def _test_rows(table: Table, split: str | None, unit: str | None, fraction: float) -> Bools:
    """Which rows are held out. By content: adding or removing a record, or a unit, never moves another."""
    owners = None if unit is None else _filled(table.columns[unit], unit, table.where)
    if split is None and owners is not None:
        test = np.array([held_out(owner.encode(), fraction) for owner in owners])
    elif split is None:
        rows = zip(*(table.columns[name] for name in sorted(table.columns)), strict=True)
        test = np.array([held_out("\x1f".join(row).encode(), fraction) for row in rows])
    else:
        for row, value in enumerate(table.columns[split]):
            if value not in SPLITS:
                allowed = " nor ".join(SPLITS)
                raise DataError(f"{table.where(row)}: the value in column {split!r} is neither {allowed}; correct it")
        test = np.array([SPLITS[value] for value in table.columns[split]])
        _refuse_divided(owners, test, unit, table.where)
    if test.all() or not test.any():
        raise DataError(f"{len(test)} records give no {'training' if test.all() else 'test'} set; change the split")
    return test


def _filled(column: Column, name: str, where: Where) -> Column:
    for row, value in enumerate(column):
        if value in MISSING:
            raise DataError(f"{where(row)}: column {name!r} names no unit; fill it in, or drop the record")
    return column


def _refuse_divided(owners: Column | None, test: Bools, unit: str | None, where: Where) -> None:
    """Refuse a split that trains on some records of a unit and holds out others."""
    held: dict[str, bool] = {}
    for row, owner in enumerate(owners or ()):
        if held.setdefault(owner, bool(test[row])) != test[row]:
            raise DataError(f"{where(row)}: its {unit} has records for training and for testing; give all the same")


def _sites(column: Column, name: str, where: Where) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Each record's place among the sorted names of sites, and these names."""
    for row, value in enumerate(column):
        if value in MISSING:
            raise DataError(f"{where(row)}: column {name!r} names no site; fill it in, every record has one owner")
    names, codes = np.unique(np.array(column), return_inverse=True)
    return torch.from_numpy(codes.astype(np.int64)), tuple(names.tolist())
