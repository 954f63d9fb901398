"""The ledger: real processes, real kill -9, real full disks, and every byte of the file damaged once."""

import errno
import hashlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from adp2sgd.config import Config, Privacy
from adp2sgd.data.records import Records
from adp2sgd.engine.setup import Setup, prepare
from adp2sgd.errors import LedgerError
from adp2sgd.privacy import ledger as ledger_module
from adp2sgd.privacy.ledger import WIDTH, Ledger, read
from adp2sgd.privacy.mechanism import SampledGaussian
from adp2sgd.privacy.spent import spent_in
from adp2sgd.task import Task, cross_entropy

STEP = SampledGaussian(2.0, 0.08192)
WEAKER = SampledGaussian(1.0, 0.08192)
BLOCK = 8
NAMES = {"dataset": "sha256:5eed", "site": "north"}

CHILD = """
import sys
from adp2sgd.privacy.ledger import Ledger
from adp2sgd.privacy.mechanism import SampledGaussian
from adp2sgd.randomness.noise import NoiseSource

ledger = Ledger.open(sys.argv[1], dataset="sha256:5eed", site="north", block=8)
noise = NoiseSource.fresh()
ledger.reserve(8, SampledGaussian(2.0, 0.08192))
for _ in range(3):
    ledger.draw()
    print(noise.normal(1).item(), flush=True)
print("holding", flush=True)
sys.stdin.read()
for _ in range(5):
    ledger.draw()
ledger.reserve(8, SampledGaussian(2.0, 0.08192))
"""


def opened(path: Path, **changes) -> Ledger:
    return Ledger.open(path, **{**NAMES, "block": BLOCK, **changes})


def counted(path: Path) -> dict[SampledGaussian, int]:
    return dict(read(path).spent().parts)


