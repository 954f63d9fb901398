"""Real learner processes that are killed, stopped, starved of disk and interrupted. Their steps sleep, so two cores do.

Rates are compared within a run: the others' steps per second before and after the fault, from their own records.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import faults as vocabulary
from adp2sgd.config import Config, Optimizer, Privacy, Speeds
from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine.processes.train import train
from adp2sgd.errors import InterruptedRunError, RunError
from adp2sgd.privacy import ledger
from adp2sgd.run_folder import Folder, Point, Run
from conftest import ROOT
from faults import Draws, Faults, alive, learner_processes

pytestmark = pytest.mark.processes

FALL = 0.95  # of the rate before the fault; steps sleep, so that two cores suffice
SLEEPY = Config(
    task="faults:counted_blobs",
    learners=4,
    epochs=10,
    batch_size=5,
    seed=1,
    device="cpu",
    checkpoint_every=1,
    optimizer=Optimizer(lr=0.1, momentum=0.5),
    privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-4, headroom=3.0),
    speeds=Speeds(step_s=0.05, pad=True),
)


@pytest.fixture(autouse=True)
def draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Draws]:
    monkeypatch.setenv(vocabulary.DRAWS, str(tmp_path / "draws"))
    with closing(Draws(tmp_path / "draws")) as counter:
        yield counter


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Whatever a test does, no process and no shared memory outlives it."""
    before = learner_processes()
    yield
    deadline = time.monotonic() + 5
    while learner_processes() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not learner_processes() - before


def steps(folder: Path, learner: int) -> list[float]:
    """When each step ended, in seconds of the run."""
    return [event["seconds"] for event in events(folder, learner)]


def events(folder: Path, learner: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"learner-{learner}/events.jsonl").read_text().splitlines()]


def rate(times: list[float], start: float, end: float) -> float:
    """Steps per second among those that ended in a window, by the time between the first and the last."""
    inside = [t for t in times if start <= t <= end]
    return (len(inside) - 1) / (inside[-1] - inside[0])


class SlowedError(AssertionError):
    """The fault slowed a learner; or a neighbour on this machine did."""


def twice_if_slowed(test: Callable[[Path, Draws], None]) -> Callable[[Path, Draws], None]:
    """The test once more where it only found a learner slowed: other programs use these cores as well, now and then."""

    @wraps(test)
    def tried(tmp_path: Path, draws: Draws) -> None:
        try:
            test(tmp_path, draws)
        except SlowedError:
            draws.forget()
            (tmp_path / "again").mkdir()
            test(tmp_path / "again", draws)

    return tried


def behind(folder: Path, learner: int) -> float:
    """By how many seconds a restarted learner's events are early, beside others' at the same global step; median."""
    others = {e["global_step"]: e["seconds"] for k in range(4) if k != learner for e in events(folder, k)}
    back = {e["global_step"]: e["seconds"] for e in events(folder, learner) if e["start"]}
    return statistics.median(others[step] - seconds for step, seconds in back.items() if step in others)


def assert_others_went_on(folder: Path, at: list[float], victims: set[int], learners: int = 4) -> None:
    for learner in set(range(learners)) - victims:
        times = steps(folder, learner)
        before, after = rate(times, 0.3, min(at)), rate(times, min(at), times[-1])
        if after < FALL * before:
            raise SlowedError(f"learner {learner}: {before:.2f} steps/s before, {after:.2f} after")


def assert_ledgers_cover(draws: Draws, folder: Path, learners: int = 4) -> None:
    counted = sum(
        sum(n for _, n in ledger.read(folder / f"learner-{k}/ledger.jsonl").spent().parts) for k in range(learners)
    )
    assert counted >= draws.count() > 0


