"""All learners of SYNC in step: a barrier that carries facts, and an all-reduce through the learners' shared memories.

Barriers are datagrams in the run's own folder and models lie in inherited memory, so nothing listens on a network and
no other user of the machine can take part. (torch's TCPStore listens on every interface, and Gloo's connections are
not authenticated: any user of the machine can open one.)

The all-reduce: everybody writes its model to its own memory; learner k sums the k-th part of all models, in the order
of the learners, and puts the mean in place of its own k-th part; everybody collects the parts. Two vectors are used in
turn: who writes to one has met everybody since the last read of it.
"""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from adp2sgd.exchange.shared import Post
from adp2sgd.exchange.slots import Layout, Memory

LOOK_S = 0.05  # between two looks at whether somebody was lost
AGAIN_S = 0.001  # before a message to a full queue, or to a learner that has not come up, is sent again


class StrandedError(Exception):
    """Another learner was lost: the others wait in vain."""


class Assembly:
    """One learner's place among all. Learner 0 collects what the others bring and tells them what came of it."""

    def __init__(
        self, mail: str | Path, learner: int, descriptors: list[int], layout: Layout, stranded: Callable[[], bool]
    ) -> None:
        """`stranded` says whether a learner was lost: every wait then ends with StrandedError."""
        self._me, self._world = learner, len(descriptors)
        self._post = Post(mail, self._name(learner))
        self._memories = [Memory(each, layout) for each in descriptors]
        self._stranded = stranded
        self._turn = 0

    def meet(self, brought: Any, join: Callable[[list[Any]], Any]) -> Any:
        """Wait until all learners are here. Returns `join` of what each brought, in their order; all of it is JSON."""
        if self._me:
            self._send(0, {"learner": self._me, "brought": brought})
            return self._receive(1)[0]
        notes = sorted(self._receive(self._world - 1), key=lambda note: note["learner"])
        result = join([brought, *(note["brought"] for note in notes)])
        for other in range(1, self._world):
            self._send(other, result)
        return result

    def average(self, state: Tensor, brought: Any, join: Callable[[list[Any]], Any]) -> Any:
        """Put the mean of all learners' states into `state`. The last meeting carries facts, as `meet` does.

        Guarantee: all learners get the same bits, those of adding up in the learners' order and dividing by K.
        """
        models, parts = self._models(), self._parts(len(state))
        models[self._me].copy_(state)
        self.meet(None, _nothing)
        mine = state[parts[self._me]]
        mine.copy_(models[0][parts[self._me]])
        for model in models[1:]:
            mine.add_(model[parts[self._me]].to(state.device))
        models[self._me][parts[self._me]] = mine.div_(self._world)
        result = self.meet(brought, join)
        for model, part in zip(models, parts, strict=True):
            state[part] = model[part].to(state.device)
        return result

    def spread(self, state: Tensor, source: int) -> None:
        """Give everybody the state of learner `source`."""
        model = self._models()[source]
        if self._me == source:
            model.copy_(state)
        self.meet(None, _nothing)
        state.copy_(model)

    def close(self) -> None:
        self._post.close()

    def _models(self) -> list[Tensor]:
        """The vectors of this turn, one per learner."""
        self._turn += 1
        return [memory.rounds[self._turn % 2] for memory in self._memories]

    def _parts(self, length: int) -> list[slice]:
        edges = [k * length // self._world for k in range(self._world + 1)]
        return [slice(*each) for each in pairwise(edges)]

    def _send(self, other: int, content: Any) -> None:
        data = json.dumps(content).encode()
        while not self._post.send(self._name(other), data):
            self._refuse_stranded()
            time.sleep(AGAIN_S)

    def _receive(self, count: int) -> list[Any]:
        came: list[Any] = []
        while len(came) < count:
            if not select.select([self._post], [], [], LOOK_S)[0]:
                self._refuse_stranded()
            came += [json.loads(data) for _, data in self._post.receive()]
        return came

    def _refuse_stranded(self) -> None:
        if self._stranded():
            raise StrandedError("another learner was lost")

    def _name(self, learner: int) -> str:
        return f"round-{learner}"


def _nothing(_: list[Any]) -> None:
    return None
