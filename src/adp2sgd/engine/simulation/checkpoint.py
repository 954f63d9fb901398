"""A simulation on disk, complete: weights, ŵ_k, optimizer states, clip norms, counts, the heap and the messages
under way.

Random streams need no state: in a seeded run each is a function of seed, learner, purpose and step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine.extension import counters_of
from adp2sgd.engine.simulation.events import Event, Member, StepEnd, Turn
from adp2sgd.engine.status import Staleness
from adp2sgd.errors import RunError
from adp2sgd.exchange.protocol import MESSAGES, Message, Tally
from adp2sgd.progress import from_rows, to_rows
from adp2sgd.run_folder import SIMULATION, Folder, Point, Run, by_number

if TYPE_CHECKING:
    from adp2sgd.engine.simulation.simulate import Simulation

NAME = SIMULATION
TALLIED = ("initiated", "mixed_before", "busy", "expired", "unconfirmed", "halves", "bytes_sent")


@dataclass(frozen=True, eq=False)
class Saved:
    """A checkpoint in memory."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    @property
    def seed(self) -> int:
        return int(self.facts["seed"])


def write(simulation: Simulation) -> None:
    """Replace the folder's checkpoint by the simulation as it is now."""
    tensors: dict[str, Tensor] = {}
    facts = {
        "seed": simulation.setup.plan.seed,
        "time": simulation.time,
        "order": simulation.order,
        "global_steps": simulation.global_steps,
        "curve": [asdict(point) for point in simulation.curve],
        "members": [_pack_member(member, tensors) for member in simulation.members],
        "heap": [[time, order, _pack_event(event, tensors)] for time, order, event in simulation.heap],
        "log_sizes": simulation.folder.log_sizes("events.jsonl"),
    }
    simulation.folder.save_tensors(NAME, tensors, facts, private=True)


def read(folder: Folder) -> Saved | None:
    """The folder's checkpoint; None where its run was killed before the first one."""
    if folder.unstarted:
        return None
    if (folder.path / "result.json").exists():
        raise RunError(f"{folder.path} holds a finished run; its result is in result.json")
    if not (folder.path / NAME).exists():
        raise RunError(
            f"{folder.path} holds no checkpoint of `simulate` to go on from; if it is a run of `train`, resume it "
            "with that, else start the run with another --out"
        )
    return Saved(*folder.load_tensors(NAME))


def restore(simulation: Simulation, saved: Saved) -> None:
    """Put a fresh simulation where the checkpoint left off."""
    facts, device = saved.facts, simulation.setup.compute.device
    tensors = {name: tensor.to(device) for name, tensor in saved.tensors.items()}
    simulation.time, simulation.order = facts["time"], facts["order"]
    simulation.global_steps = facts["global_steps"]
    simulation.curve[:] = [Point(**point) for point in facts["curve"]]
    simulation.folder.write_points(simulation.curve)
    simulation.heap[:] = [(time, order, _unpack_event(event, tensors)) for time, order, event in facts["heap"]]
    for member, kept in zip(simulation.members, facts["members"], strict=True):
        _unpack_member(member, kept, tensors)
    sizes = {int(learner): size for learner, size in facts["log_sizes"].items()}
    simulation.folder.truncate_logs("events.jsonl", sizes)


def extend(simulation: Simulation, before: Run) -> None:
    """Put a fresh simulation where an earlier, finished one ended. Nothing is under way then."""
    simulation.time = before.seconds
    simulation.curve[:] = simulation.folder.points()
    for member, result in zip(simulation.members, before.learners, strict=True):
        saved = learner_checkpoint.load(simulation.folder, result.learner)
        if saved is None or not saved.tensors:
            raise RunError(f"{simulation.folder.path} lacks a checkpoint of learner {result.learner}; start a new run")
        learner_checkpoint.restore(member.learner, saved)
        counters = counters_of(result)
        member.learner.steps = member.turns = counters.steps
        member.staleness = Staleness(counters.staleness_total, counters.staleness_max)
        tally = {name: getattr(counters, name) for name in TALLIED}
        member.exchange.tally = Tally(completed=counters.exchanges, **tally, partners=dict(counters.partners))
    simulation.global_steps = sum(member.learner.steps for member in simulation.members)
    simulation.order = max(member.turns for member in simulation.members)  # SYNC: the round


def _pack_member(member: Member, tensors: dict[str, Tensor]) -> dict[str, Any]:
    learner = member.learner
    tensors[f"{learner.number}.state"] = learner.state
    tensors[f"{learner.number}.read"] = learner.read
    for name, value in learner.optimizer.state.items():
        tensors[f"{learner.number}.optimizer.{name}"] = value
    return {
        "steps": learner.steps,
        "clip_norm": learner.clip_norm,
        "turns": member.turns,
        "partners": member.partners,
        "wanted_at": member.wanted_at,
        "read_at": member.read_at,
        "staleness": asdict(member.staleness),
        "progress": to_rows(learner.progress.counts()),
        "tally": asdict(member.exchange.tally),
        "number": member.exchange.number,
        "step": member.exchange.step,
        "under_way": [[k, _pack_event(message, tensors)] for k, message in member.exchange.under_way.items()],
    }


def _unpack_member(member: Member, kept: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    learner = member.learner
    learner.state.copy_(tensors[f"{learner.number}.state"])
    learner.read.copy_(tensors[f"{learner.number}.read"])
    learner.optimizer.restore({k: tensors[f"{learner.number}.optimizer.{k}"] for k in learner.optimizer.state})
    learner.clip_norm = kept.get("clip_norm")
    learner.resume_at(kept["steps"])
    learner.progress.restore(from_rows(kept["progress"]))
    for name in ("turns", "partners", "wanted_at", "read_at"):
        setattr(member, name, kept[name])
    member.staleness = Staleness(**kept["staleness"])
    partners = by_number(kept["tally"].pop("partners", {}))
    member.exchange.tally = Tally(**kept["tally"], partners=partners)
    member.exchange.number = kept["number"]
    member.exchange.step = kept["step"]
    for partner, packed in kept["under_way"]:
        message = _unpack_event(packed, tensors)
        assert isinstance(message, Message)
        member.exchange.under_way[partner] = message


def _pack_event(event: Event, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if not isinstance(event, Message):
        return {"kind": type(event).__name__, "learner": event.learner}
    name = None
    if event.snapshot is not None:
        name = f"message.{len(tensors)}"
        tensors[name] = event.snapshot.clone()  # the same snapshot may be under way and at its sender
    return {
        "kind": type(event).__name__,
        "sender": event.sender,
        "receiver": event.receiver,
        "initiator": event.initiator,
        "number": event.number,
        "progress": to_rows(event.progress),
        "snapshot": name,
    }


def _unpack_event(kept: dict[str, Any], tensors: dict[str, Tensor]) -> Event:
    kind = kept.pop("kind")
    if kind in MESSAGES:
        snapshot = None if kept["snapshot"] is None else tensors[kept["snapshot"]]
        progress = from_rows(kept["progress"])
        return MESSAGES[kind](**{**kept, "progress": progress, "snapshot": snapshot})
    return StepEnd(kept["learner"]) if kind == "StepEnd" else Turn(kept["learner"])
