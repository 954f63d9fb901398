"""How the columns of a table become numbers. Each kind of column is data: it is saved with a model and read again.

Messages name the place of a wrong value and never show it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from adp2sgd.data.tablefile import Column, Format, Where
from adp2sgd.errors import ConfigError, DataError

MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "null", "None", "NaT"})
MOST_CATEGORIES = 100  # that are taken from the records; more must be declared
SECONDS_PER_DAY = 86_400.0
THOUSANDS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d+)?")  # 1.234.567,8

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Value = str | int | float
"""A category or class: text matches the same text; a number matches every way to write it, such as 1 and 1.0."""


def missing(column: Column) -> Bools:
    return np.array([value in MISSING for value in column], dtype=bool)


def number(text: str, written: Format) -> float:
    """ValueError where the text is no number."""
    if written.decimal == ",":
        if "." in text and not THOUSANDS.fullmatch(text):
            raise ValueError
        text = text.replace(".", "").replace(",", ".")
    return float(text)


def decimal(text: str, written: Format) -> bool:
    """Whether the text is a number that is not whole."""
    return not _number_or_nan(text, written).is_integer() and reads(text, written, date=False)


def days(text: str, written: Format) -> float:
    """A date, or a date with a time, as days since 1970. ValueError where the text is none."""
    if written.date_format is None:
        moment = datetime.fromisoformat(text)
    else:
        moment = datetime.strptime(text, written.date_format)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() / SECONDS_PER_DAY


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A number, or a date, scaled from its declared range to [−1, 1] and clipped to it."""

    KIND: ClassVar[str] = "range"

    column: str
    low: float
    high: float
    date: bool = False

    def encode(self, column: Column, where: Where, written: Format) -> Floats:
        """[n, 1]; 0 where missing."""
        values = _measured(self.column, column, where, written, date=self.date)
        return np.clip(2 * (values - self.low) / (self.high - self.low) - 1, -1, 1)[:, None]

    def decode(self, value: float) -> float:
        """The measured value that `value` stands for."""
        return self.low + (value + 1) * (self.high - self.low) / 2

    @property
    def width(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class Standardized:
    """A number, or a date, less its mean over the training records, divided by their deviation."""

    KIND: ClassVar[str] = "standardized"

    column: str
    mean: float
    deviation: float
    date: bool = False

    def encode(self, column: Column, where: Where, written: Format) -> Floats:
        values = _measured(self.column, column, where, written, date=self.date)
        return ((values - self.mean) / self.deviation)[:, None]

    def decode(self, value: float) -> float:
        return self.mean + value * self.deviation

    @property
    def width(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class OneHot:
    """One input per category."""

    KIND: ClassVar[str] = "categories"

    column: str
    values: tuple[Value, ...]

    def encode(self, column: Column, where: Where, written: Format) -> Floats:
        known = f"its categories {list(self.values)}; correct it or add a category"
        codes = places(self.column, column, self.values, where, written, known)
        rows: Floats = np.eye(len(self.values))[codes]
        return rows

    @property
    def width(self) -> int:
        return len(self.values)


Feature = Scaled | Standardized | OneHot
KINDS: dict[str, type[Scaled] | type[Standardized] | type[OneHot]] = {
    kind.KIND: kind for kind in (Scaled, Standardized, OneHot)
}


def to_dict(feature: Feature) -> dict[str, Any]:
    return {"kind": feature.KIND, **asdict(feature)}


def from_dict(raw: Mapping[str, Any]) -> Feature:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k != "kind"}
    return KINDS[raw["kind"]](**values)


def encode(feature: Feature, column: Column, where: Where, written: Format) -> Floats:
    """[n, width + 1]: the value, zeros where it is missing; then 1 where it is missing."""
    gone = missing(column)
    return np.column_stack([np.where(gone[:, None], 0.0, feature.encode(column, where, written)), gone])


def places(
    name: str, column: Column, known: Sequence[Value], where: Where, written: Format, expected: str
) -> npt.NDArray[np.int64]:
    """Each value's place among the `known` ones; 0 where missing. Others are refused."""
    texts = {value: i for i, value in enumerate(known) if isinstance(value, str)}
    numbers = {float(value): i for i, value in enumerate(known) if not isinstance(value, str)}
    found = np.zeros(len(column), dtype=np.int64)
    for row in np.flatnonzero(~missing(column)).tolist():
        place = texts.get(column[row])
        if place is None and numbers:
            place = numbers.get(_number_or_nan(column[row], written))
        if place is None:
            raise DataError(f"{where(row)}: the value in column {name!r} is none of {expected}")
        found[row] = place
    return found


def _number_or_nan(text: str, written: Format) -> float:
    try:
        return number(text, written)
    except ValueError:
        return float("nan")


def _measured(name: str, column: Column, where: Where, written: Format, *, date: bool) -> Floats:
    """The column as numbers, 0 where missing."""
    numbers = np.zeros(len(column))
    for row in np.flatnonzero(~missing(column)).tolist():
        try:
            numbers[row] = days(column[row], written) if date else number(column[row], written)
        except (ValueError, OverflowError):
            raise DataError(f"{where(row)}: the value in column {name!r} {_wrong(written, date)}") from None
        if not np.isfinite(numbers[row]):
            raise DataError(f"{where(row)}: the value in column {name!r} is not finite; correct it or leave it empty")
    return numbers


def _wrong(written: Format, date: bool) -> str:
    if date:
        form = "YYYY-MM-DD" if written.date_format is None else written.date_format
        return f"is no date of the form {form}; correct it or set options.date_format"
    comma = ', or set options.decimal = "," where numbers have a comma' if written.decimal == "." else ""
    return f"is no number; correct it, leave it empty or declare the column's categories{comma}"


def scaled(column: str, bounds: object, written: Format) -> Scaled:
    """From `options.ranges`: two numbers, or two dates."""
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        raise ConfigError(f"options.ranges: {column} = {bounds!r} is no range; write {column} = [low, high]")
    date = not all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds)
    try:
        low, high = (days(str(b), Format()) if date else float(b) for b in bounds)
    except ValueError:
        raise ConfigError(
            f"options.ranges: {column} = {[str(b) for b in bounds]} is no range; give two numbers, or two dates as "
            '"YYYY-MM-DD"'
        ) from None
    if not 0 < high - low < np.inf:
        raise ConfigError(
            f"options.ranges: {column} = {[str(b) if date else b for b in bounds]} is no range; give finite "
            "[low, high] with low < high"
        )
    return Scaled(column=column, low=low, high=high, date=date)


def fitted(column: str, values: Column, train: Bools, where: Where, written: Format) -> Feature:
    """For a column that is not declared: numbers and dates are standardized by the training records, of texts the
    categories that occur are taken."""
    present = [value for value in values if value not in MISSING]
    if not present:
        raise DataError(f"column {column!r} is empty in every record; put it into options.ignore")
    for date in (False, True):
        if all(reads(value, written, date=date) for value in present):
            seen = _measured(column, values, where, written, date=date)[train & ~missing(values)]
            mean, deviation = (float(seen.mean()), float(seen.std())) if len(seen) else (0.0, 1.0)
            return Standardized(column=column, mean=mean, deviation=deviation or 1.0, date=date)
    known = sorted(set(present))
    if len(known) > MOST_CATEGORIES:
        raise DataError(
            f"column {column!r} has more than {MOST_CATEGORIES} different texts; put it into options.ignore, or "
            "declare its options.categories"
        )
    return OneHot(column=column, values=tuple(known))


def reads(text: str, written: Format, *, date: bool) -> bool:
    try:
        _ = days(text, written) if date else number(text, written)
    except (ValueError, OverflowError):
        return False
    return True
