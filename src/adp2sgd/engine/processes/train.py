"""`adp2sgd train`: real learners on one machine, one process each, and what they report together."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adp2sgd.config import Config
from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine import extension
from adp2sgd.engine.budgets import open_budget, read_budget
from adp2sgd.engine.interrupt import telling_that_nothing_is_kept
from adp2sgd.engine.processes.forkserver import ForkServer
from adp2sgd.engine.processes.seat import Seat
from adp2sgd.engine.processes.supervisor import Patience, Supervisor
from adp2sgd.engine.result import finish, learner_result, save_model
from adp2sgd.engine.setup import Setup, beginning, prepare
from adp2sgd.engine.status import OnStatus, RunStatus, StatusFile
from adp2sgd.engine.theta import Mean, mean_of
from adp2sgd.errors import (
    ConfigError,
    InterruptedRunError,
    LedgerError,
    RunError,
    callback,
    showing_users_code,
    telling_no_values,
)
from adp2sgd.exchange.shared import require_linux
from adp2sgd.metrics import Figures
from adp2sgd.privacy.budget import Budget
from adp2sgd.privacy.plan import Plan
from adp2sgd.randomness.streams import Streams
from adp2sgd.run_folder import SCRATCH, SESSION, Folder, LearnerResult, Run
from adp2sgd.task import Task
from adp2sgd.tasks import named

MOST_LEARNERS = 250  # so many descriptors fit in one message to their processes


@dataclass(frozen=True, eq=False)
class Account:
    """What a result needs of a learner after its end. What was spent is read from its ledger."""

    number: int
    budget: Budget | None
    noise_source: str


@showing_users_code
def train(
    config: Config,
    folder: str | Path | None = None,
    *,
    task: Task | None = None,
    resume: bool = False,
    exchange: bool = True,
    on_status: OnStatus = None,
    patience: Patience | None = None,
) -> Run:
    """Run `config` in real time, one process per learner. `folder` keeps all files of the run; without it
    nothing is left behind.

    `task` is the task itself, instead of the one that `config.task` names.

    `resume` goes on from the learners' last checkpoints, with their own ledgers and fresh noise. Without `exchange`
    the learners never meet: what benchmarks compare with.
    """
    require_linux()
    if config.learners > MOST_LEARNERS:
        raise ConfigError(f"learners = {config.learners} is too many for train ({MOST_LEARNERS} at most); use simulate")
    if folder is None:
        with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch, telling_that_nothing_is_kept():
            given: dict[str, Any] = {"exchange": exchange, "on_status": on_status, "patience": patience}
            return replace(train(config, Path(scratch) / "run", task=task, **given), folder=None)
    with telling_no_values(config.privacy.mode == "private"):
        return _train(named(config, task), task, folder, resume, exchange, callback(on_status), patience)


def _train(
    config: Config,
    task: Task | None,
    folder: str | Path,
    resume: bool,
    exchange: bool,
    on_status: Callable[[RunStatus], None],
    patience: Patience | None,
) -> Run:
    kept = _read_session(Folder.open(folder), config) if resume else {}
    setup = prepare(
        config, task, kept.get("seed"), resumed=resume
    )  # before the folder: a wrong task leaves nothing behind
    home = Folder.reopen(folder, config) if resume else Folder.create(folder, config)
    with home.held(), closing(setup):
        if resume:
            _read_session(home, config)  # it may have ended since
        with closing(ForkServer()) as server:
            with beginning(home, fresh=not resume):
                plans = _plan(setup, home)
            supervisor = Supervisor(
                setup,
                home,
                server,
                mode="resume" if kept else "fresh",
                seats=[Seat.resumed(seat) for seat in kept.get("seats", ())],
                elapsed_s=kept.get("seconds", 0.0),
                exchange=exchange,
                plans=plans,
                patience=patience,
                on_status=StatusFile(home, on_status),
            )
            supervisor.notes += kept.get("notes", [])
            supervisor.run()
        if supervisor.interrupted and supervisor.global_steps < setup.plan.target_steps:
            raise InterruptedRunError(
                f"interrupted at epoch {setup.plan.epoch(supervisor.global_steps):.2f}; nothing is lost: "
                f"go on with adp2sgd train --resume {home.path}"
            )
        return _result(supervisor, home)


def _plan(setup: Setup, home: Folder) -> list[Plan]:
    """The learners' budgets, made before they start: alike learners share the work, and errors come early."""
    if setup.plan.config.privacy.mode != "private":
        return []
    plans = []
    for learner in range(setup.plan.config.learners):
        name, own = setup.site_names[learner], setup.populations[learner]
        with closing(open_budget(setup.plan, learner, name, own, home.learner(learner))) as budget:
            plans.append(budget.plan)
    return plans


