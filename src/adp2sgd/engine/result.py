"""What a run reports, from what its learners did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from adp2sgd import model_folder
from adp2sgd.config import Config
from adp2sgd.engine.budgets import new_ledgers
from adp2sgd.engine.compute import Compute
from adp2sgd.engine.evaluate import HeldOut
from adp2sgd.engine.plan import Plan
from adp2sgd.engine.status import Counters
from adp2sgd.metrics import Figures
from adp2sgd.privacy.budget import Budget
from adp2sgd.privacy.mechanism import TIMED_THREAT_MODEL, Guarantee
from adp2sgd.run_folder import SCRATCH, Folder, LearnerResult, Point, Run, versions
from adp2sgd.task import Task

NO_GUARANTEE = {
    "none": "the gradients carry no noise",
    "paper": "the paper's noise is added to gradients that are not clipped, so one record's influence is unbounded",
}


COUNTED = (
    "steps", "staleness_mean", "staleness_max", "exchanges", "initiated", "mixed_before", "busy", "expired",
    "unconfirmed", "halves", "bytes_sent", "partners",
)  # fmt: skip


class Stage(Protocol):
    """What a result needs of a run beside its learners."""

    @property
    def plan(self) -> Plan: ...
    @property
    def task(self) -> Task: ...
    @property
    def compute(self) -> Compute: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def held_out(self) -> HeldOut: ...
    @property
    def site_names(self) -> tuple[str | None, ...]: ...


class Accounted(Protocol):
    """What a result needs of a learner beside its figures."""

    @property
    def number(self) -> int: ...
    @property
    def budget(self) -> Budget | None: ...
    @property
    def noise_source(self) -> str: ...


def finish(
    setup: Stage,
    learners: Sequence[Accounted],
    results: tuple[LearnerResult, ...],
    curve: tuple[Point, ...],
    *,
    theta: Tensor,
    clock: str,
    folder: str,
    stopped: str | None = None,
) -> Run:
    """What a run reports, from what its learners did. `stopped`: why a callback ended it before its time."""
    config, last = setup.plan.config, curve[-1]
    return Run(
        task=config.task,
        algorithm=config.algorithm,
        metrics=last.metrics,
        monitor=setup.task.monitor,
        seconds=last.seconds,
        clock=clock,
        global_steps=last.global_steps,
        overshoot=max(0, last.global_steps - setup.plan.target_steps),
        epochs=last.epoch,
        consensus=last.consensus,
        seeded=config.seed is not None,
        guarantee=_guarantee(learners, at_cap=stopped is not None),
        guarantee_why=_why_none(config, learners),
        noise_source=learners[0].noise_source,
        learners=tuple(replace(each, site=setup.site_names[each.learner]) for each in results),
        sites=_by_site(setup, theta),
        curve=curve,
        notes=(
            *setup.notes,
            *setup.held_out.notes,
            *_stopped(setup.plan, last.epoch, stopped),
            *_apart(last.consensus, theta),
            *_at_chance(last.metrics.get("accuracy"), setup.task),
            *_capped(learners, setup.site_names, whole=last.global_steps >= setup.plan.target_steps),
            *new_ledgers(config, [each.budget for each in learners if each.budget is not None]),
        ),
        versions=versions(),
        folder=folder,
    )


def _stopped(plan: Plan, epoch: float, why: str | None) -> list[str]:
    if why is None:
        return []
    cap = "; when it ended depended on what was seen, so the guarantee is ε at the cap" if plan.private else ""
    return [f"a callback stopped the run at epoch {epoch:.2f} of {plan.config.epochs:g} ({why}){cap}"]


def _apart(consensus: float, theta: Tensor) -> list[str]:
    """A note where the learners' models are further from θ than θ is from 0."""
    if consensus <= max(1.0, float(theta.double().square().sum())):
        return []
    return [
        f"the learners' models do not agree: their mean squared distance from θ is {consensus:.3g}, more than θ's own "
        "size; lower optimizer.lr, or let learners exchange more often (topology.graph, topology.exchanges)"
    ]


