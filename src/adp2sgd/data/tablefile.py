"""The files of a table: CSV or Parquet → columns of text, and the place of each row for messages.

Messages name the file, the record's number and the column. They hold no cell, and no name from the first line: in a
file without a header that line is a record.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adp2sgd.data.folder import read_bytes
from adp2sgd.errors import ConfigError, DataError

DELIMITERS = (",", ";", "\t", "|")
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}

Column = list[str]
Where = Callable[[int], str]
"""A row's file, and its number there."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How values are written. `delimiter` and `encoding` are found where they are None."""

    delimiter: str | None = None  # found in the first line
    encoding: str | None = None  # UTF-8, or what a byte order mark says
    decimal: str = "."
    date_format: str | None = None  # as strptime reads it; None: ISO 8601

    def __post_init__(self) -> None:
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise ConfigError(
                f"options.delimiter = {self.delimiter!r} is not one character; use {DELIMITERS[1]!r}, say"
            )
        if self.decimal not in (".", ","):
            raise ConfigError(f'options.decimal = {self.decimal!r} is unknown; use "." or ","')
        if self.decimal == self.delimiter:
            raise ConfigError(f"options.decimal = {self.decimal!r} is the delimiter as well; change one of them")
        try:
            "".encode(self.encoding or "utf-8")
        except LookupError:
            raise ConfigError(
                f'options.encoding = "{self.encoding}" is unknown; use a name that Python knows, such as "cp1252"'
            ) from None


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """Columns of text by name, all of one length; `where` says where a row stands."""

    columns: dict[str, Column]
    where: Where

    def __len__(self) -> int:
        return _rows(self.columns)


UNNAMED = Format()


def read(path: Path, written: Format = UNNAMED, *, site: str | None = None, ignore: Sequence[str] = ()) -> Table:
    """A file, or a folder with one file per site. A folder's files are stacked; unless the column `site` tells the
    owner of a record, the file's name does, in a column `site`."""
    if not path.is_dir():
        return Table(read_file(path, written), lambda row: f"{path}, record {row + 1}")
    files = table_files(path)
    tables = {file.stem: read_file(file, written) for file in files}
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
    return Table(joined, lambda row: f"{places[row][0]}, record {places[row][1] + 1}")


def table_files(folder: Path) -> list[Path]:
    """The tables in a folder, one per site."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in READERS)
    if not files:
        raise DataError(f"{folder} holds no {' or '.join(READERS)} file; put one per site there")
    if len({file.stem for file in files}) < len(files):
        raise DataError(f"{folder} holds two files of one name in {[file.name for file in files]}; each file is a site")
    return files


def _rows(table: dict[str, Column]) -> int:
    return len(next(iter(table.values()), ()))


def read_file(path: Path, written: Format = UNNAMED) -> dict[str, Column]:
    """The columns of one file; at least one record."""
    if not path.suffix and not path.exists():
        raise DataError(f"{path} does not exist; give a file or folder that does, from {Path.cwd()}")
    if path.suffix.lower() not in READERS:
        raise DataError(f"{path} is neither {' nor '.join(READERS)}; convert it to one of them")
    table = READERS[path.suffix.lower()](path, written)
    if not _rows(table):
        raise DataError(f"{path} holds no record; the first line names the columns, each further line is a record")
    return table


def decoded(content: bytes, path: Path, encoding: str | None) -> str:
    """The text of a file. An encoding is never guessed from the records: one record more could change all others."""
    found = next((name for mark, name in BYTE_ORDER_MARKS.items() if content.startswith(mark)), None)
    chosen = encoding or found or "utf-8"
    try:
        return content.decode("utf-8-sig" if chosen.lower() in ("utf-8", "utf8") else chosen)
    except UnicodeDecodeError as error:
        named = "UTF-8" if chosen == "utf-8" else f'"{chosen}"'
        fix = 'set options.encoding (for a file from Excel often "cp1252"), or save it as UTF-8'
        raise DataError(f"{path} is not in {named} (from byte {error.start} on); {fix}") from None


def delimiter_of(first_line: str) -> str:
    """The most frequent delimiter outside quotes; a comma where there is none."""
    bare = "".join(first_line.split('"')[::2])
    return max(DELIMITERS, key=bare.count)


def _read_csv(path: Path, written: Format) -> dict[str, Column]:
    text = decoded(read_bytes(path), path, written.encoding)
    delimiter = written.delimiter or delimiter_of(text.partition("\n")[0])
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row]
    except csv.Error:
        raise DataError(f"{path} is no CSV file; save it as such") from None
    header = [name.strip() for name in rows[0]] if rows else []
    if len(set(header)) < len(header):
        twice = next(place for place, name in enumerate(header) if name in header[:place])
        raise DataError(
            f"{path}: the first line names columns {header.index(header[twice]) + 1} and {twice + 1} alike; rename one"
        )
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(header):
            fix = f"complete it, or set options.delimiter if it is not {delimiter!r}"
            raise DataError(f"{path}, record {number} has {len(row)} fields instead of {len(header)}; {fix}")
    columns = zip(*rows[1:], strict=True) if len(rows) > 1 else ([] for _ in header)
    return {name: [value.strip() for value in column] for name, column in zip(header, columns, strict=True)}


def _read_parquet(path: Path, written: Format) -> dict[str, Column]:
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
    return {name: [as_text(value) for value in table[name].to_pylist()] for name in table.column_names}


def as_text(value: object) -> str:
    """A value as a CSV file would hold it."""
    return "" if value is None else str(value).strip()


READERS = {".csv": _read_csv, ".parquet": _read_parquet}
