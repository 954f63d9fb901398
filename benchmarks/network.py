"""Two sites that exchange over mutual TLS 1.3 on one machine, in one run and as ratios.

    python benchmarks/network.py [--json] [--only NAME …] [--mib 165] [--rounds 7]

over_bare_tls       a whole exchange (consent, both snapshots, checks, mixing) over the same bytes through two bare TLS
                    connections with a sending and a receiving thread each; the median of rounds taken in turns
cpu_over_bare_tls   the same in CPU seconds of both processes, which other load on the machine hardly changes
peak_model_copies   the most memory that a site needs for an exchange beyond its learner, in models
wan_of_raw          through a proxy of 50 ms and 200 Mbit/s in each direction: the time of two raw TCP streams, one each
                    way at the same time, over the time of an exchange
others              seconds over ours: gRPC, a stream of 2 MiB parts each way with mutual TLS
rate_sleeping       steps per second with an exchange at every step over the rate without; an exchange takes under a
                    third of a step
rate_computing      the same with steps that compute, on one core, and the exchange on the other

The other site is a process of its own that obeys commands from this one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "exchange"), str(ROOT / "benchmarks")]

from adp2sgd.config import Config  # noqa: E402
from adp2sgd.engine.peers.join import SWITCH_S  # noqa: E402
from adp2sgd.engine.setup import prepare  # noqa: E402
from adp2sgd.exchange.duplex import DuplexExchange  # noqa: E402
from adp2sgd.exchange.handshake import Peer  # noqa: E402
from adp2sgd.exchange.network import NetworkCarrier  # noqa: E402
from adp2sgd.exchange.thread import ExchangeThread  # noqa: E402
from certificates import consortium, identity, site  # noqa: E402

MIB = 1 << 20
DELAY_S, BYTES_PER_S = 0.05, 200e6 / 8
CHUNK = 2 * MIB
SMALL_MIB = 16  # for step rates
GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
GRPC: list[Any] = []  # servers live as long as their process


class Site:
    """One site: a learner that is nothing but weights, its links and its exchange thread."""

    def __init__(self, number: int, mib: float, listen: bool) -> None:
        torch.set_num_threads(1)
        self.number = number
        options = {"length": int(mib * MIB / 4)}
        setup = prepare(Config(task="engine:vector", learners=2, batch_size=1, device="cpu", options=options))
        self.learner = setup.learner(number, Path())
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


# ---------------------------------------------------------------- bare sockets


class Bare:
    """Two connections, one to send on and one to receive from, each with a thread of its own."""

    def __init__(self, tls: bool) -> None:
        self._tls = tls
        self._ends: list[Any] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])

    def accept(self) -> None:
        for _ in range(2):
            plain, _ = self._door.accept()
            self._keep(plain, server=True)
        self._ends.reverse()

    def dial(self, port: int) -> None:
        for _ in range(2):
            self._keep(socket.create_connection(("127.0.0.1", port)), server=False)

    def _keep(self, plain: socket.socket, *, server: bool) -> None:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls and server:
            self._ends.append(identity(1, 2).server_context().wrap_socket(plain, server_side=True))
        else:
            self._ends.append(identity(0, 2).client_context().wrap_socket(plain) if self._tls else plain)

    def run(self, size: int) -> float:
        """Seconds to send `size` bytes and to receive as many."""
        out, into = self._ends
        data, buffer = memoryview(bytearray(size)), memoryview(bytearray(size))
        data[:] = buffer[:] = bytes(size)  # pages are taken before the clock starts
        began = time.perf_counter()
        sender = threading.Thread(target=lambda: [out.sendall(data[k : k + CHUNK]) for k in range(0, size, CHUNK)])
        sender.start()
        got = 0
        while got < size:
            got += into.recv_into(buffer[got : got + CHUNK])
        sender.join()
        out.sendall(b"!")  # both sides have all
        into.recv(1)
        return time.perf_counter() - began


@contextmanager
def proxied(port: int) -> Iterator[int]:
    """The port of a proxy to `port`, in a process of its own."""
    command = [sys.executable, str(ROOT / "tests/exchange/proxy.py"), str(port), str(DELAY_S), str(BYTES_PER_S)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()


# ---------------------------------------------------------------- the other process


class Other:
    """The far site, in its own process: commands are method names."""

    def __init__(self) -> None:
        self.site: Site | None = None
        self.bare: Bare | None = None

    def open_site(self, mib: float) -> int:
        self.site = Site(1, mib, listen=True)
        self.site.meet(None)
        return self.site.carrier.addresses[0][1]

    def open_bare(self, tls: bool) -> int:
        self.bare = Bare(tls)
        self.accepting = threading.Thread(target=self.bare.accept, daemon=True)
        self.accepting.start()
        return self.bare.port

    def run_bare(self, size: int) -> float:
        assert self.bare is not None
        self.accepting.join()
        return self.bare.run(size)

    def open_grpc(self, size: int) -> int:
        return grpc_server(size)

    def pin(self, core: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})

    def cpu_s(self) -> float:
        return time.process_time()

    def end(self) -> None:
        if self.site is not None:
            self.site.close()


def serve(pipe: Connection) -> None:
    far = Other()
    while True:
        name, *arguments = pipe.recv()
        pipe.send(getattr(far, name)(*arguments))
        if name == "end":
            return


@contextmanager
def companion() -> Iterator[Connection]:
    for number in (0, 1):
        identity(number, 2)  # both sites know one authority
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours
        ask(ours, "end")
    finally:
        process.kill()
        process.join()


def ask(pipe: Connection, *command: Any) -> Any:
    pipe.send(command)
    return pipe.recv()


@contextmanager
def pair(mib: float) -> Iterator[tuple[Site, Connection]]:
    """Two sites with a link."""
    with companion() as pipe:
        near = Site(0, mib, listen=False)
        near.meet(ask(pipe, "open_site", mib))
        near.wait_linked()
        yield near, pipe
        near.close()


# ---------------------------------------------------------------- figures


def loopback(mib: float, rounds: int) -> dict[str, Any]:
    size = int(mib * MIB)
    ours: list[float] = []
    bare: list[float] = []
    cpu: dict[str, list[float]] = {"ours": [], "bare": []}
    with pair(mib) as (near, pipe):
        plain = Bare(tls=True)
        plain.dial(ask(pipe, "open_bare", True))
        for _ in range(rounds + 1):
            began = time.process_time() + ask(pipe, "cpu_s")
            pipe.send(("run_bare", size))
            bare.append(plain.run(size))
            pipe.recv()
            between = time.process_time() + ask(pipe, "cpu_s")
            ours.append(near.exchange())
            ended = time.process_time() + ask(pipe, "cpu_s")
            cpu["bare"].append(between - began)
            cpu["ours"].append(ended - between)
    return {
        "over_bare_tls": statistics.median(a / b for a, b in zip(ours[1:], bare[1:], strict=True)),
        "over_bare_tls_of_the_best": min(ours[1:]) / min(bare[1:]),
        "cpu_over_bare_tls": statistics.median(cpu["ours"][1:]) / statistics.median(cpu["bare"][1:]),
        "exchange_s": statistics.median(ours[1:]),
        "bare_tls_s": statistics.median(bare[1:]),
    }


def memory(mib: float, rounds: int) -> dict[str, Any]:
    """Growth of this process's resident set from a standing link to its highest mark over some exchanges."""
    with pair(mib) as (near, _):
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
        before = resident("VmHWM")
        for _ in range(min(rounds, 3)):
            near.exchange()
        return {"peak_model_copies": (resident("VmHWM") - before) / (mib * MIB)}