@twice_if_slowed
def test_a_killed_learner_slows_nobody_and_comes_back(tmp_path: Path, draws: Draws) -> None:
    faults = Faults().kill(learner=2, at_step=60)
    run = train(SLEEPY, tmp_path / "run", on_status=faults)
    assert faults.fired == 1
    assert not alive(faults.pids[0])
    assert run.learners[2].restarts == 1
    assert run.learners[2].state == "ended"
    assert any("learner 2 was restarted" in note and "SIGKILL" in note for note in run.notes)
    assert not any("own checkpoint" in note for note in run.notes)  # a neighbour gave it a model
    assert run.global_steps >= 800
    assert run.overshoot <= 8
    assert {event["start"] for event in events(tmp_path / "run", 2)} == {0, 1}
    assert abs(behind(tmp_path / "run", 2)) < 0.2  # one clock for all
    assert_others_went_on(tmp_path / "run", faults.times, {2})
    assert_ledgers_cover(draws, tmp_path / "run")
    assert sum(point.seconds > faults.times[0] for point in run.curve[:-1]) >= 2


@twice_if_slowed
def test_all_but_one_are_killed_at_random_moments(tmp_path: Path, draws: Draws) -> None:
    faults, draw = Faults(), random.Random(5)
    for learner in (0, 1, 3):
        faults.kill(learner=learner, at_step=draw.randint(60, 90))
    run = train(SLEEPY, tmp_path / "run", on_status=faults)
    assert faults.fired == 3
    assert [each.restarts for each in run.learners] == [1, 1, 0, 1]
    assert run.global_steps >= 800
    assert_others_went_on(tmp_path / "run", faults.times, {0, 1, 3})
    assert_ledgers_cover(draws, tmp_path / "run")


@twice_if_slowed
def test_a_stopped_learner_is_replaced_and_does_not_draw_when_it_wakes(tmp_path: Path, draws: Draws) -> None:
    faults = Faults().stop(learner=1, at_step=60, seconds=10.0)
    run = train(SLEEPY.replace(epochs=16), tmp_path / "run", on_status=faults)
    assert faults.fired == 1
    assert not alive(faults.pids[0])
    assert any("learner 1 did not report for 5 s and was killed" in note for note in run.notes)
    assert run.learners[1].restarts == 1
    silent = [point for point in run.curve if faults.times[0] < point.seconds < faults.times[0] + 5]
    assert any(point.learners == 3 for point in silent)  # θ of those that answered
    assert_others_went_on(tmp_path / "run", faults.times, {1})
    assert_ledgers_cover(draws, tmp_path / "run")


@twice_if_slowed
def test_a_full_disk_stops_the_learners_training_but_not_the_run(tmp_path: Path, draws: Draws) -> None:
    faults = Faults().fill_disk(learner=3, at_step=40)
    run = train(SLEEPY, tmp_path / "run", on_status=faults)
    assert faults.fired == 1
    assert any("learner 3" in note and "ledger" in note and "File too large" in note for note in run.notes)
    assert any("learner 3" in note and "checkpoints cannot be written" in note for note in run.notes)
    assert run.learners[3].steps < 100  # no noise without a ledger
    assert run.learners[3].state == "ended"  # it went on averaging
    assert run.learners[3].exchanges > run.learners[3].steps
    assert run.global_steps >= 800
    assert_others_went_on(tmp_path / "run", faults.times, {3})
    assert_ledgers_cover(draws, tmp_path / "run")


# ---------------------------------------------------------------- ends


def interrupted(settings: Config, folder: Path, at_step: int = 20) -> Faults:
    faults = Faults().interrupt(learner=0, at_step=at_step)
    with pytest.raises(InterruptedRunError, match="--resume"):
        train(settings, folder, on_status=faults)
    assert faults.fired == 1
    return faults


def curve(folder: Path) -> list[Point]:
    return [Point(**json.loads(line)) for line in (folder / "events.jsonl").read_text().splitlines()]


def assert_grows(points: Sequence[Point]) -> None:
    for earlier, later in itertools.pairwise(points):
        assert earlier.global_steps < later.global_steps
        assert earlier.seconds < later.seconds


SHORT = SLEEPY.replace(
    epochs=3, learners=3, speeds=Speeds(step_s=0.02, pad=True), privacy=Privacy(), checkpoint_every=0.2
)


