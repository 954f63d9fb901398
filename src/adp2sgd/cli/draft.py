"""A first configuration as commented TOML, with an empty list wherever only the user knows the answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

OPEN = "FILL IN"
COMMENTS_AT = 36  # the column of comments


@dataclass(kw_only=True)
class Draft:
    """What a first configuration says. An empty range, list of categories or of classes is still open."""

    command: str
    task: str
    sites: Mapping[str, int]  # site → records
    records: int
    options: dict[str, object] = field(default_factory=dict)
    ranges: dict[str, Sequence[object]] = field(default_factory=dict)
    categories: dict[str, Sequence[object]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    epsilon: float = 3.0
    train_fraction: float = 0.75

    @property
    def open(self) -> list[str]:
        """The fields that only the user can fill in."""
        tables = (("ranges", self.ranges), ("categories", self.categories))
        found = [f"options.{table}.{name}" for table, values in tables for name, value in values.items() if not value]
        return [*(["options.classes"] if self.options.get("classes") == [] else []), *found]

    @property
    def learners(self) -> int:
        return max(1, len(self.sites))

    @property
    def batch_size(self) -> int:
        """About an eighth of the smallest site's training records, as a power of two from 4 to 256."""
        smallest = min(self.sites.values(), default=self.records) * self.train_fraction
        return int(min(256, max(4, 2 ** round(math.log2(max(1.0, smallest / 8))))))

    @property
    def delta(self) -> float:
        """A power of ten, a tenth of 1/records or less."""
        largest = max(self.sites.values(), default=self.records) * self.train_fraction
        return float(f"1e-{math.ceil(math.log10(max(10.0, largest))) + 1}")

    def text(self, name: str) -> str:
        """The TOML of the file `name`."""
        return "".join(f"{line}\n" for line in self._lines(name))

    def _lines(self, name: str) -> Iterator[str]:
        yield f"# Written by `{self.command}`."
        if self.open:
            yield f"# {OPEN} what is marked so: what is possible, from the meaning of a column, never from the file."
        yield f"#   adp2sgd check {name}       says what a run would do"
        yield f"#   adp2sgd train {name}       trains; simulate does so in virtual time"
        yield _line("task", self.task, "or table/mlp" if self.task.startswith("table") else "any of: adp2sgd models")
        yield _line("learners", self.learners, "one per site" if self.sites else "the data have no sites")
        yield _line("epochs", 30, "passes over all records")
        yield _line("batch_size", self.batch_size, "expected records per step of a learner")
        yield from self._options()
        if self.sites:
            yield from ("", "[data]", _line("partition", "site", "each learner trains on its own site's records"))
        graph = "complete" if self.learners <= 8 else "ring"
        yield from ("", "[topology]", _line("graph", graph, "who may exchange models with whom"))
        yield from ("", "[optimizer]", _line("lr", 0.5, ""))
        yield from ("", "[privacy]", _line("mode", "private", "without privacy: --set privacy.mode=none"))
        yield _line("epsilon", self.epsilon, "the budget that each site spends; smaller is more private")
        yield _line("delta", self.delta, "well below 1 / records of the largest site")
        yield _line("clip_norm", 1.0, "bound on the gradient of a single record")

    def _options(self) -> Iterator[str]:
        yield from ("", "[options]")
        for key, value in self.options.items():
            hint = 'every class, for example ["no", "yes"]' if key == "classes" else ""
            yield _line(key, value, f"{OPEN}: {hint}" if value == [] and key == "classes" else HINTS.get(key, ""))
        if self.ranges:
            yield from ("", "[options.ranges]" + " " * 8 + "# [smallest, largest] possible value")
        for name, bounds in self.ranges.items():
            date = self.kinds.get(name) == "date"
            example = '["2015-01-01", "2030-01-01"]' if date else "[0, 100]"
            yield _line(name, list(bounds), f"{OPEN}, for example {example}" if not bounds else "")
        if self.categories:
            yield from ("", "[options.categories]" + " " * 4 + "# every possible value")
        for name, values in self.categories.items():
            yield _line(name, list(values), f'{OPEN}, for example ["a", "b"]' if not values else "")


HINTS = {
    "label": "what the model learns to predict",
    "target": "a measurement, scaled by its range",
    "site": "the column that names a record's owner",
    "ignore": "columns that the model does not read",
    "encoding": "of the file's text",
    "decimal": "numbers are written 1.234,5",
    "date_format": "of all date columns",
    "classes": "from the folders' names",
    "sites": "a folder per site, above the classes",
    "size": "height and width that all images are scaled to",
    "channels": "3: colour, 1: grey",
}


def _line(key: str, value: object, comment: str) -> str:
    import tomli_w

    lists = isinstance(value, list)
    text = tomli_w.dumps({key: value}).strip() if not lists else f"{_key(key)} = {_list(value)}"
    return f"{text:<{COMMENTS_AT}} # {comment}".rstrip() if comment else text


def _key(key: str) -> str:
    import tomli_w

    return tomli_w.dumps({key: 0}).strip().removesuffix(" = 0")


def _list(values: object) -> str:
    import tomli_w

    assert isinstance(values, list)
    items = [tomli_w.dumps({"x": value}).strip().removeprefix("x = ") for value in values]
    return f"[{', '.join(items)}]"
