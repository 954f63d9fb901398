"""What one site knows and nobody else does: its records, its budget, its learner. It is made where the data lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adp2sgd.data.batches import Batches, PoissonBatches, ReshuffledBatches
from adp2sgd.data.records import RecordSet
from adp2sgd.data.units import Population, UnitBatches, population
from adp2sgd.engine.budgets import open_budget
from adp2sgd.engine.compute import Compute
from adp2sgd.engine.plan import Plan
from adp2sgd.learner import Learner
from adp2sgd.optimizer import Optimizer
from adp2sgd.privacy.budget import Budget
from adp2sgd.privacy.fixed_work import rows_for
from adp2sgd.progress import Progress
from adp2sgd.randomness.streams import Streams
from adp2sgd.sampler import Sampler
from adp2sgd.task import Task


@dataclass(frozen=True, eq=False, repr=False)
class Site:
    """Learner `number` of the plan. The training records of `task` are the site's own, and no other's."""

    plan: Plan
    number: int
    name: str | None
    task: Task
    declared: int | None = None  # records or units, rounded: the sample rate follows from it; unset: the true number


def make_learner(site: Site, compute: Compute, folder: Path, *, start: int = 0) -> Learner:
    """The site's learner, at the initial weights. Its ledger lies in `folder`, or where `privacy.ledger` says."""
    plan, config = site.plan, site.plan.config
    streams = Streams(config.seed, site.number + (start << 32))  # a restart repeats neither batches nor noise
    task, model = site.task, compute.model
    own = population(task.train, private=plan.private)
    declared = Population(site.declared or own.count, own.unit)
    budget = open_budget(plan, site.number, site.name, declared, folder) if plan.private else None
    records = task.train.with_blank() if config.privacy.fixed_work else task.train
    batches = _batches(plan, task.train, declared.count, streams, budget)
    learner = Learner(
        number=site.number,
        model=model,
        sampler=Sampler(task, records, batches, streams, model.device, copies=config.privacy.copies),
        gradient_step=compute.gradient_step(budget),
        optimizer=Optimizer(config.optimizer, model.weights, config.epochs),
        progress=Progress(site.number, start, limit=plan.target_steps, steps_per_epoch=plan.steps_per_epoch),
        streams=streams,
        budget=budget,
    )
    learner.name = site.name or learner.name
    return learner


def _batches(plan: Plan, records: RecordSet, declared: int, streams: Streams, budget: Budget | None) -> Batches:
    config = plan.config
    if config.privacy.mode == "paper":
        return ReshuffledBatches(len(records), config.batch_size, streams)
    count, rows = population(records, private=plan.private).count, None
    if config.privacy.fixed_work and budget is not None:
        mechanism = budget.plan.mechanism
        rows = rows_for(count, mechanism.sample_rate, mechanism.overflow)
    drawn = PoissonBatches(count, config.batch_size, streams, rows, declared=declared)
    if records.units is None or not plan.private:
        return drawn
    return UnitBatches(records.units, config.privacy.records_per_unit, drawn, streams)
