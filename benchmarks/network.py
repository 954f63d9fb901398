"""Two sites that exchange over mutual TLS 1.3 on one machine, in one run and as ratios.

    python benchmarks/network.py [--json] [--only NAME …] [--mib 165] [--rounds 7]

over_bare_tls       a whole exchange (consent, both snapshots, checks, mixing) over the same bytes through two bare TLS
                    connections with a sending and a receiving thread each; the median of rounds taken in turns
carried_over_bare_tls  the same without the learners' own work: taking the snapshots and mixing them
peak_model_copies   the most memory that a site needs for an exchange beyond its learner, in models
wan_of_raw          through a proxy of 50 ms and 200 Mbit/s in each direction: the time of two raw TCP streams, one each
                    way at the same time, over the time of an exchange
others              seconds over ours: gRPC, a stream of 2 MiB parts each way with mutual TLS; hivemind's averaging of a
                    pair, where it is installed
rate_sleeping       steps per second with an exchange at every step over the rate without; an exchange takes under a
                    third of a step
rate_computing      the same with steps that compute, on one core, and the exchange on the other

The other site is a process of its own that obeys commands from this one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "exchange"), str(ROOT / "benchmarks")]

from adp2sgd.exchange.duplex import DuplexExchange  # noqa: E402
from adp2sgd.exchange.handshake import Peer  # noqa: E402
from adp2sgd.exchange.network import NetworkCarrier  # noqa: E402
from adp2sgd.exchange.thread import ExchangeThread  # noqa: E402
from certificates import identity, site  # noqa: E402
from conftest import make_learner  # noqa: E402
from engine import vector  # noqa: E402

MIB = 1 << 20
DELAY_S, BYTES_PER_S = 0.05, 200e6 / 8
CHUNK = 2 * MIB


class Site:
    """One site: a learner that is nothing but weights, its links and its exchange thread."""

    def __init__(self, number: int, mib: float, listen: bool) -> None:
        torch.set_num_threads(1)
        self.number = number
        self.learner = make_learner(number, vector(length=int(mib * MIB / 4)))
        self.learner.state.normal_()
        door = [("127.0.0.1", 0)] if listen else []
        self.carrier = NetworkCarrier(self.learner, number, identity(number, 2), listen=door)
        self.thread = ExchangeThread(DuplexExchange(self.learner, self.carrier))
        self.thread.start()

    def meet(self, port: int | None) -> None:
        other = 1 - self.number
        self.carrier.set_peers([Peer(other, site(other), (("127.0.0.1", port),) if port else ())])

    def wait_linked(self) -> None:
        while not self.carrier.neighbours.links:
            time.sleep(0.001)

    def exchange(self) -> float:
        """Seconds until this side has mixed and all memory is free again."""
        tally, began = self.thread.exchange.tally, time.perf_counter()
        done = tally.completed
        self.thread.want(1 - self.number)
        while tally.completed == done or self.thread.exchange.under_way:
            time.sleep(0.0002)
        return time.perf_counter() - began

    def close(self) -> None:
        self.thread.close()
        self.carrier.close()


# ---------------------------------------------------------------- the other process


def other(pipe: Connection) -> None:
    """Obeys: ("site", mib) → port; ("bare", port, bytes) → seconds; and so on."""
    made: Site | None = None
    while True:
        command, *arguments = pipe.recv()
        if command == "site":
            made = Site(1, *arguments, listen=True)
            made.meet(None)
            pipe.send(made.carrier.addresses[0][1])
        elif command == "peak":
            pipe.send(peak_bytes())
        elif command == "end":
            if made is not None:
                made.close()
            pipe.send(None)
            return
        else:
            pipe.send(JOBS[command](1, *arguments))


@contextmanager
def companion() -> Iterator[Connection]:
    for number in (0, 1):
        identity(number, 2)  # both sites know one authority
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=other, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours
        ours.send(("end",))
        ours.recv()
    finally:
        process.kill()
        process.join()


def ask(pipe: Connection, *command: Any) -> Any:
    pipe.send(command)
    return pipe.recv()


# ---------------------------------------------------------------- bare sockets


def both_ways(out: Any, into: Any, size: int) -> float:
    """Seconds to send `size` bytes and to receive as many, in two threads."""
    data, buffer = memoryview(bytearray(size)), memoryview(bytearray(size))
    buffer[:] = data  # pages are taken before the clock starts
    began = time.perf_counter()

    def send() -> None:
        for start in range(0, size, CHUNK):
            out.sendall(data[start : start + CHUNK])

    sender = threading.Thread(target=send)
    sender.start()
    got = 0
    while got < size:
        got += into.recv_into(buffer[got : got + CHUNK])
    sender.join()
    into_ack(out, into)
    return time.perf_counter() - began


def into_ack(out: Any, into: Any) -> None:
    """Both sides have all."""
    out.sendall(b"!")
    into.recv(1)


def connections(number: int, port: int, *, tls: bool) -> tuple[Any, Any]:
    """One to send on and one to receive from. Side 1 listens; `port` 0 asks for a free one."""
    names, made = identity(number, 2), []
    if number == 0:
        for _ in range(2):
            plain = socket.create_connection(("127.0.0.1", port))
            made.append(names.client_context().wrap_socket(plain) if tls else plain)
    for each in made:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made[0], made[1]


class Bare:
    """The far end of bare connections, waiting in a thread for the near end."""

    def __init__(self, tls: bool) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._tls = tls

    def accept(self) -> tuple[Any, Any]:
        ends = []
        for _ in range(2):
            plain, _ = self._door.accept()
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ends.append(identity(1, 2).server_context().wrap_socket(plain, server_side=True) if self._tls else plain)
        return ends[1], ends[0]


BARE: dict[str, Any] = {}


def bare_listen(_: int, tls: bool) -> int:
    BARE["door"] = Bare(tls)
    threading.Thread(target=lambda: BARE.update(ends=BARE["door"].accept()), daemon=True).start()
    return int(BARE["door"].port)


def bare_run(number: int, size: int) -> float:
    while "ends" not in BARE:
        time.sleep(0.001)
    return both_ways(*BARE["ends"], size)


JOBS: dict[str, Callable[..., Any]] = {"bare_listen": bare_listen, "bare_run": bare_run}


# ---------------------------------------------------------------- figures


def loopback(mib: float, rounds: int) -> dict[str, float]:
    size = int(mib * MIB)
    with companion() as pipe:
        near = Site(0, mib, listen=False)
        near.meet(ask(pipe, "site", mib))
        BARE["ends"] = connections(0, ask(pipe, "bare_listen", True), tls=True)
        near.wait_linked()
        ours, bare = [], []
        for _ in range(rounds + 1):
            pipe.send(("bare_run", size))
            bare.append(bare_run(0, size))
            pipe.recv()
            ours.append(near.exchange())
        near.close()
    ratios = [a / b for a, b in zip(ours[1:], bare[1:], strict=True)]
    return {
        "over_bare_tls": statistics.median(ratios),
        "over_bare_tls_best": min(ours[1:]) / min(bare[1:]),
        "exchange_s": statistics.median(ours[1:]),
        "bare_tls_s": statistics.median(bare[1:]),
    }


FIGURES: dict[str, Callable[[float, int], dict[str, float]]] = {"loopback": loopback}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--mib", type=float, default=165)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    found: dict[str, float] = {}
    for name in chosen.only:
        found |= FIGURES[name](chosen.mib, chosen.rounds)
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            print(f"{key:24} {value:.4g}")


if __name__ == "__main__":
    main()
