"""What a table or an image folder looks like from outside, for a first configuration: `adp2sgd init`.

A survey knows columns and their kinds, sites and numbers of records. It holds no value of a record and no statistic
of one: ranges and categories are for the user to say.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from adp2sgd.data import features
from adp2sgd.data.features import MISSING
from adp2sgd.data.image_encoder import SUFFIXES
from adp2sgd.data.tablefile import READERS, Column, Format, Table, read
from adp2sgd.data.target import measured
from adp2sgd.errors import ConfigError, DataError, did_you_mean

ENCODINGS = ("utf-8", "cp1252")
DATE_FORMATS = (None, "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
IDENTIFIER = re.compile(r"(^|[_\W])(id|no|nr|mrn|ssn|name|surname|patient|subject|email|phone|address)$", re.IGNORECASE)


@dataclass(frozen=True)
class Columns:
    """`kinds`: column → number, measurement, date, text or identifier; `sites`: site → records, where known."""

    kinds: dict[str, str]
    written: Format
    sites: dict[str, int]
    records: int


@dataclass(frozen=True)
class Tree:
    """An image folder: its classes, and its sites where there is a level of them."""

    classes: tuple[str, ...]
    sites: dict[str, int]
    images: int


def is_table(path: Path) -> bool:
    """Whether `path` is a table or a folder of tables, and not a folder of images."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give a table (.csv, .parquet), a folder of them or of images")
    return path.is_file() or any(file.suffix.lower() in READERS for file in path.iterdir())


def survey_table(path: Path, site: str | None = None) -> Columns:
    """The columns of a table, in the file's order."""
    written = _format(path)
    table = read(path, written, site=site)
    own = {"site"} if path.is_dir() and site is None else set()  # which the files' names gave
    _refuse_headless(path, table, own)
    written = replace(written, decimal=_decimal(table, written))
    written = replace(written, date_format=_date_format(table, written))
    kinds = {name: kind_of(name, column, written) for name, column in table.columns.items() if name not in own}
    owner = "site" if own else site
    if owner is not None and owner not in table.columns:
        meant = did_you_mean(owner, table.columns)
        raise ConfigError(f"--site {owner} is none of the table's columns{meant}; correct it")
    sites = dict(sorted(Counter(table.columns[owner]).items())) if owner else {}
    return Columns(kinds, written, sites, len(table))


def _format(path: Path) -> Format:
    """Delimiter and encoding of a CSV file, where they must be named in the configuration."""
    file = path if path.is_file() else min(each for each in path.iterdir() if each.suffix.lower() in READERS)
    for encoding in ENCODINGS if file.suffix.lower() == ".csv" else ():
        try:
            file.read_text(encoding=encoding)
        except UnicodeError:
            continue
        except OSError as error:
            raise DataError(f"cannot read {file} ({error.strerror}); correct the path or its permissions") from None
        return Format(encoding=None if encoding == "utf-8" else encoding)
    return Format()


def _refuse_headless(path: Path, table: Table, own: set[str]) -> None:
    """A first line that holds a number, nothing, or what its own column holds again is a record."""
    for place, (name, column) in enumerate(table.columns.items(), 1):
        if name not in own and (name in MISSING or features.reads(name, Format(), date=False) or name in column):
            raise DataError(
                f"{path}: field {place} of the first line looks like a record's, not like the name of a column; put a "
                "line with the names first"
            )


def _decimal(table: Table, written: Format) -> str:
    comma = Format(decimal=",")
    for column in table.columns.values():
        present = [value for value in column if value not in MISSING]
        if any("," in value for value in present) and all(features.reads(v, comma, date=False) for v in present):
            return ","
    return written.decimal


def _date_format(table: Table, written: Format) -> str | None:
    """The first format in which some column's values are all dates; ISO where none has such values."""
    for form in DATE_FORMATS:
        trial = replace(written, date_format=form)
        for column in table.columns.values():
            present = [value for value in column if value not in MISSING]
            if present and _all_dates(present, trial):
                return form
    return None


def _all_dates(values: list[str], written: Format) -> bool:
    plain = any(features.reads(value, written, date=False) for value in values[:1])  # 20240101 is a number
    return not plain and all(features.reads(value, written, date=True) for value in values)


def kind_of(name: str, column: Column, written: Format) -> str:
    """What a column holds, in a word."""
    present = [value for value in column if value not in MISSING]
    varied = len(set(present)) > 0.9 * len(present) and len(present) > features.MOST_CATEGORIES / 2
    if IDENTIFIER.search(name):
        return "identifier"
    if present and all(features.reads(value, written, date=False) for value in present):
        return "measurement" if measured(present, written) else "number"
    if present and _all_dates(present, written):
        return "date"
    return "identifier" if varied else "text"


def possible(kind: str, low: str, high: str) -> list[object]:
    """A range from two words that a person typed; ConfigError where they are none."""
    if kind == "date":
        try:
            dates = [datetime.fromisoformat(word).date().isoformat() for word in (low, high)]
        except ValueError:
            raise ConfigError(f"{low} {high} are no two dates; write them as YYYY-MM-DD") from None
        features.scaled("it", dates, Format())
        return [*dates]
    try:
        numbers = [float(word) if "." in word or "e" in word.lower() else int(word) for word in (low, high)]
    except ValueError:
        raise ConfigError(f"{low} {high} are no two numbers; write for example: 0 100") from None
    features.scaled("it", numbers, Format())
    return [*numbers]


def survey_images(folder: Path) -> Tree:
    """Classes and sites of FOLDER/[train|test/][site/]class/*.png, from the depth of its images."""
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not images:
        raise DataError(f"{folder} holds neither tables nor images; give a folder with .csv, .parquet, .png or .jpg")
    split = (folder / "train").is_dir() and (folder / "test").is_dir()
    parts = [path.relative_to(folder).parts[split:] for path in images]
    depths = {len(each) for each in parts}
    if depths not in ({2}, {3}):
        layout = "train/" * split + "[site/]class/image.png"
        raise DataError(f"{folder}: its images do not all lie as {layout}; move them so that all lie equally deep")
    sites = Counter(each[0] for each in parts) if depths == {3} else Counter[str]()
    return Tree(tuple(sorted({each[-2] for each in parts})), dict(sorted(sites.items())), len(images))
