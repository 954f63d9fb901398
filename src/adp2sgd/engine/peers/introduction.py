"""What a site tells a peer at first contact, and what it must agree with: version, run, model, initial weights, ε.

Implements `exchange.handshake.Identity`. Certificates, roster and revocations are `identity/`'s.
"""

from __future__ import annotations

import hashlib
import math
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from decimal import Decimal
from typing import Any

import torch

from adp2sgd.config import Config, differing
from adp2sgd.engine.status import PublicStatus
from adp2sgd.errors import RefusedError
from adp2sgd.flat import FlatModel
from adp2sgd.identity.credentials import Credentials
from adp2sgd.progress import Progress, from_rows, to_rows

LARGEST_COUNT = 1 << 62
PROTOCOL = 1  # neighbouring versions work together


def model_facts(model: FlatModel) -> dict[str, str]:
    """Digests of the model's shape and of its present weights: equal at two sites that started alike."""
    shape = [(name, list(each.shape), str(each.dtype)) for name, each in model.module.named_parameters()]
    weights = torch.cat([model.weights, model.buffers]).cpu().contiguous().view(torch.uint8).numpy()
    return {
        "shape": hashlib.sha256(repr(shape).encode()).hexdigest(),
        "weights": hashlib.sha256(weights.data).hexdigest(),
    }


def stated_epsilon(epsilon: float, accepted: float | None) -> float:
    """ε rounded up to two digits, as a site states it where the noise is public: from its exact ε others could compute
    the number of records. It does not exceed what members accept where ε itself does not."""
    if not 0 < epsilon < math.inf:
        return epsilon
    place = 1 - math.floor(math.log10(epsilon))
    stated = max(epsilon, math.ceil(Decimal(repr(epsilon)).scaleb(place)) * 10.0**-place)
    return min(stated, accepted) if accepted is not None and epsilon <= accepted else stated


class Introduction:
    """One site's. `heard` holds what each peer has told last. All methods may be called from any thread."""

    def __init__(
        self, credentials: Credentials, run: Config, model: dict[str, str], progress: Progress,
        status: Callable[[], PublicStatus],
    ) -> None:  # fmt: skip
        """`run`: as in run.toml, without anything of this site. `model`: its `model_facts` at the initial weights."""
        self.heard: dict[str, PublicStatus] = {}
        self.numbers: dict[str, dict[str, int]] = {}  # of a peer's roster and lists
        self._credentials, self._model, self._progress, self._status = credentials, model, progress, status
        self._run = run
        self._text = run.to_toml()
        self._mutex = threading.Lock()
        self._meeting = threading.local()

    @property
    def name(self) -> str:
        return self._credentials.name

    def server_context(self) -> ssl.SSLContext:
        return self._credentials.server_context()

    def client_context(self) -> ssl.SSLContext:
        return self._credentials.client_context()

    def verify(self, peer_certificate_der: bytes) -> str:
        name = self._credentials.verify(peer_certificate_der)
        self._meeting.name = name  # the HELLO that follows is read in the same thread
        return name

    def hello(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "run": self._text,
            "model": self._model,
            "status": asdict(self._status()),
            "progress": to_rows(self._progress.counts()),
            "numbers": self._credentials.numbers,
        }

    def check_hello(self, theirs: Mapping[str, Any]) -> None:
        try:
            status = _status(theirs["status"])
            numbers = {str(key): int(value) for key, value in theirs["numbers"].items()}
            counts = from_rows([[_whole(value) for value in row] for row in theirs["progress"]])
            protocol, text, model = int(theirs["protocol"]), str(theirs["run"]), dict(theirs["model"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise RefusedError("its HELLO lacks what this release needs; use the same release at both sites") from None
        shown = getattr(self._meeting, "name", status.site)
        if status.site != shown:
            raise RefusedError(f"site {shown} says that it is {status.site[:80]}")
        if abs(protocol - PROTOCOL) > 1:
            raise RefusedError(f"protocol version {protocol} there and {PROTOCOL} here; use neighbouring releases")
        self._compare_runs(text)
        for key, words in (("shape", "the model has another shape"), ("weights", "the initial weights differ")):
            if model.get(key) != self._model[key]:
                raise RefusedError(f"{words} at {self.name} and at {status.site}; compare the task's options")
        self._check_epsilon(status)
        with self._mutex:
            self.heard[status.site], self.numbers[status.site] = status, numbers
        self._progress.merge(counts)

    def _compare_runs(self, text: str) -> None:
        try:
            found = differing(self._text, text)
        except ValueError:
            raise RefusedError("its run.toml cannot be read; use neighbouring releases") from None
        if found is not None:
            key, here, there = found
            raise RefusedError(f"run.toml differs in {key}: {here} at {self.name}, {there} at the other site")

    def _check_epsilon(self, status: PublicStatus) -> None:
        most = self._run.consortium.epsilon
        if most is None or self._run.privacy.mode != "private":
            return
        if status.epsilon is None or not status.epsilon <= most:  # also where it is no number
            raise RefusedError(f"site {status.site} states ε = {status.epsilon}, but members accept {most:g} at most")


def _status(raw: Mapping[str, Any]) -> PublicStatus:
    """What a peer says of itself. Raises KeyError, TypeError or ValueError for anything else."""
    epsilon, delta = (None if raw[name] is None else float(raw[name]) for name in ("epsilon", "delta"))
    return PublicStatus(site=str(raw["site"]), stopped=bool(raw["stopped"]), epsilon=epsilon, delta=delta)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST_COUNT:
        raise ValueError
    return value
