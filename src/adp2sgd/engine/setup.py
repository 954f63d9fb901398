"""All sites of a run on one machine: one data set, dealt out to the learners. For simulations and for `train`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from adp2sgd import tree
from adp2sgd.config import Config
from adp2sgd.data import shards
from adp2sgd.data.indexed import DatasetRecords, start_reading
from adp2sgd.data.units import Population, population
from adp2sgd.device import AUTOCAST
from adp2sgd.engine.compute import Compute, build_model, pick_device, rows_together
from adp2sgd.engine.evaluate import HeldOut
from adp2sgd.engine.plan import Plan, make_plan
from adp2sgd.engine.site import Site, make_learner
from adp2sgd.engine.theta import Mean
from adp2sgd.engine.validate import validate
from adp2sgd.errors import LedgerError, PrivacyError, telling_no_values
from adp2sgd.gradient import choose
from adp2sgd.gradient.proof import synthetic
from adp2sgd.learner import Learner
from adp2sgd.metrics import Figures
from adp2sgd.privacy.ledger import read as read_ledger
from adp2sgd.run_folder import Folder, Point
from adp2sgd.task import Task
from adp2sgd.tasks import resolve


@dataclass(frozen=True, eq=False, repr=False)
class Setup:
    """A plan, all records, and who gets which of them. `compute` serves all learners of this process."""

    plan: Plan
    task: Task
    shards: tuple[Tensor, ...]
    populations: tuple[Population, ...]  # what each learner's batches are samples of
    compute: Compute
    notes: tuple[str, ...] = ()

    @cached_property
    def held_out(self) -> HeldOut:
        return HeldOut(self.compute.model, self.task, private=self.plan.private)

    @cached_property
    def site_names(self) -> tuple[str | None, ...]:
        """Whose records each learner has, where each has one site's."""
        train = self.task.train
        if self.plan.config.data.partition != "site" or train.sites is None:
            return (None,) * len(self.shards)
        numbers = [int(train.sites[rows[0]]) for rows in self.shards]
        return tuple(train.site_names[number] if train.site_names else str(number) for number in numbers)

    def refuse_divided_units(self) -> None:
        """Refuse, in private mode, a unit that lies at two learners: each would spend a budget of its own on it."""
        units = self.task.train.units if self.plan.private else None
        divided = None if units is None else units.divided(self.shards)
        if units is None or divided is None:
            return
        names = [self.site_names[number] or f"learner {number}" for number in divided]
        raise PrivacyError(
            f"a {units.name} has records at {names[0]} and at {names[1]}, where each would spend a budget of its own; "
            f"give each site {units.name} values of its own if they are different ones, else put all records at one"
        )

    def point(self, global_steps: int, seconds: float, figures: Figures, mean: Mean) -> Point:
        """One evaluation of θ, whose figures these are."""
        return Point(
            global_steps=global_steps,
            epoch=self.plan.epoch(global_steps),
            seconds=seconds,
            metrics=figures,
            consensus=mean.consensus,
        )

    def site(self, number: int) -> Site:
        """The site of learner `number`, with its own records alone."""
        own = replace(self.task, train=self.task.train.take(self.shards[number]))
        return Site(self.plan, number, self.site_names[number], own)

    def learner(self, number: int, folder: Path, *, start: int = 0) -> Learner:
        """Learner `number`, in this process. Its ledger lies in `folder`."""
        return make_learner(self.site(number), self.compute, folder, start=start)

    def close(self) -> None:
        """End the processes that read datasets."""
        for part in (self.task.train, self.task.test):
            if isinstance(part, DatasetRecords):
                part.reader.close()


def prepare(config: Config, task: Task | None = None, seed: int | None = None, *, resumed: bool = False) -> Setup:
    """Load the task (or take the given one), deal out its records and build the model, all from the public seed; refuse
    what does not fit."""
    device = pick_device(config.device)
    private = config.privacy.mode == "private"
    task = reading(task or resolve(config.task, config.options, private=private), config.data.workers, private=private)
    config = config.replace(data=config.data.replace(partition=shards.partition_of(task.train, config.data)))
    plan = make_plan(config, total_samples=population(task.train, private=private).count, seed=seed)
    rows = shards.split(task.train, config.data, config.learners, plan.seed)
    owned = tuple(population(task.train, private=private, rows=shard) for shard in rows)
    compute = Compute(plan, task, device, largest_shard=max(each.count for each in owned))
    made = Setup(plan, task, rows, owned, compute)
    made.refuse_divided_units()
    notes = validate(plan, task, compute.model, [each.count for each in owned], resumed=resumed)
    return replace(made, notes=(*_mixed_sites(config, task), *notes))


def _mixed_sites(config: Config, task: Task) -> list[str]:
    """A note where learners do not stand for the sites that the data have."""
    if task.train.sites is None or config.data.partition == "site":
        return []
    return [
        f'data.partition = "{config.data.partition}" deals the records of all sites out to the learners: no learner '
        "stands for a site"
    ]


def reading(task: Task, workers: int, *, private: bool) -> Task:
    """Datasets that are read by index get readers of their own, which end with the run."""
    parts = {"train": task.train, "test": task.test}
    read: dict[str, Any] = {
        name: part.with_workers(workers, private=private)
        for name, part in parts.items()
        if isinstance(part, DatasetRecords)
    }
    if not read:
        return task
    task = replace(task, **read)
    start_reading(task.test)
    return task


@contextmanager
def beginning(folder: Folder, *, fresh: bool) -> Iterator[None]:
    """Use while the learners of a run are made. If that fails, a `fresh` folder is emptied for another try."""
    try:
        yield
    except BaseException:
        if fresh:
            _discard(folder)
        raise


def _discard(folder: Folder) -> None:
    """Remove what the start of a run has written, and nothing else. A ledger with spent steps stays."""
    for own in folder.path.glob("learner-*"):
        ledger = own / "ledger.jsonl"
        with suppress(LedgerError, OSError):
            (own / "plan.json").unlink(missing_ok=True)
            if ledger.exists() and not read_ledger(ledger).spent().parts:
                ledger.unlink()
            own.rmdir()
    with suppress(OSError):
        (folder.path / "config.toml").unlink(missing_ok=True)
        folder.path.rmdir()


def explain_gradients(config: Config) -> list[choose.Row]:
    """How private mode would take the gradients of each layer of the configured model. Looks at no record's values."""
    with telling_no_values(private=True):
        task, device = resolve(config.task, config.options, private=True), pick_device(config.device)
        model = build_model(task, device, config.task, config.seed or 0, private=True)
        copies, rows = rows_together(config, task), min(len(task.train), config.batch_size)
        blank, labels = task.train.blank()
        stored = tree.each(lambda part: synthetic(part.to(device), rows * copies), blank)
        targets = synthetic(labels.to(device), rows * copies)
        inputs, autocast = task.prepare(stored), AUTOCAST[config.precision]
        return choose.explain(model, task.loss, inputs, targets, copies=copies, autocast=autocast)
