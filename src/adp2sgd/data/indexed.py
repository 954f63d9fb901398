"""Records that are read by index from a map-style dataset, which may be larger than memory.

An item is `(inputs, target)`, or a dictionary in which one entry is the target. Worker processes read batches ahead:
they are forked, so they need no importable main module, and they end when the process that forked them ends.

Under privacy a batch must not couple its records. So the dataset is asked for one item at a time (never through
`__getitems__`), every item gets the structure and the types of the dataset's first record, and every item has random
numbers of its own.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from adp2sgd import tree
from adp2sgd.data.records import Records, RecordSet, Units
from adp2sgd.errors import ConfigError, DataError, OtherProcessError, kind
from adp2sgd.tree import Inputs

TARGETS = ("target", "label", "labels")  # keys that are a target where none is named
Batch = tuple[Inputs, Tensor]


class Reader:
    """Turns indices into batches: in the calling thread, in a thread of its own, or in `workers` processes.

    `like` is a batch whose structure and types every item gets. A `private` reader keeps the items of a batch apart.
    """

    def __init__(
        self,
        dataset: Any,
        target: str | None = None,
        workers: int = 0,
        *,
        like: Batch | None = None,
        private: bool = False,
    ) -> None:
        self.dataset, self.target, self.workers = dataset, target, workers
        self.like, self.private = like, private
        self._executor: Executor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_executor": None}

    def with_workers(self, workers: int, *, private: bool | None = None) -> Reader:
        private = self.private if private is None else private
        return Reader(self.dataset, self.target, workers, like=self.like, private=private)

    def read(self, indices: Sequence[int]) -> Batch:
        """The items as one batch, in this thread."""
        with _own_randomness() if self.private else nullcontext():
            found = [self._item(index) for index in indices]
        try:
            like = self.like or found[0]
            alike = [tuple(map(self._alike, parts, like)) for parts in found]
            inputs = tree.joined([inputs for inputs, _ in alike], torch.stack)
            return inputs, torch.stack([target for _, target in alike])
        except (RuntimeError, TypeError, KeyError, ValueError):
            raise DataError(
                f"the records {_few(indices)} of the dataset differ in shape, type or structure; make them alike in "
                "its __getitem__ (pad or crop)"
            ) from None

    def _item(self, index: int) -> tuple[Inputs, Tensor]:
        if self.private:
            _reseed()
        return self._parts(self.dataset[index], index)

    def _alike(self, parts: Inputs, like: Inputs) -> Inputs:
        """The parts with the structure and the types of `like`. `torch.stack` alone would convert a whole batch to the
        widest type in it, so one record would change the others."""
        if isinstance(like, dict):
            return {name: self._typed(parts[name], like[name].dtype) for name in like}
        if isinstance(like, tuple):
            return tuple(self._typed(part, other.dtype) for part, other in zip(parts, like, strict=True))
        return self._typed(parts, like.dtype)

    def _typed(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Private mode converts everything: whether a run ends must not depend on a record's type."""
        if not isinstance(part, Tensor) or not (self.private or torch.can_cast(part.dtype, dtype)):
            raise TypeError
        return part.to(dtype)

    def start(self) -> None:
        """Start the worker processes. Call it before the process has threads that hold locks."""
        self.submit([]).result()

    def close(self) -> None:
        """End the workers; they start again when something is to be read."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def submit(self, indices: Sequence[int]) -> Future[Batch | None]:
        """The batch, read in the background; under privacy without workers, before this returns."""
        if self.private and not _forks(self.workers):  # a thread would disturb the caller's random numbers
            return _done(lambda: self.read(indices) if len(indices) else None)
        if self._executor is None:
            self._executor = _executor(self)
            weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)
        if isinstance(self._executor, ThreadPoolExecutor):
            return self._executor.submit(lambda: self.read(indices) if len(indices) else None)
        return _Unpacked(self._executor.submit(_read, list(indices)))

    def _parts(self, item: Any, index: int) -> tuple[Inputs, Tensor]:
        where = f"record {index} of the dataset"
        if isinstance(item, Mapping):
            key = self.target or next((name for name in TARGETS if name in item), None)
            if key is None or key not in item:
                raise DataError(
                    f"{where} is a dictionary without {key or ' or '.join(TARGETS)}; name its target: "
                    "as_records(dataset, target=…)"
                )
            rest = {name: value for name, value in item.items() if name != key}
            inputs = next(iter(rest.values())) if len(rest) == 1 else rest
            return _inputs(inputs, where), _tensor(item[key], f"the target of {where}")
        if isinstance(item, tuple | list) and len(item) >= 2:
            inputs = item[0] if len(item) == 2 else tuple(item[:-1])
            return _inputs(inputs, where), _tensor(item[-1], f"the target of {where}")
        raise DataError(f"{where} is a {type(item).__name__}; give (inputs, target), or a dictionary")


def _inputs(value: Any, where: str) -> Inputs:
    if isinstance(value, Mapping):
        return {str(name): _tensor(part, f'"{name}" of {where}') for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_tensor(part, f"an input of {where}") for part in value)
    return _tensor(value, f"the input of {where}")


def _tensor(value: Any, what: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{what} is a {type(value).__name__} that is no tensor of numbers; convert it in the dataset's __getitem__ "
            "(or set_transform)"
        ) from None


def _done(read: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    try:
        done.set_result(read())
    except Exception as error:
        done.set_exception(error)
    return done


def _reseed() -> None:
    """New random numbers for one item, from the operating system also where the run has a seed: the same record is read
    in many steps, and a reader does not know the step."""
    torch.default_generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
    np.random.seed(np.frombuffer(os.urandom(32), np.uint32))
    random.seed(os.urandom(32))


@contextmanager
def _own_randomness() -> Iterator[None]:
    """What is drawn or seeded inside leaves the global generators as they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _few(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:3])) + (", …" if len(indices) > 3 else "")