def resident(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith(key))


def wan(mib: float, rounds: int) -> dict[str, Any]:
    with companion() as pipe:
        raw = Bare(tls=False)
        with proxied(ask(pipe, "open_bare", False)) as port:
            raw.dial(port)
            pipe.send(("run_bare", int(mib * MIB)))
            raw_s = raw.run(int(mib * MIB))
            pipe.recv()
        near = Site(0, mib, listen=False)
        with proxied(ask(pipe, "open_site", mib)) as port:
            near.meet(port)
            near.wait_linked()
            took = near.exchange()
            near.close()
    return {"wan_of_raw": raw_s / took, "wan_exchange_s": took, "wan_raw_s": raw_s}


def others(mib: float, rounds: int) -> dict[str, Any]:
    with pair(mib) as (near, pipe):
        port, times, ours = ask(pipe, "open_grpc", int(mib * MIB)), [], []
        for _ in range(min(rounds, 4) + 1):
            times.append(grpc_exchange(port, int(mib * MIB)))
            ours.append(near.exchange())
    return {"others": {"grpc": statistics.median(times[1:]) / statistics.median(ours[1:])}}


def grpc_server(size: int) -> int:
    import grpc

    def both(parts: Iterator[bytes], _: Any) -> Iterator[bytes]:
        model = memoryview(bytearray(size))
        received = bytearray(size)
        reader = threading.Thread(target=collect, args=(parts, received))
        reader.start()
        yield from pieces(model)
        reader.join()

    method = grpc.stream_stream_rpc_method_handler(both)
    server = grpc.server(ThreadPoolExecutor(4), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("site", {"exchange": method}),))
    key, chain, root = pem(1)
    port = server.add_secure_port(
        "localhost:0", grpc.ssl_server_credentials([(key, chain)], root, require_client_auth=True)
    )
    server.start()
    GRPC.append(server)
    return int(port)


