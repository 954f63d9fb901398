"""Who can reach a run: no process of it listens where another user or another machine could speak to it."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import socket
import stat
import sys
import threading
from pathlib import Path

import pytest
import torch

from adp2sgd.config import Config, Optimizer, Speeds
from adp2sgd.engine import simulate
from adp2sgd.engine.processes.train import train
from adp2sgd.engine.status import RunStatus
from adp2sgd.errors import ConfigError
from adp2sgd.exchange.assembly import Assembly, StrandedError
from adp2sgd.exchange.shared import Post, make_mail
from adp2sgd.exchange.slots import Layout
from adp2sgd.run_folder import Folder

LISTENS = "0A"  # a TCP socket's state in /proc/net/tcp
NOBODY = 65_534
SLEEPY = Config(
    task="quadratic",
    learners=3,
    epochs=4,
    batch_size=8,
    seed=1,
    device="cpu",
    checkpoint_every=0,
    options={"records": 200, "dimension": 3},
    optimizer=Optimizer(lr=0.05, momentum=0.5),
    speeds=Speeds(step_s=0.02, pad=True),
)


def family() -> set[int]:
    """This process and all that descend from it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def inodes(pid: int) -> set[str]:
    """Of the process's open sockets."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """As /proc/net/tcp writes it: words in the machine's byte order."""
    raw = bytes.fromhex(text.partition(":")[0])
    words = [int.from_bytes(raw[i : i + 4], sys.byteorder).to_bytes(4, "big") for i in range(0, len(raw), 4)]
    return ipaddress.ip_address(b"".join(words))


def reachable(own: set[str]) -> dict[str, list[str]]:
    """What among the sockets `own` others could speak to: internet addresses, and names of Unix sockets."""
    found: dict[str, list[str]] = {"internet": [], "unix": []}
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in own and (not kind.startswith("tcp") or fields[3] == LISTENS):
                found["internet"].append(str(address(fields[1])))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) > 7 and fields[6] in own:
            found["unix"].append(fields[7])
    return found


def test_the_look_at_sockets_sees_what_others_could_reach() -> None:
    before, name = inodes(os.getpid()), f"test/{secrets.token_hex(8)}"
    with socket.create_server(("0.0.0.0", 0)), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind(f"\0{name}")
        assert reachable(inodes(os.getpid()) - before) == {"internet": ["0.0.0.0"], "unix": [f"@{name}"]}


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", ["adpsgd", "sync"])
def test_every_socket_of_a_run_is_the_owners_alone(algorithm: str, tmp_path: Path) -> None:
    """All processes of a run, while they train: TCP, UDP, raw and Unix sockets, abstract names among them."""
    before, mails, looks = inodes(os.getpid()), set(), []

    def look(run: RunStatus) -> None:
        if looks or run.global_steps < 20:
            return
        members = family()
        own = set().union(*map(inodes, members)) - before
        looks.append((len(members), reachable(own)))
        for name in looks[0][1]["unix"]:
            assert not name.startswith("@"), f"{name} is in the abstract namespace, which every user sees"
            folder = Path(name).parent.stat()
            assert stat.S_IMODE(folder.st_mode) == 0o700
            assert folder.st_uid == os.getuid()
            mails.add(Path(name).parent)

    train(SLEEPY.replace(algorithm=algorithm), tmp_path / "run", on_status=look)
    (members, found), (mail,) = looks[0], mails
    assert members >= 2 + SLEEPY.learners  # this process, the fork server, the learners
    assert {"supervisor", "0", "1", "2"} <= {Path(name).name for name in found["unix"]}
    assert all(ipaddress.ip_address(each).is_loopback for each in found["internet"])
    assert not mail.exists()  # nothing is left behind


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_speak_nor_listen() -> None:
    """In a process of that user: learner 0's socket, the name of learner 1, which has not come up, and the list."""
    mail = make_mail()
    with_zero = Post(mail, "0")

    def refused(what: str) -> bool:
        try:
            if what == "list":
                os.listdir(mail)
            elif what == "bind":
                Post(mail, "1")
            else:
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"{}", f"{mail}/0")
        except (PermissionError, ConfigError):
            return True
        return False

    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os._exit(0 if all(map(refused, ("list", "bind", "send"))) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert list(with_zero.receive()) == []
    with_zero.close()
    shutil.rmtree(mail)


def test_a_folder_that_cannot_hold_sockets_is_named(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    with pytest.raises(ConfigError, match=r"cannot hold sockets \(AF_UNIX path too long\); set TMPDIR"):
        Post(deep, "0")


# ---------------------------------------------------------------- SYNC's all-reduce


def test_an_all_reduce_gives_everybody_the_mean_to_the_bit(tmp_path: Path) -> None:
    """Models whose length is no multiple of K; several rounds, so that both vectors are used again."""
    world, length, rounds = 3, 1001, 5
    layout = Layout(length, torch.float32)
    descriptors = [layout.create(k) for k in range(world)]
    models = torch.randn(rounds, world, length, generator=torch.Generator().manual_seed(0))
    wanted = [((model[0] + model[1]) + model[2]) / world for model in models]
    found: dict[tuple[int, int], tuple[object, torch.Tensor]] = {}

    def member(k: int) -> None:
        assembly = Assembly(tmp_path, k, descriptors, layout, lambda: False)
        for number in range(rounds):
            state = models[number, k].clone()
            told = assembly.average(state, k * 10 + number, list)
            found[number, k] = told, state.clone()
        assembly.spread(state.fill_(k), source=1)
        found[rounds, k] = None, state
        assembly.close()

    threads = [threading.Thread(target=member, args=(k,)) for k in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(world):
        for number in range(rounds):
            told, state = found[number, k]
            assert told == [number, 10 + number, 20 + number]
            assert torch.equal(state, wanted[number])
        assert torch.equal(found[rounds, k][1], torch.ones(length))
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("learner", [0, 1])
def test_who_waits_for_a_lost_learner_is_told(learner: int, tmp_path: Path) -> None:
    layout, lost = Layout(4, torch.float32), threading.Event()
    descriptors = [layout.create(k) for k in range(2)]
    assembly = Assembly(tmp_path, learner, descriptors, layout, lost.is_set)
    timer = threading.Timer(0.1, lost.set)
    timer.start()
    with pytest.raises(StrandedError, match="another learner was lost"):
        assembly.average(torch.ones(4), None, list)
    timer.join()
    assembly.close()
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.processes
def test_sync_is_the_simulators_to_the_bit(tmp_path: Path) -> None:
    settings = SLEEPY.replace(algorithm="sync", speeds=Speeds())
    name = "learner-2/checkpoint.safetensors"
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    train(settings, real)
    simulate(settings, simulated)
    for part in ("weights", "optimizer.velocity"):
        pair = [Folder.open(folder).load_tensors(name)[0][part] for folder in (real, simulated)]
        assert torch.equal(*pair)
