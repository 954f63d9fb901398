"""What a run leaves at one site: its model, its own guarantee, and who took part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from adp2sgd.engine.budgets import read_budget
from adp2sgd.engine.compute import Compute
from adp2sgd.engine.evaluate import HeldOut
from adp2sgd.engine.peers.attendance import NEVER
from adp2sgd.engine.peers.worker import SiteWorker
from adp2sgd.engine.plan import Plan
from adp2sgd.engine.result import finish, save_model
from adp2sgd.engine.status import LearnerStatus
from adp2sgd.errors import LedgerError, RunError
from adp2sgd.metrics import Figures
from adp2sgd.privacy.budget import Budget
from adp2sgd.run_folder import Folder, LearnerResult, Point, Run
from adp2sgd.task import Task


@dataclass(frozen=True, eq=False, repr=False)
class Stage:
    """A run as this site has it. `site_names`: of all sites of the roster."""

    plan: Plan
    task: Task
    compute: Compute
    site_names: tuple[str | None, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def held_out(self) -> HeldOut:
        return HeldOut(self.compute.model, self.task, private=self.plan.private)


@dataclass(frozen=True, eq=False)
class Account:
    """This site after its end: its ledger has the last word on what was spent."""

    number: int
    budget: Budget | None
    noise_source: str


def leave_result(stage: Stage, worker: SiteWorker, folder: Folder) -> Run:
    """Save the model, which is paid for; then evaluate it, ask the ledger, write the result."""
    try:
        save_model(stage, worker.evaluated(), folder)
        run = _result(stage, worker, folder)
        folder.append_point(run.curve[-1])
        folder.write_result(run)
    except OSError as error:
        raise RunError(
            f"the run is complete but its result cannot be written to {folder.path} ({error.strerror}); mend that, "
            "then the same command writes it"
        ) from None
    return run


def _result(stage: Stage, worker: SiteWorker, folder: Folder) -> Run:
    status = worker.attendance.status()
    figures = stage.held_out.figures(worker.evaluated())
    steps = status.global_steps
    account = Account(worker.place.learner, _budget(stage, worker, folder), worker.learner.noise_source)
    results = tuple(_learner(each, steps, figures, account) for each in status.learners)
    point = Point(
        global_steps=steps,
        epoch=stage.plan.epoch(steps),
        seconds=status.seconds,
        metrics=figures,
        consensus=worker.settling.consensus,
        learners=1,
    )
    curve = (*(each for each in folder.points() if each.global_steps < steps), point)
    run = finish(
        stage, [account], results, curve,
        theta=worker.evaluated(), clock="real", folder=str(folder.path), stopped=worker.control.stopped,
    )  # fmt: skip
    return replace(run, notes=(*run.notes, *_told(worker)))


def _budget(stage: Stage, worker: SiteWorker, folder: Folder) -> Budget | None:
    if not stage.plan.private:
        return None
    number = worker.place.learner
    try:
        return read_budget(stage.plan, number, worker.site.name, folder.learner(number))
    except LedgerError as error:
        worker.notes.append(str(error))
        return None


def _learner(status: LearnerStatus, steps: int, figures: Figures, account: Account) -> LearnerResult:
    """The own figures in full; of another site what it has told."""
    own, counters = status.learner == account.number, status.counters
    spent = account.budget.figures() if own and account.budget is not None else {"epsilon": status.epsilon}
    return LearnerResult(
        learner=status.learner,
        site=status.site,
        steps=counters.steps,
        share=counters.steps / max(1, steps),
        staleness_mean=counters.staleness_mean,
        staleness_max=counters.staleness_max,
        exchanges=counters.exchanges,
        initiated=counters.initiated,
        mixed_before=counters.mixed_before,
        busy=counters.busy,
        unconfirmed=counters.unconfirmed,
        expired=counters.expired,
        halves=counters.halves,
        bytes_sent=counters.bytes_sent,
        partners=counters.partners,
        metrics=figures if own else {},
        restarts=status.restarts,
        state=status.state,
        clip_norm=status.clip_norm,
        **spent,
    )


def _told(worker: SiteWorker) -> list[str]:
    settling, attendance = worker.settling, worker.attendance
    if settling.distance is None:
        apart = "no neighbour was met after the end of training, so the distance to the others' models is unknown"
    else:
        apart = f"at the end neighbours' models differed by {settling.distance:.2g} of the model's norm"
        apart += f" (tolerance {settling.tolerance:g})"
    missing = [f"site {name} {NEVER}" for name in attendance.missing]
    return [apart, *missing, *dict.fromkeys(worker.notes), *attendance.troubles]
