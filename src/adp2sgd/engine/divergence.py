"""Detects divergence by the norms of the gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adp2sgd.errors import DivergedError
from adp2sgd.learner import Learner
from adp2sgd.run_folder import Folder

WATCH_EVERY = 32
"""Steps between looks at the norms, so that a GPU is not made to wait at each."""


class Watch:
    """Steps whose norms have not been looked at yet."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._steps: list[tuple[Learner, dict[str, Any], Tensor]] = []

    def note(self, learner: Learner, event: dict[str, Any]) -> None:
        """Keep what is to be written of the learner's last step."""
        clip = {} if learner.clip_norm is None else {"clip_norm": learner.clip_norm}
        self._steps.append((learner, {"step": learner.steps, **event, **clip}, learner.gradient_norm))

    @property
    def due(self) -> bool:
        return len(self._steps) >= WATCH_EVERY

    def look(self) -> tuple[list[tuple[int, dict[str, Any]]], DivergedError | None]:
        """The events of all steps since the last look, each with its learner's number; up to the first whose norm is
        not finite, and then the error to raise."""
        steps, self._steps = self._steps, []
        events = []
        norms = torch.stack([norm for *_, norm in steps]).tolist() if steps else []
        for (learner, event, _), norm in zip(steps, norms, strict=True):
            finite = math.isfinite(norm)
            events.append((learner.number, {**event, "gradient_norm": norm if finite else None}))
            if not finite:
                return events, _diverged(learner.name, event["step"], self.folder)
        return events, None


def _diverged(learner: str, step: int, folder: Folder) -> DivergedError:
    """The error for a gradient that is not finite. At a first step the cause may be the records."""
    cure = "lower optimizer.lr" if step > 1 else "look for records whose values are not finite, or lower optimizer.lr"
    return DivergedError(
        f"learner {learner} diverged at its step {step}: the gradient is no longer finite; {cure}; "
        f"what was recorded is in {folder.path}"
    )