def _at_chance(accuracy: float | None, task: Task) -> list[str]:
    """A note where always answering the most frequent class would be as good, within a standard error."""
    labels = task.test.labels()
    if accuracy is None or labels is None or labels.is_floating_point() or labels.dim() != 1:
        return []
    share = float(labels.unique(return_counts=True)[1].max()) / len(labels)
    if accuracy > share + math.sqrt(share * (1 - share) / len(labels)):
        return []
    return [
        f"an accuracy of {accuracy:.3f} is no better than always answering the most frequent class; train longer or "
        "change optimizer.lr, and in private mode use more records or a larger privacy.epsilon"
    ]


def learner_result(
    learner: int, counters: Counters, figures: Figures, budget: Budget | None, *,
    global_steps: int, clip_norm: float | None,
) -> LearnerResult:  # fmt: skip
    """One learner's part of the result. `figures` are of its own model."""
    counts = {name: getattr(counters, name) for name in COUNTED}
    return LearnerResult(
        learner=learner,
        share=counters.steps / max(1, global_steps),
        metrics=figures,
        clip_norm=clip_norm,
        **counts,
        **(budget.figures() if budget is not None else {}),
    )


def _capped(learners: Sequence[Accounted], names: Sequence[str | None], *, whole: bool) -> list[str]:
    """A note on the learners that reached their cap: with uneven speeds, the fast ones. There is none for a `whole` run
    in which all learners reached it, because that is how such a run ends."""
    ended = [each.budget is not None and each.budget.steps >= each.budget.plan.max_steps for each in learners]
    at = [names[each.number] or str(each.number) for each, done in zip(learners, ended, strict=True) if done]
    if not at or (whole and len(at) == len(learners)):
        return []
    who = f"learner{'s' if len(at) > 1 else ''} {', '.join(at[:8])}{' and more' if len(at) > 8 else ''}"
    return [
        f"{who} reached the cap on private steps and only averaged from then on; a larger privacy.headroom (more "
        "noise) or privacy.epsilon allows more steps"
    ]


def _guarantee(learners: Sequence[Accounted], *, at_cap: bool) -> Guarantee | None:
    """What holds for every learner, and so for the run where no record lies at two of them: the largest ε that may be
    spent, and the largest that was. `at_cap`: a run that was stopped counts as having spent all that it may."""
    found = [learner.budget.guarantee() for learner in learners if learner.budget is not None]
    if len(found) < len(learners):  # not private; or a ledger cannot be read, and nobody can say what was spent there
        return None
    most = max(found, key=lambda each: each.epsilon_spent)
    weakest = max(found, key=lambda each: each.epsilon)
    told: dict[str, Any] = {
        name: getattr(most, name) for name in ("epsilon_spent", "epsilon_others", "steps", "max_steps")
    }
    alone = max(each.epsilon_alone or 0.0 for each in found)
    threat = min((each.threat_model for each in found), key=_covers_time)
    told |= {"epsilon_alone": alone, "threat_model": threat, "valid_if": f"no {weakest.unit} lies at two learners"}
    if at_cap:
        told["epsilon_spent"] = weakest.epsilon
    return replace(weakest, **told)


def _covers_time(threat_model: str) -> bool:
    return threat_model == TIMED_THREAT_MODEL


def _why_none(config: Config, learners: Sequence[Accounted]) -> str | None:
    if config.privacy.mode != "private":
        return NO_GUARANTEE[config.privacy.mode]
    unknown = any(learner.budget is None for learner in learners)
    return "a learner's ledger cannot be read, so what it spent is unknown; see the notes" if unknown else None


def _by_site(setup: Stage, theta: Tensor) -> dict[str, dict[str, Any]]:
    sites, names = setup.task.test.sites, setup.task.test.site_names
    if sites is None:
        return {}
    figures = {}
    for number, name in enumerate(names):
        rows = torch.nonzero(sites == number).flatten()
        if len(rows):
            figures[name] = {**setup.held_out.figures(theta, rows), "records": len(rows)}
    return figures


def save_model(setup: Stage, theta: Tensor, folder: Folder) -> None:
    """θ, and all that is needed to use it. A model that cannot be kept whole costs a note, never the run."""
    graph = not folder.path.parent.name.startswith(SCRATCH)
    why = model_folder.save(folder, setup.task, setup.compute.named(theta), setup.plan.config.task, graph=graph)
    if why is not None:
        setup.held_out.notes.append(why)
