"""A consortium of four hospitals in a temporary folder: certificates, files, records in the heart data's format, and
real processes that join over TLS."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from adp2sgd.data.made_hospitals import PATIENTS, write_patients
from adp2sgd.engine.status import RunStatus, read_status
from adp2sgd.identity.authority import Authority
from adp2sgd.run_folder import Folder, Run, read_result
from proxy import Proxy

NAMES = ("cleveland", "hungarian", "switzerland", "va")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class ForkServer:
    """The package's own, in a process that has run nothing else."""

    def __init__(self) -> None:
        program = "from adp2sgd.engine.peers.forked_sites import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


class Hospitals:
    """`start`, `kill` and `wait` act on sites by name; results and statuses come from their folders."""

    def __init__(
        self, root: Path, server: ForkServer, data: Path, *, names: tuple[str, ...] = NAMES,
        proxied: str | None = None, outward: tuple[str, ...] = (), **run: Any,
    ) -> None:  # fmt: skip
        """`proxied`: others reach this site through `proxy` alone. `outward`: sites that nobody dials. `run`: tables of
        run.toml that replace or add to those of `write_run`."""
        self.root, self.names, self.server = root, names, server
        self.authority = Authority.create(root / "consortium", "Heart")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.proxy = None if proxied is None else Proxy(("127.0.0.1", self.ports[proxied]))
        for name in names:
            port = self.proxy.address[1] if self.proxy is not None and name == proxied else self.ports[name]
            address = (f"127.0.0.1:{port}",)
            self.authority.issue(name, days=30, addresses=address, outward=name in outward)
            self.write_site(name, data)
        self.run_file = root / "run.toml"
        self.write_run(**run)
        self.pids: dict[str, int] = {}

    def write_run(self, **run: Any) -> None:
        tables: dict[str, Any] = {
            "task": "heart/logistic", "learners": len(self.names), "epochs": 20, "batch_size": 16,
            "evaluate_every": 5, "checkpoint_every": 2, "topology": {"graph": "complete"}, "optimizer": {"lr": 0.1},
            "consortium": {"total_samples": 700, "init_seed": 0},
        }  # fmt: skip
        self.run_file.write_text(tomli_w.dumps({**tables, **run}))

    def write_site(self, name: str, data: Path, **more: Any) -> None:
        tables = {
            "name": name, "listen": [f"127.0.0.1:{self.ports[name]}"], "records": max(16, PATIENTS[name] * 3 // 4),
            "device": "cpu", "options": {"data_dir": str(data), "hospitals": [name]},
        }  # fmt: skip
        self.site_file(name).write_text(tomli_w.dumps({**tables, **more}))

    def site_file(self, name: str) -> Path:
        return self.authority.site_folder(name) / "site.toml"

    def folder(self, name: str) -> Path:
        return self.root / "runs" / name

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def start(self, *names: str) -> None:
        for name in names or self.names:
            answer = self.server.ask(
                do="start", name=name, run=str(self.run_file), site=str(self.site_file(name)),
                out=str(self.folder(name)), log=str(self.root / f"{name}.log"),
            )  # fmt: skip
            self.pids[name] = answer["pid"]

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)

    def codes(self) -> dict[str, int]:
        found: dict[str, int] = self.server.ask(do="reap")["codes"]
        return found

    def wait(self, *names: str, timeout_s: float = 150.0) -> None:
        """Until these sites have ended well."""
        names = names or self.names
        until(lambda: all(name in self.codes() for name in names), timeout_s, self.told)
        codes = self.codes()
        assert all(codes[name] == 0 for name in names), self.told()

    def told(self) -> str:
        return "\n".join(f"{name}: {self.status(name)}\n{self.log(name)}" for name in self.names)

    def status(self, name: str) -> RunStatus | None:
        if not (self.folder(name) / "config.toml").exists():
            return None
        return read_status(Folder.open(self.folder(name)))

    def steps(self, name: str) -> int:
        """The site's own, in all its starts."""
        status = self.status(name)
        return 0 if status is None else status.learners[self.names.index(name)].counters.steps

    def notes(self, name: str) -> str:
        status = self.status(name)
        return (
            "" if status is None else "\n".join([*status.notes, *(n for each in status.learners for n in each.notes)])
        )

    def state(self, name: str) -> str:
        """What the process of `name` that runs now is doing."""
        status = self.status(name)
        own = None if status is None else status.learners[self.names.index(name)]
        return own.state if own is not None and own.pid == self.pids[name] else ""

    def linked(self, name: str, other: str) -> bool:
        """Whether the process of `name` that runs now has a link with `other`."""
        status = self.status(name)
        if status is None or status.learners[self.names.index(name)].pid != self.pids[name]:
            return False
        return status.learners[self.names.index(other)].state == "linked"

    def apart(self) -> float:
        """The largest distance of two sites' models, relative to the first one's norm."""
        found = [load_file(self.folder(name) / "model/weights.safetensors") for name in self.names]
        vectors = [torch.cat([each.flatten() for each in model.values()]) for model in found]
        most = max(float(torch.linalg.vector_norm(one - other)) for one in vectors for other in vectors)
        return most / float(torch.linalg.vector_norm(vectors[0]))

    def rate(self, name: str) -> float:
        """Steps per second of a site that was started once, from its first step to its last."""
        path = self.folder(name) / f"learner-{self.names.index(name)}" / "events.jsonl"
        seconds = [json.loads(line)["seconds"] for line in path.read_text().splitlines()]
        return (len(seconds) - 1) / (seconds[-1] - seconds[0])

    def result(self, name: str) -> Run:
        return read_result(self.folder(name))


def until(holds: Callable[[], bool], timeout_s: float, told: Callable[[], str] = lambda: "") -> float:
    """Wait; returns the seconds that it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < timeout_s, told()
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.fixture(scope="session", name="made_data")
def fixture_made_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_patients(tmp_path_factory.mktemp("data"))


@pytest.fixture(name="hospitals")
def fixture_hospitals(tmp_path: Path, made_data: Path) -> Iterator[Callable[..., Hospitals]]:
    """Makes a consortium; whatever is still running is killed after the test."""
    server = ForkServer()
    proxies = []

    def make(folder: str = "", **run: Any) -> Hospitals:
        root = tmp_path / folder
        root.mkdir(exist_ok=True)
        made = Hospitals(root, server, run.pop("data", made_data), **run)
        proxies.append(made.proxy)
        return made

    yield make
    server.close()
    for proxy in proxies:
        if proxy is not None:
            proxy.close()
