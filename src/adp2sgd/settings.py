"""The machinery of a configuration: sections whose fields are typed and checked, with messages in our own words."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from adp2sgd.errors import ConfigError, did_you_mean

SHORT_NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")  # .5 and 5., which TOML takes for no numbers
NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}


def require(holds: bool, key: str, value: object, fix: str) -> None:
    """Refuse a value that is not possible."""
    if not holds:
        raise ConfigError(f"{key} = {shown(value)} is not possible; {fix}")


def one_of(key: str, value: str, known: Iterable[str]) -> None:
    """Refuse a name that is not known."""
    if value not in known:
        known = list(known)
        raise ConfigError(
            f"{key} = {shown(value)} is unknown{did_you_mean(value, known)}; use one of: {', '.join(known)}"
        )


def shown(value: object) -> str:
    """A setting in a message; of an object that no TOML file could hold (it may contain records) only the type."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if _is_plain(value) else f"(a {type(value).__name__})"


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | numbers.Number | os.PathLike)


@dataclass(frozen=True, kw_only=True)
class Section:
    """What all parts of a configuration share: every field has its type, and is checked."""

    WHERE: ClassVar[str] = ""  # before a field's name in messages

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for each in dataclasses.fields(self):
            value = typed(hints[each.name], getattr(self, each.name), self.WHERE + each.name.rstrip("_"))
            object.__setattr__(self, each.name, value)
        self._check()

    def _check(self) -> None:
        """Refuse what is impossible."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)


SectionT = TypeVar("SectionT", bound=Section)


def section(kind: type[SectionT], raw: Mapping[str, Any]) -> SectionT:
    """A section from the table of a TOML file."""
    known = {f.name.rstrip("_"): f.name for f in dataclasses.fields(kind)}
    for key, value in raw.items():
        if key not in known:
            meant = did_you_mean(key, known)
            raise ConfigError(
                f"{kind.WHERE}{key} = {shown(value)} is an unknown key{meant}; known here: {', '.join(known)}"
            )
    return kind(**{known[key]: value for key, value in raw.items()})


def typed(hint: Any, value: Any, key: str) -> Any:
    """`value` as `hint`, or an error in our words. Only numbers are converted, where nothing of them is lost."""
    if isinstance(hint, type) and issubclass(hint, Section):
        if not isinstance(value, hint | Mapping):
            raise ConfigError(f"{key} = {shown(value)} must be a table; write [{key}]")
        return section(hint, value) if isinstance(value, Mapping) else value
    if hint is object:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return _one_of_several([each for each in arguments if each is not types.NoneType], value, key)
    if origin in (tuple, Sequence) and isinstance(value, list | tuple):
        if origin is Sequence or arguments[-1] is Ellipsis:
            return tuple(typed(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
        if len(value) != len(arguments):
            raise ConfigError(f"{key} = {list(value)} must hold {len(arguments)} values")
        return tuple(typed(a, item, f"{key}[{i}]") for i, (a, item) in enumerate(zip(arguments, value, strict=True)))
    if hint in NUMBERS and isinstance(value, NUMBERS[hint]) and not isinstance(value, bool):
        with suppress(OverflowError):
            value = hint(value)  # integers serve as floats, and numpy's numbers as Python's
    elif hint is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    kind = list if origin is tuple or (origin is Sequence and arguments[0] not in (str, object)) else origin or hint
    matches = isinstance(value, Mapping) if kind is Mapping or origin is Mapping else isinstance(value, kind)
    if (
        not matches
        or (isinstance(value, bool) and kind is not bool)
        or (isinstance(value, float) and math.isnan(value))
    ):
        raise ConfigError(f"{key} = {shown(value)} has the wrong type; it must be {in_words(hint)}")
    return dict(value) if isinstance(value, Mapping) else value


def _one_of_several(hints: Sequence[Any], value: Any, key: str) -> Any:
    """None stays None; else the first of the types that fits."""
    if value is None:
        return None
    for hint in hints[:-1]:
        with suppress(ConfigError):
            return typed(hint, value, key)
    return typed(hints[-1], value, key)


def in_words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: 'a string in "quotes"', bool: "true or false"}
    if typing.get_origin(hint) in (tuple, Sequence):
        return "a list"
    return names.get(hint, "a table")


def plain(value: Any) -> Any:
    """A section as nested tables without nulls, as TOML has none."""
    if isinstance(value, Section):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name.rstrip("_"): plain(item) for name, item in fields if item is not None}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def value_of(text: str) -> Any:
    """What stands behind `--set a.b=`: TOML, a bare word, or .5."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return float(text) if SHORT_NUMBER.fullmatch(text) else text


def put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set the entry `a.b` of nested tables."""
    *path, last = key.split(".")
    table: Any = raw
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {key}: {part} is not a table; a run's config.toml shows which there are")
    table[last] = value


def unset(raw: dict[str, Any], key: str) -> None:
    """Remove the entry `a.b` of nested tables, so that its default holds; nothing where there is none."""
    *path, last = key.split(".")
    table: Any = raw
    for part in path:
        table = table.get(part)
        if not isinstance(table, dict):
            return
    table.pop(last, None)