@pytest.mark.parametrize("algorithm", ["adpsgd", "sync"])
def test_an_interrupted_run_goes_on(algorithm: str, tmp_path: Path) -> None:
    settings = SHORT.replace(algorithm=algorithm, evaluate_every=0.2)
    interrupted(settings, tmp_path / "run", at_step=40)
    assert not (tmp_path / "run/result.json").exists()
    before = curve(tmp_path / "run")
    assert before
    run = train(settings, tmp_path / "run", resume=True)
    assert run.curve[: len(before)] == tuple(before)
    assert len(run.curve) > len(before) + 1
    assert_grows(run.curve)
    assert run.global_steps >= 240
    assert run.overshoot <= 6
    recorded = [len(steps(tmp_path / "run", k)) for k in range(3)]
    assert recorded == [each.steps for each in run.learners]
    assert run.notes == ()


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    interrupted(SHORT, tmp_path / "run", at_step=40)
    newest = tmp_path / "run/learner-1/checkpoint.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1  # one bit of a weight: the file still looks whole
    newest.write_bytes(content)
    (tmp_path / "run/learner-2/checkpoint.safetensors").write_bytes(b"nothing")
    (tmp_path / "run/learner-2/checkpoint.previous.safetensors").unlink()
    run = train(SHORT, tmp_path / "run", resume=True)
    told = "\n".join(run.notes)
    assert "learner-1/checkpoint.safetensors is damaged (a checksum differs)" in told
    assert "learner 2 found no checkpoint of its own and begins with the initial model" in told
    assert run.global_steps >= 240


def test_sync_goes_on_from_checkpoints_of_different_rounds(tmp_path: Path) -> None:
    """One learner has lost its checkpoint, and so counts fewer steps: all must still end after the same round."""
    settings = SHORT.replace(algorithm="sync")
    interrupted(settings, tmp_path / "run", at_step=40)
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        (tmp_path / "run/learner-1" / name).unlink(missing_ok=True)
    run = train(settings, tmp_path / "run", resume=True)
    assert run.global_steps >= 240
    assert run.overshoot <= 6
    assert run.consensus < 1e-12
    assert [each.state for each in run.learners] == ["ended"] * 3
    assert any("learner 1 found no checkpoint of its own and takes the newest" in note for note in run.notes)


def test_a_lost_learner_ends_a_sync_run_with_one_clear_error(tmp_path: Path) -> None:
    settings = SHORT.replace(algorithm="sync", checkpoint_every=100.0)  # none but those at the end
    faults = Faults().kill(learner=1, at_step=20)
    with pytest.raises(RunError, match=r"learner 1 was lost after \d+ steps \(killed by SIGKILL.*SYNC cannot go on"):
        train(settings, tmp_path / "run", on_status=faults)
    assert faults.fired == 1
    kept = [learner_checkpoint.load(Folder.open(tmp_path / "run"), k) for k in range(3)]
    assert kept[0] is not None
    assert kept[2] is not None
    assert torch.equal(kept[0].state, kept[2].state)
    rounds = {count.steps for count in kept[0].counts.values()}
    assert min(rounds) == max(rounds) >= 20
    train(settings.replace(epochs=3 * max(rounds) / 80), tmp_path / "whole")  # that many rounds, undisturbed
    whole = learner_checkpoint.load(Folder.open(tmp_path / "whole"), 0)
    assert whole is not None
    assert {count.steps for count in whole.counts.values()} == rounds
    for name, tensor in whole.tensors.items():
        assert torch.allclose(tensor, kept[0].tensors[name]), name
    run = train(settings, tmp_path / "run", resume=True)
    assert (run.global_steps, run.overshoot) == (240, 0)  # rounds that the loss undid count once
    assert [each.steps for each in run.learners] == [80] * 3
    assert_grows(run.curve)
    recorded = [len(steps(tmp_path / "run", k)) for k in range(3)]
    assert max(recorded) <= 81  # the survivors' model was kept: no round but the last is taken again


