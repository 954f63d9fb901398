"""Sites with exchange threads and real TLS links on loopback, for tests that let them run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adp2sgd.exchange.duplex import DuplexExchange
from adp2sgd.exchange.handshake import Address, Peer
from adp2sgd.exchange.neighbours import Event
from adp2sgd.exchange.network import NetworkCarrier
from adp2sgd.exchange.thread import ExchangeThread
from adp2sgd.tasks import resolve
from certificates import Certified, identity, site
from conftest import make_learner
from worlds import wait_for


class Site:
    """One learner with its links. It listens on loopback unless told otherwise."""

    def __init__(
        self,
        number: int,
        who: Certified | None = None,
        *,
        dimension: int = 3,
        listen: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.number = number
        self.learner = make_learner(number, resolve("quadratic", {"records": 8, "dimension": dimension}))
        self.learner.state.normal_(generator=torch.Generator().manual_seed(number))
        self.events: list[Event] = []
        self.identity = who or identity(number)
        self.carrier = NetworkCarrier(
            self.learner,
            number,
            self.identity,
            listen=[("127.0.0.1", 0)] if listen else [],
            dtype=dtype,
            on_event=self.events.append,
        )
        self.exchange = DuplexExchange(self.learner, self.carrier)
        self.thread = ExchangeThread(self.exchange)
        self.thread.start()

    @property
    def address(self) -> Address:
        return self.carrier.addresses[0]

    @property
    def tally(self) -> Any:
        return self.exchange.tally

    @property
    def linked(self) -> set[int]:
        return set(self.carrier.neighbours.links)

    def know(self, *others: tuple[int, Address | None]) -> None:
        """The sites that this one may link with; None as an address: it dials this one."""
        self.carrier.set_peers([Peer(k, site(k), () if where is None else (where,)) for k, where in others])

    def reasons(self, kind: str) -> list[str]:
        return [event.reason for event in self.events if event.kind == kind]

    def close(self) -> None:
        self.thread.close()
        self.carrier.close()


def dials(dialler: Site, listener: Site, through: Address | None = None) -> None:
    """Only `dialler` dials."""
    listener.know((dialler.number, None))
    dialler.know((listener.number, through or listener.address))


def wait_linked(*sites: Site) -> None:
    numbers = {each.number for each in sites}
    wait_for(lambda: all(each.linked == numbers - {each.number} for each in sites))


def close_all(sites: Sequence[Site]) -> None:
    for each in sites:
        each.close()