def grpc_exchange(port: int, size: int) -> float:
    import grpc

    key, chain, root = pem(0)
    options = [*GRPC_OPTIONS, ("grpc.ssl_target_name_override", site(1))]
    with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(root, key, chain), options) as channel:
        grpc.channel_ready_future(channel).result(20)
        model, received = memoryview(bytearray(size)), bytearray(size)
        began = time.perf_counter()
        collect(channel.stream_stream("/site/exchange")(pieces(model)), received)
        return time.perf_counter() - began


def pieces(model: memoryview) -> Iterator[bytes]:
    for start in range(0, len(model), CHUNK):
        yield bytes(model[start : start + CHUNK])


def collect(parts: Iterator[bytes], received: bytearray) -> None:
    start = 0
    for part in parts:
        received[start : start + len(part)] = part
        start += len(part)


def pem(number: int) -> tuple[bytes, bytes, bytes]:
    """Key, certificate and authority of a site."""
    whole = identity(number, 2).certificate.read_bytes()
    cut = whole.index(b"-----BEGIN PRIVATE KEY")
    return whole[cut:], whole[:cut], consortium().path.read_bytes()


# ---------------------------------------------------------------- steps


def rate(near: Site, step: Callable[[], None], steps: int, *, exchanging: bool) -> float:
    """Steps per second, not counting the time in which other processes held this thread's core."""
    began, queued = time.perf_counter(), queued_s()
    for _ in range(steps):
        if exchanging:
            near.thread.want(1)
        step()
    return steps / (time.perf_counter() - began - (queued_s() - queued))


def queued_s() -> float:
    """Seconds for which this thread was ready and had no core."""
    schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(schedstat.read_text().split()[1]) / 1e9 if schedstat.exists() else 0.0


def rates(near: Site, step: Callable[[], None], step_s: float) -> tuple[float, int]:
    """The rate with exchanges over that without, in turns, and how many exchanges completed."""
    before, steps = near.thread.exchange.tally.completed, max(8, round(3 / step_s))
    ratios = []
    for _ in range(3):
        without = rate(near, step, steps, exchanging=False)
        ratios.append(rate(near, step, steps, exchanging=True) / without)
        while near.thread.exchange.under_way:
            time.sleep(0.001)
    return statistics.median(ratios), near.thread.exchange.tally.completed - before


def sleeping(mib: float, rounds: int) -> dict[str, Any]:
    with pair(SMALL_MIB) as (near, _):
        took = statistics.median(near.exchange() for _ in range(7))
        ratio, completed = rates(near, lambda: time.sleep(3.2 * took), 3.2 * took)
    return {"rate_sleeping": ratio, "rate_sleeping_exchanges": completed}


def computing(mib: float, rounds: int) -> dict[str, Any]:
    """This thread computes on core 0; the exchange, its link and the other site run on core 1."""
    sys.setswitchinterval(SWITCH_S)
    with pair(SMALL_MIB) as (near, pipe):
        ask(pipe, "pin", 1)
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {1})
        os.sched_setaffinity(threading.get_native_id(), {0})
        took = statistics.median(near.exchange() for _ in range(7))
        left, right = torch.randn(500, 500), torch.randn(500, 500)
        began = time.perf_counter()
        for _ in range(20):
            torch.mm(left, right)
        repeat = max(1, round(3.2 * took / ((time.perf_counter() - began) / 20)))
        ratio, completed = rates(near, lambda: [torch.mm(left, right) for _ in range(repeat)] and None, 3.2 * took)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return {"rate_computing": ratio, "rate_computing_exchanges": completed}


FIGURES: dict[str, Callable[[float, int], dict[str, Any]]] = {
    "loopback": loopback,
    "memory": memory,
    "wan": wan,
    "others": others,
    "sleeping": sleeping,
    "computing": computing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--mib", type=float, default=165)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    for name in chosen.only:
        print(f"{name} …", file=sys.stderr, flush=True)
        found |= FIGURES[name](chosen.mib, chosen.rounds)
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            print(f"{key:28} {value if isinstance(value, dict) else format(value, '.4g')}")


if __name__ == "__main__":
    main()