@dataclass(frozen=True, eq=False, repr=False)
class DatasetRecords:
    """The items `rows` of the reader's dataset. Make them with `as_records`."""

    reader: Reader
    rows: Tensor
    like: Batch  # no record: the structure, the types and the shapes
    sites: Tensor | None = None
    site_names: tuple[str, ...] = field(default=())
    units: Units | None = None

    def __repr__(self) -> str:
        """Sizes and types, never a value."""
        kind, inputs = type(self.reader.dataset).__name__, tree.described(self.like[0])
        return f"DatasetRecords({len(self)} of {kind}, inputs={inputs}, targets={tree.described(self.like[1])})"

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Tensor) -> DatasetRecords:
        sites = None if self.sites is None else self.sites[rows]
        return replace(
            self, rows=self.rows[rows], sites=sites, units=None if self.units is None else self.units.take(rows)
        )

    def read(self, rows: Tensor) -> Batch:
        return self.reader.read(self.rows[rows].tolist()) if len(rows) else self.like

    def fetch(self, rows: Tensor) -> Future[Batch]:
        """As `read`, in the background."""
        if not len(rows):
            return _done(self.blank)
        return self.reader.submit(self.rows[rows].tolist())  # type: ignore[return-value]

    def blank(self) -> Batch:
        return self.like

    def with_blank(self) -> DatasetRecords:
        raise ConfigError(
            "privacy.fixed_work needs records in memory, because the time of reading files depends on which are drawn; "
            "give the task tensors, or leave fixed_work out"
        )

    def labels(self) -> Tensor | None:
        """By the dataset's attribute `targets`, as torchvision's have, or the target's column of a table."""
        dataset = self.reader.dataset
        found = getattr(dataset, "targets", None)
        if found is None and _is_hugging_face(dataset):
            key = self.reader.target or next(name for name in TARGETS if name in dataset.column_names)
            found = dataset.with_format("numpy")[key][:]
        if found is None or len(found) != len(dataset):
            return None
        return _tensor(found, "the dataset's attribute targets")[self.rows]

    def with_workers(self, workers: int, *, private: bool | None = None) -> DatasetRecords:
        """The same records, read by so many processes; for a run in private mode or not, if that is said."""
        return replace(self, reader=self.reader.with_workers(workers, private=private))


def start_reading(records: RecordSet) -> None:
    """Start the records' worker processes, if they have any: early, so that they inherit no lock on a ledger."""
    if isinstance(records, DatasetRecords) and records.reader.workers:
        records.reader.start()


def in_thread(records: RecordSet) -> RecordSet:
    """The same records, read without worker processes."""
    return records.with_workers(0) if isinstance(records, DatasetRecords) else records


def detached(records: RecordSet) -> Any:
    """What to hand over to a process that has the dataset already: of records in memory, all."""
    return (records.rows, records.sites, records.units) if isinstance(records, DatasetRecords) else records


def attached(own: Any, dataset: RecordSet) -> RecordSet:
    """The records that `detached` stands for."""
    if not isinstance(dataset, DatasetRecords):
        return own  # type: ignore[no-any-return]
    return replace(dataset, rows=own[0], sites=own[1], units=own[2])


