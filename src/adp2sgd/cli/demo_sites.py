"""Four hospitals on this machine, each a process with its own certificate, over TLS. One is killed and restarted."""

from __future__ import annotations

import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from adp2sgd.cli import view
from adp2sgd.data.folder import find
from adp2sgd.data.heart import FOLDER, HOSPITALS
from adp2sgd.data.made_hospitals import PATIENTS, write_patients
from adp2sgd.engine.peers.forked_sites import ForkedSites
from adp2sgd.engine.status import LearnerStatus, read_status
from adp2sgd.errors import RunError
from adp2sgd.identity.authority import Authority
from adp2sgd.run_folder import Folder, read_result

KILLED = "hungarian"
KILL_AT = 25  # own steps
LONGEST_S = 120.0
RUN: dict[str, Any] = {
    "task": "heart/logistic",
    "learners": len(HOSPITALS),
    "epochs": 8,
    "batch_size": 16,
    "topology": {"graph": "ring"},
    "optimizer": {"lr": 0.5},
    "speeds": {"step_s": 0.05, "pad": True},  # so that there is something to see
    "privacy": {"mode": "private", "epsilon": 3.0, "delta": 1e-4, "headroom": 1.5},
    "consortium": {"total_samples": 700, "init_seed": 0, "epsilon": 3.0},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One hospital at the end."""

    site: str
    certificate_until: str
    steps: int
    exchanges: int
    restarts: int
    accuracy: float | None
    epsilon_spent: float
    epsilon: float
    consensus: float


def play(*, as_json: bool = False) -> None:
    """Run the story in a temporary folder and print its table."""
    said = Console(stderr=True, quiet=as_json)
    with tempfile.TemporaryDirectory(prefix="adp2sgd-demo-") as scratch:
        root = Path(scratch)
        data, real = _data(root)
        authority = _consortium(root, data)
        said.print(f"certificates, roster and records in place ({'UCI heart disease' if real else 'made-up patients'})")
        sites = ForkedSites()
        try:
            _story(root, authority, sites, said.print)
            rows = [_row(root, authority, number, name) for number, name in enumerate(HOSPITALS)]
        finally:
            sites.close()
    if as_json:
        view.print_json([asdict(row) for row in rows])
        return
    columns = ["site", "steps", "exchanges", "restarts", "accuracy", "ε spent"]
    shown = [
        (
            row.site, str(row.steps), str(row.exchanges), str(row.restarts),
            "" if row.accuracy is None else f"{row.accuracy:.1%}", f"{row.epsilon_spent:.2f} of {row.epsilon:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    view.table(f"Four hospitals over TLS 1.3, no server; {KILLED} was killed (kill -9) and restarted", columns, shown)
    view.say("accuracy: on each hospital's own held-out patients.")
    view.say("ε: bounds what anybody outside a hospital can learn about one of its patients; its own ledger counts it.")
    until, apart = min(row.certificate_until for row in rows), max(row.consensus for row in rows)
    view.say(f"The certificates are valid until {until}.")
    view.say(f"At the end the largest mean squared distance of a model from the average of a pair was {apart:.1e}.")


def _data(root: Path) -> tuple[Path, bool]:
    """The real data where it is at hand, else made-up patients; nothing is fetched."""
    found = find((FOLDER, "heart-disease"), (f"processed.{next(iter(HOSPITALS))}.data",))
    return (write_patients(root / "data"), False) if found is None else (found, True)


def _consortium(root: Path, data: Path) -> Authority:
    authority = Authority.create(root / "consortium", "Demo consortium")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in HOSPITALS]
    for name, door in zip(HOSPITALS, sockets, strict=True):
        address = f"127.0.0.1:{door.getsockname()[1]}"
        door.close()
        authority.issue(name, days=30, addresses=(address,))
        own = {"name": name, "listen": [address], "device": "cpu", "records": PATIENTS[name] * 3 // 4}
        options = {"data_dir": str(data), "hospitals": [name]}
        _site(authority, name).write_text(tomli_w.dumps({**own, "options": options}), encoding="utf-8")
    (root / "run.toml").write_text(tomli_w.dumps(RUN), encoding="utf-8")
    return authority


def _site(authority: Authority, name: str) -> Path:
    return authority.site_folder(name) / "site.toml"


def _story(root: Path, authority: Authority, sites: ForkedSites, say: Callable[[str], None]) -> None:
    def start(name: str) -> None:
        sites.start(name, root / "run.toml", _site(authority, name), root / name, root / f"{name}.log")

    for name in HOSPITALS:
        start(name)
    say("four hospitals dial each other and train")
    end = time.monotonic() + LONGEST_S
    killed, tenth = False, 0
    while len(sites.reap()) < len(HOSPITALS) and time.monotonic() < end:
        time.sleep(0.1)
        own = _status(root, KILLED)
        if not killed and own is not None and own.counters.steps >= KILL_AT:
            sites.kill(KILLED, signal.SIGKILL)
            killed = True
            say(f"{KILLED} was killed after {own.counters.steps} steps; the others go on")
        if killed and sites.reap().get(KILLED) == -signal.SIGKILL:
            start(KILLED)
            say(f"{KILLED} is started again by the same command: it copies a neighbour's model, its ledger goes on")
        tenth = _progress(root, tenth, say)
    failed = [name for name in HOSPITALS if sites.codes.get(name) != 0]
    if failed:
        last = (root / f"{failed[0]}.log").read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise RunError(f"site {failed[0]} did not end well: {' '.join(last) or 'it took too long'}")


def _progress(root: Path, tenth: int, say: Callable[[str], None]) -> int:
    """A line for every second tenth of the run."""
    config = root / "va" / "config.toml"
    status = read_status(Folder(root / "va")) if config.exists() else None
    now = 0 if status is None else 5 * status.global_steps // status.target_steps
    if status is not None and now > tenth:
        say(f"epoch {status.epoch:.1f} of {status.epochs:g}, {status.global_steps:,} steps in all")
    return max(now, tenth)


def _status(root: Path, name: str) -> LearnerStatus | None:
    status = read_status(Folder(root / name))
    return None if status is None else status.learners[list(HOSPITALS).index(name)]


def _row(root: Path, authority: Authority, number: int, name: str) -> Row:
    run = read_result(root / name)
    own = run.learners[number]
    return Row(
        site=name,
        certificate_until=f"{authority.issued(name)[-1].expires:%Y-%m-%d}",
        steps=own.steps,
        exchanges=own.exchanges,
        restarts=own.restarts,
        accuracy=own.accuracy,
        epsilon_spent=own.epsilon_spent or 0.0,
        epsilon=own.epsilon or 0.0,
        consensus=run.consensus,
    )