def only_learner_2_has_a_model(settings: Config, folder: Path) -> None:
    """All weights 0.25, after some rounds; the others' checkpoints are lost."""
    interrupted(settings, folder, at_step=20)
    home = Folder.open(folder)
    saved = learner_checkpoint.load(home, 2)
    assert saved is not None
    for path in folder.glob("learner-*/checkpoint*"):
        path.unlink()
    tensors = {**saved.tensors, "weights": torch.full_like(saved.tensors["weights"], 0.25)}
    facts = {**saved.facts, "checksums": learner_checkpoint._checksums(tensors)}
    home.save_tensors("learner-2/checkpoint.safetensors", tensors, facts)


def test_sync_goes_on_from_the_newest_model_alone(tmp_path: Path) -> None:
    """Not from a mean with the initial one of learners that have none; nor does such a one take the newest's place
    where its learner is lost before the others have it."""
    settings = SHORT.replace(algorithm="sync", optimizer=SHORT.optimizer.replace(lr=1e-9))
    only_learner_2_has_a_model(settings, tmp_path / "run")

    def kill(run: Any) -> None:
        seat = run.learners[2]
        if seat.pid and seat.state not in ("starting", "restarting", "ready"):
            with suppress(ProcessLookupError):
                os.kill(seat.pid, signal.SIGKILL)

    with pytest.raises(RunError, match="learner 2 was lost"):
        train(settings, tmp_path / "run", resume=True, on_status=kill)
    train(settings, tmp_path / "run", resume=True)
    end = load_file(tmp_path / "run/model/weights.safetensors")
    assert all(torch.allclose(each, torch.tensor(0.25), atol=1e-3) for each in end.values())


def command(folder: Path, settings: Config, **options: Any) -> subprocess.Popen[str]:
    (folder / "run.toml").write_text(settings.to_toml())
    line = [sys.executable, "-m", "adp2sgd", "train", "run.toml", "--out", "run", "--trust", settings.task]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    return subprocess.Popen(
        line,
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_while_learners_start_is_one_line(tmp_path: Path) -> None:
    """A terminal sends it to the whole group: to the process that learners come from, too, which still imports."""
    process = command(tmp_path, SHORT, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: bool(children.read_text()), process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("adp2sgd: error: interrupted")


@pytest.mark.parametrize("end", ["once", "twice", "kill", "group"])
def test_ends_of_the_command(end: str, tmp_path: Path, draws: Draws, scratch: Path) -> None:
    """Ctrl-C ends cleanly, a second one at once, kill -9 of the supervisor leaves nobody behind (see the fixture); so
    does the SIGTERM that schedulers send to the whole group."""
    slow = SHORT.replace(speeds=Speeds(step_s=30.0 if end == "twice" else 0.05, pad=True), checkpoint_every=0.1)
    slow = slow.replace(evaluate_every=0.2)
    process = command(tmp_path, slow, start_new_session=True)
    checkpoint = tmp_path / "run/learner-1/checkpoint.safetensors"
    points = tmp_path / "run/events.jsonl"
    wait_for(lambda: draws.count() > 0 and (end == "twice" or (checkpoint.exists() and points.exists())), process)
    if end == "group":
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGKILL if end == "kill" else signal.SIGINT)
    if end == "twice":
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if end == "kill" else 130)
    assert not (tmp_path / "run/result.json").exists()
    if end in {"once", "group"}:
        assert "interrupted" in complaint
        assert "--resume run" in complaint
        assert "Traceback" not in complaint
    if end == "kill":
        before = curve(tmp_path / "run")
        with points.open("a") as file:
            file.write('{"global_steps": 7')  # cut short
        settings = Folder.open(tmp_path / "run").settings.replace(task="faults:counted_blobs")
        run = train(settings, tmp_path / "run", resume=True)
        assert run.global_steps >= 240
        assert run.curve[: len(before)] == tuple(before)
        assert_grows(run.curve)
    wait_until(lambda: not [path for path in scratch.iterdir() if path.name.startswith("adp2sgd")])