def as_records(
    data: Any, *, sites: Tensor | None = None, site_names: Sequence[str] = (), target: str | None = None
) -> RecordSet:
    """Records from tensors `(inputs, targets)`, a map-style Dataset, a Hugging Face Dataset, or Records themselves.

    `sites[i]` is the index in `site_names` of the owner of record i. `target` names the entry of a dictionary that is
    the target; without it, "target", "label" or "labels" is. A dataset is read by index, whenever a record is needed.
    """
    if isinstance(data, Records | DatasetRecords):
        return data if sites is None else replace(data, sites=sites, site_names=tuple(site_names))
    if isinstance(data, TensorDataset) and len(data.tensors) > 1:
        *inputs, targets = data.tensors
        return Records(inputs[0] if len(inputs) == 1 else tuple(inputs), targets, sites, tuple(site_names))
    if isinstance(data, tuple | list) and len(data) == 2 and not _is_item(data[0]):
        inputs, targets = (_inputs(part, "the data") for part in data)
        return Records(inputs, targets, sites, tuple(site_names))
    return _from_dataset(data, sites, tuple(site_names), target)


def _is_item(value: Any) -> bool:
    """Whether a list of two is a small dataset of two items, and no pair of inputs and targets."""
    return isinstance(value, tuple | list) and len(value) == 2 and not isinstance(value[0], Tensor)


def _from_dataset(dataset: Any, sites: Tensor | None, site_names: tuple[str, ...], target: str | None) -> RecordSet:
    name, fix = type(dataset).__name__, "give (inputs, targets), a map-style torch Dataset or adp2sgd.Records"
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, str | bytes | Mapping | Tensor):
        raise DataError(f"data of type {name} cannot be read by index; {fix}")
    try:
        count = len(dataset)
    except TypeError:
        raise DataError(f"the dataset {name} has no length, so no batch can be drawn from it; {fix}") from None
    if not count:
        raise DataError(f"the dataset {name} holds no record; {fix}")
    if sites is not None and len(sites) != count:
        raise DataError(f"{count} records but {len(sites)} site labels; every record needs one")
    if _is_hugging_face(dataset) and dataset.format["type"] is None:
        dataset = dataset.with_format("torch")
    inputs, targets = Reader(dataset, target).read([0])
    like = tree.each(lambda part: part[:0].clone(), inputs), targets[:0].clone()
    return DatasetRecords(Reader(dataset, target, like=like), torch.arange(count), like, sites, site_names)


def _is_hugging_face(dataset: Any) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "with_format")


# ------------------------------------------------------------ worker processes

_reader: Reader | None = None  # in a worker: what it reads with


def _forks(workers: int) -> bool:
    """Whether so many workers are processes; else they are threads."""
    import multiprocessing

    return workers > 0 and "fork" in multiprocessing.get_all_start_methods()


def _executor(reader: Reader) -> Executor:
    import multiprocessing

    if not _forks(reader.workers):
        return ThreadPoolExecutor(max(1, reader.workers), "records")
    context = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(reader.workers, context, _begin, (reader.with_workers(0), os.getpid()))


def _begin(reader: Reader, parent: int) -> None:
    """In a worker: keep the reader, compute in one thread, and end with the parent, however that ends."""
    global _reader  # noqa: PLW0603
    _reader = reader
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _read(indices: list[int]) -> Any:
    """In a worker: the batch as plain arrays; an error as its kind and text, because its traceback stays here."""
    assert _reader is not None
    if not indices:
        return None
    try:
        inputs, targets = _reader.read(indices)
    except DataError:
        raise
    except Exception as error:
        raise OtherProcessError(kind(error), str(error)) from None
    return _plain(inputs), _plain(targets)


def _plain(inputs: Inputs) -> Any:
    """Tensors as (bytes, type, shape), which cost one copy through a pipe."""

    def plain(part: Tensor) -> Any:
        return part.contiguous().reshape(-1).view(torch.uint8).numpy(), part.dtype, tuple(part.shape)

    return tree.each(plain, inputs)


def _tensors(plain: Any) -> Inputs:
    def tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(raw).view(dtype).view(shape)

    if isinstance(plain, dict):
        return {name: tensor(*part) for name, part in plain.items()}
    return tensor(*plain) if isinstance(plain[1], torch.dtype) else tuple(tensor(*part) for part in plain)


class _Unpacked(Future):  # type: ignore[type-arg]
    """What a worker sends, as tensors again."""

    def __init__(self, source: Future[Any]) -> None:
        super().__init__()
        source.add_done_callback(self._take)

    def _take(self, source: Future[Any]) -> None:
        if source.cancelled():
            self.cancel()
        elif (error := source.exception()) is not None:
            self.set_exception(error)
        else:
            found = source.result()
            self.set_result(None if found is None else (_tensors(found[0]), _tensors(found[1])))