def holder(path: Path) -> tuple[subprocess.Popen[str], list[str]]:
    """A process that has drawn 3 of 8 reserved steps and holds the ledger until its input ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    draws = []
    while (line := child.stdout.readline().strip()) != "holding":
        assert line, child.communicate()[1]
        draws.append(line)
    return child, draws


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def used(path):
    """A ledger with one clean start that drew 5 steps of each of two mechanisms."""
    with opened(path) as ledger:
        for mechanism in (STEP, WEAKER):
            ledger.reserve(5, mechanism)
            for _ in range(5):
                ledger.draw()
    return path


def test_steps_compose_over_runs_and_mechanisms(used):
    with opened(used) as ledger:
        ledger.reserve(3, STEP)
        ledger.draw()
        assert dict(ledger.spent().parts) == {STEP: 8, WEAKER: 5}
    assert counted(used) == {STEP: 6, WEAKER: 5}
    assert all(json.loads(line) for line in used.read_text().splitlines())


def test_a_block_is_on_disk_before_its_first_draw(path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (sync(fd), synced.append(os.fstat(fd).st_size)))
    with opened(path) as ledger:
        assert synced[-1] == path.stat().st_size
        ledger.reserve(BLOCK, STEP)
        assert synced[-2:] == [path.stat().st_size - WIDTH, path.stat().st_size]  # mechanism, then block
        assert counted(path) == {STEP: BLOCK}


def test_draws_need_a_reservation(path):
    with opened(path) as ledger:
        with pytest.raises(LedgerError, match="reserve a block"):
            ledger.draw()
        ledger.reserve(1, STEP)
        with pytest.raises(LedgerError, match="draw them first"):
            ledger.reserve(1, STEP)
        ledger.draw()
        for steps in (0, -1, BLOCK + 1):
            with pytest.raises(LedgerError, match=f"use 1 to {BLOCK}"):
                ledger.reserve(steps, STEP)
    with pytest.raises(LedgerError, match="closed"):
        ledger.reserve(1, STEP)


def test_kill_in_the_middle_of_a_block_counts_all_of_it_and_noise_never_repeats(path):
    draws = []
    for start in (1, 2):
        child, new = holder(path)
        draws += new
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert counted(path) == {STEP: 8 * start}
    assert len(set(draws)) == 6
    with opened(path) as ledger:  # nothing stale is left of the lock
        assert ledger.token == 3


def test_a_second_process_is_refused_with_the_pid_of_the_first(path):
    child, _ = holder(path)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=f"in use by process {child.pid} on ") as refusal:
        opened(path)
    assert "\n" not in str(refusal.value)
    assert path.read_bytes() == before
    child.communicate("")
    assert child.returncode == 0
    assert counted(path) == {STEP: 16}


def test_the_same_process_cannot_open_it_twice(path):
    with opened(path), pytest.raises(LedgerError, match=f"in use by process {os.getpid()}"):
        opened(path)


def test_a_woken_process_that_lost_its_lock_cannot_draw_or_write(path, monkeypatch):
    child, _ = holder(path)
    child.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(ledger_module, "_lock", lambda *_: None)  # a file system whose locks end at the host
    with opened(path) as ledger:
        assert ledger.token == 2
        assert dict(ledger.spent().parts) == {STEP: 8}
    after = path.read_bytes()
    child.send_signal(signal.SIGCONT)
    error = child.communicate("")[1]
    assert child.returncode == 1
    assert f"changed hands (process {os.getpid()} on " in error
    assert path.read_bytes() == after


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_ledger_that_is_removed_or_replaced_stops_its_holder(path, change):
    ledger = opened(path)
    ledger.reserve(2, STEP)
    ledger.draw()
    copy = path.read_bytes()
    path.unlink()
    if change == "replaced":
        path.write_bytes(copy)
    with pytest.raises(LedgerError, match="changed hands"):
        ledger.draw()
    ledger.close()
    assert not path.exists() or path.read_bytes() == copy


def test_a_forked_child_cannot_draw_and_does_not_keep_the_lock(path):
    ledger = opened(path)
    ledger.reserve(2, STEP)
    ready, tell = os.pipe()
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ledger.draw()
        except LedgerError:
            os.close(start)
            os.write(tell, b"!")
            os.read(end, 1)  # outlive the parent's ledger
            os._exit(7)
        os._exit(1)
    os.close(tell)
    assert os.read(ready, 1) == b"!"
    ledger.draw()
    ledger.close()
    with opened(path):  # while the child lives
        pass
    for descriptor in (start, end, ready):
        os.close(descriptor)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert counted(path) == {STEP: 1}


@pytest.mark.parametrize("left", [1, 30, 100, WIDTH - 1])
def test_a_torn_last_line_counts_as_a_whole_block_for_ever(path, left):
    with opened(path) as ledger:
        ledger.reserve(2, STEP)
        ledger.draw()
        ledger.draw()
    os.truncate(path, path.stat().st_size - WIDTH + left)
    assert counted(path) == {STEP: BLOCK}
    for _ in range(2):
        with opened(path) as ledger:
            assert dict(ledger.spent().parts) == {STEP: BLOCK}
    assert '"torn":8' in path.read_text()


def test_a_torn_line_before_any_mechanism_counts_nothing_since_nothing_was_drawn(path):
    opened(path).close()
    os.truncate(path, path.stat().st_size - 3)
    with opened(path) as ledger:
        assert ledger.spent().parts == ()
        assert ledger.token == 2  # never that of the damaged line again


def test_every_flipped_byte_is_noticed_and_never_lowers_the_count(used):
    sound, before = used.read_bytes(), counted(used)
    last = len(sound) - WIDTH
    header = sound.index(b"\n") + 1
    for position in range(0, len(sound), 3):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << (position % 8)
        used.write_bytes(damaged)
        if position >= last:
            assert counted(used) == before | {WEAKER: BLOCK}
            continue
        line = 1 if position < header else 2 + (position - header) // WIDTH
        with pytest.raises(LedgerError, match=f"{used} is damaged at line {line}; restore the copy"):
            read(used)
    used.write_bytes(sound)
    assert counted(used) == before


def test_lost_swapped_or_wiped_lines_are_damage_and_not_a_fresh_start(used):
    sound = used.read_bytes()
    header, *lines = sound.splitlines(keepends=True)
    wiped = sound[: -2 * WIDTH] + bytes(2 * WIDTH)
    swapped = b"".join([header, lines[1], lines[0], *lines[2:]])
    lost = b"".join([header, *lines[:2], *lines[3:]])
    for damaged in (header + b"".join(lines[1:]), lost, swapped, wiped, b"", header[:-1], header[:20], b"\n" + sound):
        used.write_bytes(damaged)
        with pytest.raises(LedgerError, match="is damaged at line"):
            opened(used)
        assert used.read_bytes() == damaged


@pytest.mark.parametrize(("changes", "told"), [({"dataset": "sha256:0"}, "data set"), ({"site": "south"}, "site")])
def test_the_ledger_of_another_data_set_or_site_is_refused(used, changes, told):
    before = used.read_bytes()
    with pytest.raises(LedgerError, match=f"is for {told} .* give each its own"):
        opened(used, **changes)
    assert used.read_bytes() == before
    opened(used).close()  # and the lock is free


def test_an_unknown_version_or_folder_is_refused(path, tmp_path):
    path.write_bytes(ledger_module._encode({"ledger": 3, **NAMES, "block": 8}, "", 0))
    with pytest.raises(LedgerError, match="version 3"):
        opened(path)
    with pytest.raises(LedgerError, match="No such file or directory"):
        opened(tmp_path / "missing" / "ledger.jsonl")
    with pytest.raises(LedgerError, match="at least 1"):
        opened(tmp_path / "other.jsonl", block=0)


def make(kind: str, path: Path) -> None:
    if kind == "named pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["named pipe", "folder", "socket", "device", "loop"])
def test_what_is_no_regular_file_is_refused_at_once(kind, path):
    make(kind, path)
    told = "Too many levels of symbolic links" if kind == "loop" else f"is a {kind}, not a regular file; name a file"
    for use in (opened, read, Ledger.closed):
        with pytest.raises(LedgerError, match=told) as refusal:
            use(path)
        assert "\n" not in str(refusal.value)


@pytest.mark.timeout(60)
def test_a_named_pipe_among_ledgers_does_not_hang_the_statement(used):
    os.mkfifo(used.with_name("pipe.jsonl"))
    with pytest.raises(LedgerError, match=r"pipe.jsonl is a named pipe"):
        spent_in(used.parent, 1e-5)


def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    ("flock", "why"), [(no_locks, "No locks available"), (lambda *_: None, "a second lock was granted")]
)
def test_a_file_system_without_locks_is_refused_before_anything_is_written(used, new, flock, why, monkeypatch):
    """As some network file systems: locks fail, or are granted to everybody."""
    path = used.with_name("new.jsonl") if new else used
    before = {each.name: each.read_bytes() for each in used.parent.iterdir()}
    monkeypatch.setattr("fcntl.flock", flock)
    told = rf"{path.parent} is on a file system without working locks \({why}\).*keep the ledger on a local disk"
    with pytest.raises(LedgerError, match=told) as refusal:
        opened(path)
    assert "\n" not in str(refusal.value)
    assert {each.name: each.read_bytes() for each in used.parent.iterdir()} == before


def test_the_block_is_that_of_the_file(used):
    with opened(used, block=1000) as ledger:
        assert ledger.block == BLOCK


@pytest.mark.parametrize("room", [0, 1, 100, WIDTH - 1])
def test_a_full_disk_reserves_nothing_and_leaves_the_file_sound(used, room):
    before = counted(used)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(used) as ledger:
        sound = used.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(sound) + room, limits[1]))  # writes then fail, partly or at once
        try:
            with pytest.raises(LedgerError, match=r"cannot be written \(File too large\); free disk space"):
                ledger.reserve(3, WEAKER)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(LedgerError, match="no reserved step"):
            ledger.draw()
        assert used.read_bytes() == sound
        ledger.reserve(3, WEAKER)  # space was freed
        ledger.draw()
    assert counted(used) == before | {WEAKER: 6}


def test_a_full_disk_while_a_torn_line_is_mended_still_counts_it(used):
    os.truncate(used, used.stat().st_size - WIDTH + 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (used.stat().st_size + 50, limits[1]))
    try:
        with pytest.raises(LedgerError, match="free disk space"):
            opened(used)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert counted(used) == {STEP: 5, WEAKER: BLOCK}
    with opened(used) as ledger:
        assert dict(ledger.spent().parts) == {STEP: 5, WEAKER: BLOCK}


def test_a_return_that_cannot_be_written_only_counts_too_much(used):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ledger = opened(used)
    ledger.reserve(4, STEP)
    resource.setrlimit(resource.RLIMIT_FSIZE, (used.stat().st_size + 9, limits[1]))
    try:
        ledger.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert counted(used) == {STEP: 9, WEAKER: 5}
    opened(used).close()


def test_a_failed_write_never_cuts_off_what_a_successor_wrote(used, monkeypatch):
    def write(descriptor, line):
        used.write_bytes(used.read_bytes() + b"successor")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger = opened(used)
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(LedgerError, match="No space left on device"):
        ledger.reserve(3, WEAKER)
    assert used.read_bytes().endswith(b"successor")
    ledger.close()


ACTION = st.one_of(
    st.tuples(st.just("reserve"), st.integers(1, BLOCK), st.sampled_from([STEP, WEAKER])),
    st.tuples(st.just("draw"), st.integers(1, BLOCK), st.none()),
    st.tuples(st.sampled_from(["kill", "close", "tear"]), st.integers(1, WIDTH - 1), st.none()),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTION, max_size=25))
def test_counted_steps_are_never_below_drawn_ones_nor_more_than_a_block_per_start_above(tmp_path, monkeypatch, actions):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # speed; nothing here cuts the power
    path = tmp_path / f"{os.urandom(8).hex()}.jsonl"
    ledger, drawn, starts = opened(path), 0, 1
    for kind, number, mechanism in actions:
        if kind == "reserve":
            if not ledger.remaining:
                ledger.reserve(number, mechanism)
        elif kind == "draw":
            for _ in range(min(number, ledger.remaining)):
                ledger.draw()
                drawn += 1
        else:
            if kind == "close":
                ledger.close()
            else:
                ledger._forget()  # what the kernel does on kill -9
            if kind == "tear":
                os.truncate(path, path.stat().st_size - number)
            ledger, starts = opened(path), starts + 1
        total = sum(steps for _, steps in ledger.spent().parts)
        assert drawn <= total <= drawn + BLOCK * starts
        assert sum(counted(path).values()) == total
    ledger.close()


# ---------------------------------------------------------------- kills of a whole learner


def without_signal() -> Task:
    """Every record's gradient is zero, so that what a learner releases is its noise alone."""
    blank = Records(torch.zeros(400, 4), torch.zeros(400, dtype=torch.int64))
    return Task(model=lambda: nn.Linear(4, 2, bias=False), train=blank, test=blank, loss=cross_entropy)