def test_learners_end_a_run_by_themselves_while_nobody_supervises(tmp_path: Path) -> None:
    """The supervisor is stopped in the middle; the learners reach the count, end, and leave their models to it."""
    settings = SHORT.replace(epochs=4)
    (tmp_path / "run.toml").write_text(settings.to_toml())
    command = ["train", "run.toml", "--trust", settings.task, "--out", "run", "--json"]
    before = learner_processes()
    process = subprocess.Popen(
        [sys.executable, "-m", "adp2sgd", *command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    events = [tmp_path / f"run/learner-{k}/events.jsonl" for k in range(settings.learners)]
    wait_until(lambda: all(path.exists() and path.read_text().count("\n") > 5 for path in events))
    os.kill(process.pid, signal.SIGSTOP)
    try:
        # The stopped supervisor and the fork server are left; every learner has ended.
        wait_until(lambda: len(learner_processes() - before) <= 2)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    run = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 0
    assert run["global_steps"] >= 4 * 400 / settings.batch_size
    assert [each["state"] for each in run["learners"]] == ["ended"] * settings.learners
    assert not any("restarted" in note for note in run["notes"])


FORKS = """
import os, signal
from dataclasses import replace
from faults import Task, counted_blobs

def forks(path: str) -> Task:
    blobs = counted_blobs()

    def model():
        if os.fork() == 0:
            with open(path, "a") as file:
                file.write("ends\\n" if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else "stays\\n")
            os._exit(0)
        return blobs.model()

    return replace(blobs, model=model)
"""


def test_what_a_learner_forks_ends_on_sigterm(tmp_path: Path, draws: Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forking.py").write_text(FORKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = SHORT.replace(task="forking:forks", options={"path": str(tmp_path / "told")}, epochs=0.2)
    train(settings, tmp_path / "run")
    told = (tmp_path / "told").read_text().split()
    assert set(told) == {"ends"}
    assert len(told) >= 4  # here, and at each of three learners


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files of a run go, here and in processes that are started."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return path


def leftovers(folder: Path) -> set[str]:
    """What a run leaves on disk, beside its record."""
    known = {
        "config.toml",
        "result.json",
        "weights.safetensors",
        "model.json",
        "graph.json",
        "status.json",
        "events.jsonl",
        "checkpoint.safetensors",
        "checkpoint.previous.safetensors",
    }
    return {path.name for path in folder.rglob("*") if path.is_file()} - known


def cycles(number: int, folder: Path) -> None:
    tiny = SHORT.replace(learners=2, epochs=0.2, speeds=Speeds(step_s=0.001, pad=True))
    gc.collect()  # what earlier tests left open in this process
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    for cycle in range(number):
        run: Run = train(tiny, folder / f"run-{cycle}")
        assert run.global_steps >= 16
        assert not leftovers(folder / f"run-{cycle}")
    assert set(os.listdir("/dev/shm")) <= before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_5_cycles_leave_nothing_behind(tmp_path: Path, scratch: Path) -> None:
    cycles(5, tmp_path)
    assert not list(scratch.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_cycles_leave_nothing_behind(tmp_path: Path, scratch: Path) -> None:
    cycles(200, tmp_path)
    assert not list(scratch.iterdir())


def test_a_learner_that_keeps_dying_is_given_up_and_named(tmp_path: Path) -> None:
    faults = Faults()
    for death in range(7):
        faults.kill(learner=1, at_step=5 + death)
    run = train(SHORT.replace(epochs=8), tmp_path / "run", on_status=faults)
    assert run.learners[1].state == "lost"
    assert any("learner 1 was lost" in note for note in run.notes)
    assert run.global_steps >= 640
    assert Folder.open(tmp_path / "run").settings.learners == 3


@pytest.mark.parametrize("algorithm", ["sync", "adpsgd"])
def test_a_last_checkpoint_may_take_long(algorithm: str, tmp_path: Path) -> None:
    settings = Config(task="faults:slow_disk", algorithm=algorithm, learners=2, epochs=0.5, device="cpu")
    run = train(settings.replace(checkpoint_every=0), tmp_path / "run")
    assert [learner.restarts for learner in run.learners] == [0, 0]
    assert not [note for note in run.notes if "killed" in note or "lost" in note]