def _read_session(home: Folder, config: Config) -> dict[str, Any]:
    """What an unfinished run has left, or a finished one that `config` extends; empty if no learner had started."""
    if (before := extension.earlier(home, config, SESSION)) is not None:
        return _session_after(before, home)
    if (home.path / "result.json").exists():
        raise RunError(f"{home.path} holds a finished run; its result is in result.json")
    if home.unstarted:
        return {}
    try:
        kept: dict[str, Any] = json.loads((home.path / SESSION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RunError(
            f"{home.path} holds no run of `train` to continue; if it is one of `simulate`, resume it with that, "
            "else start it with another --out"
        ) from None
    return kept


def _session_after(before: Run, home: Folder) -> dict[str, Any]:
    """The earlier run's end as a session."""
    seats = []
    for each in before.learners:
        saved = learner_checkpoint.load(home, each.learner)
        start = 0 if saved is None else saved.facts.get("start", 0)
        counters = asdict(extension.counters_of(each))
        seats.append(
            {"learner": each.learner, "start": start, "restarts": each.restarts, "died": 0, "counters": counters}
        )
    return {"seed": extension.seed_of(home), "seconds": before.seconds, "seats": seats}


def _result(supervisor: Supervisor, home: Folder) -> Run:
    """Save the average model; then evaluate it and the learners' models, ask the ledgers, write the result."""
    setup, states = supervisor.setup, supervisor.states
    if not states:
        raise RunError(f"no learner ended with a model; what happened: {'; '.join(supervisor.notes)}")
    mean = mean_of(state.to(setup.compute.device) for state in states.values())
    try:
        save_model(setup, mean.theta, home)  # it is paid for, whatever becomes of its evaluation
        run = _evaluated(supervisor, home, mean)
        home.append_point(run.curve[-1])
        home.write_result(run)
    except OSError as error:
        raise RunError(
            f"the run is complete but its result cannot be written to {home.path} ({error.strerror}); mend that, then "
            f"--resume {home.path} writes it"
        ) from None
    (home.path / SESSION).unlink(missing_ok=True)
    return run


def _evaluated(supervisor: Supervisor, home: Folder, mean: Mean) -> Run:
    setup, theta = supervisor.setup, mean.theta
    accounts = [_account(setup, seat.learner, home, supervisor.notes) for seat in supervisor.seats]
    results = tuple(_learner_result(supervisor, home, seat, accounts[seat.learner]) for seat in supervisor.seats)
    steps = sum(each.steps for each in results)
    point = setup.point(steps, supervisor.seconds, setup.held_out.figures(theta), mean)
    curve = (*(each for each in supervisor.curve if each.global_steps < steps), point)
    run = finish(
        setup, accounts, results, curve,
        theta=theta, clock="real", folder=str(home.path), stopped=supervisor.stopped,
    )  # fmt: skip
    return replace(run, notes=(*run.notes, *_told(supervisor)))


def _account(setup: Setup, learner: int, home: Folder, notes: list[str]) -> Account:
    source = Streams(setup.plan.config.seed, learner)("noise", 0).name_on(setup.compute.device)
    if setup.plan.config.privacy.mode != "private":
        return Account(learner, None, source)
    try:
        budget = read_budget(setup.plan, learner, setup.site_names[learner], home.learner(learner))
        return Account(learner, budget, source)
    except LedgerError as error:
        notes.append(f"learner {setup.site_names[learner] or learner}: {error}")
        return Account(learner, None, source)


def _learner_result(supervisor: Supervisor, home: Folder, seat: Seat, account: Account) -> LearnerResult:
    setup, totals = supervisor.setup, seat.totals
    state = supervisor.states.get(seat.learner)
    if state is None:
        saved = learner_checkpoint.load(home, seat.learner)
        state = saved.state if saved is not None and saved.tensors else None
    metrics: Figures = {} if state is None else setup.held_out.figures(state.to(setup.compute.device))
    totals = replace(totals, steps=supervisor.steps(seat), halves=totals.halves + seat.died)
    found = learner_result(
        seat.learner, totals, metrics, account.budget,
        global_steps=supervisor.global_steps, clip_norm=seat.status.clip_norm,
    )  # fmt: skip
    return replace(found, restarts=seat.restarts, state=seat.fate)


def _told(supervisor: Supervisor) -> list[str]:
    """What happened, in words: the supervisor's notes, then what the learners said themselves."""
    said = [f"learner {seat.name} {note}" for seat in supervisor.seats for note in dict.fromkeys(seat.status.notes)]
    halves = sum(seat.totals.halves + seat.died for seat in supervisor.seats)
    unconfirmed = sum(seat.totals.unconfirmed for seat in supervisor.seats)
    if halves or unconfirmed:
        said.append(f"{halves} half-exchanges, and {unconfirmed} answers without a commit (each may be one)")
    return [*supervisor.notes, *said]