def live(setup: Setup, folder: Path, log: int) -> None:
    """A learner that trains until it is killed, and tells after each step what noise it has drawn."""
    learner = setup.learner(0, folder)
    while True:
        learner.begin()
        noise = learner.gradient().vector
        os.write(log, hashlib.sha256(noise.numpy().tobytes()).digest())


def killed(setup: Setup, folder: Path, log: int, *, after_s: float, training: bool) -> None:
    """One life of a learner, in a process of its own that is killed `after_s` seconds after its birth, or once it is
    `training` after its first step."""
    before = os.fstat(log).st_size
    child = os.fork()
    if child == 0:
        try:
            live(setup, folder, log)
        finally:
            os._exit(1)
    while training and os.fstat(log).st_size == before:
        time.sleep(0.001)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("kills", [40, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_kills_at_random_instants_never_hide_a_step_nor_repeat_noise(kills, tmp_path):
    settings = Config(
        task=f"{__name__}:without_signal",
        learners=1,
        epochs=1e6,
        batch_size=20,
        device="cpu",
        privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-4),
    )
    setup, instants = prepare(settings), random.Random(7)
    assert setup.compute.clipper  # settled before the first birth, as by the process that learners come from
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for life in range(kills):
        killed(setup, tmp_path, log, after_s=instants.uniform(0, 0.05), training=life % 4 > 0)
    os.close(log)
    content = (tmp_path / "log").read_bytes()
    drawn = [content[at : at + 32] for at in range(0, len(content), 32)]
    assert len(set(drawn)) == len(drawn) >= kills
    counted_steps = sum(counted(tmp_path / "ledger.jsonl").values())
    assert len(drawn) <= counted_steps <= len(drawn) + 33 * kills  # a block for each life, and a step not told of
