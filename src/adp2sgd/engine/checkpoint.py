"""A learner on disk: model, optimizer state, clip norm and step counts, never its noise. The previous checkpoint is
kept as well."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adp2sgd.errors import RunError
from adp2sgd.learner import Learner
from adp2sgd.progress import Count, Key, from_rows, to_rows
from adp2sgd.run_folder import Folder

NEWEST, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"
OPTIMIZER = "optimizer."  # before the names of its tensors


@dataclass(frozen=True, eq=False)
class Saved:
    """A checkpoint in memory; `complaints` says which newer ones could not be used."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    complaints: tuple[str, ...] = ()

    @property
    def state(self) -> Tensor:
        return torch.cat([self.tensors["weights"], self.tensors["buffers"]])

    @property
    def optimizer(self) -> dict[str, Tensor]:
        return {n.removeprefix(OPTIMIZER): each for n, each in self.tensors.items() if n.startswith(OPTIMIZER)}

    @property
    def counts(self) -> dict[Key, Count]:
        return from_rows(self.facts["counts"])


def save(folder: Folder, learner: Learner, state: Tensor, facts: Mapping[str, Any]) -> None:
    """Replace the learner's checkpoint in one step. Safe beside a training and an exchange thread if `state` is a copy
    of the learner's."""
    own = folder.learner(learner.number)
    tensors = {"weights": state[: len(learner.weights)], "buffers": state[len(learner.weights) :]}
    tensors |= {OPTIMIZER + name: value for name, value in learner.optimizer_state().items()}
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    if (own / NEWEST).exists():
        with folder.replacing(f"{own.name}/{PREVIOUS}", private=True) as part:
            part.unlink()
            os.link(own / NEWEST, part)
    facts = {"counts": to_rows(learner.progress.counts()), **facts, "clip_norm": learner.clip_norm}
    facts = {**facts, "checksums": _checksums(tensors)}
    folder.save_tensors(f"{own.name}/{NEWEST}", tensors, facts, private=True)


def load(folder: Folder, number: int) -> Saved | None:
    """The newest checkpoint that is whole; None if there is none."""
    complaints: list[str] = []
    for name in (NEWEST, PREVIOUS):
        path = f"learner-{number}/{name}"
        if not (folder.path / path).exists():
            continue
        try:
            tensors, facts = folder.load_tensors(path)
            if facts["checksums"] != _checksums(tensors):
                raise RunError(f"{folder.path / path} is damaged (a checksum differs)")
        except (RunError, KeyError) as error:
            complaints.append(f"{error}; an older checkpoint is used if there is one")
            continue
        return Saved(tensors, facts, tuple(complaints))
    return Saved({}, {}, tuple(complaints)) if complaints else None


def restore(learner: Learner, saved: Saved) -> None:
    """Put a fresh learner where the checkpoint left off, under its new start."""
    learner.state.copy_(saved.state)
    learner.optimizer.restore(saved.optimizer)
    learner.clip_norm = saved.facts.get("clip_norm")
    learner.progress.restore(saved.counts)


def restore_clip_norm(folder: Folder, learner: Learner) -> None:
    """Restore the clip norm alone, for a learner that copied its model from another one. Without a checkpoint it stays
    as it is."""
    saved = load(folder, learner.number) if learner.clip_norm is not None else None
    if saved is not None:
        learner.clip_norm = saved.facts.get("clip_norm")


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {
        name: zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for name, tensor in sorted(tensors.items())
    }
