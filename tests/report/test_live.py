"""The live page: the run as it goes on, for its owner alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from adp2sgd import simulate
from adp2sgd.config import Speeds
from adp2sgd.engine.status import RunStatus
from adp2sgd.report import logs as logs_module
from adp2sgd.report.live import Live, doorway
from adp2sgd.report.logs import StepLogs
from adp2sgd.report.page import update
from adp2sgd.report.read import read_run
from conftest import adp2sgd
from folders import SMALL, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("runs") / "first")


@contextmanager
def serving(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real server of its own process, and its address."""
    command = [sys.executable, "-m", "adp2sgd", "status", str(folder), "--serve", *more]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address, process.stderr.read() if process.stderr else ""
        yield process, address[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def get(address: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode(), {key.lower(): each for key, each in answer.headers.items()}
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), {}


def test_only_who_knows_the_address_sees_the_page(folder: Path) -> None:
    with serving(folder) as (process, address):
        status, text, headers = get(address)
        assert status == 200
        assert "live page" not in text
        assert "Four learners trained" in text
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        root, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+/)(.{40,})/", address).groups()  # type: ignore[union-attr]
        for wrong in ("", "x/", token[:-1] + "/", f"{token[:-1]}x/update", "update"):
            assert get(root + wrong)[0] == 404
        assert get(address, Host="attacker.example")[0] == 404  # a name that an attacker lets resolve to this machine
        listening = [each.laddr.ip for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
    assert process.returncode == 0
    rest = (process.stdout.read() if process.stdout else "") + (process.stderr.read() if process.stderr else "")
    assert token not in rest  # no log of requests


@pytest.mark.integration
def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    """A real run in a process of its own, with steps that take real time."""
    config = SMALL.replace(epochs=15, speeds=Speeds(kind="constant", step_s=0.02, pad=True))
    (tmp_path / "run.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "adp2sgd", "train", "run.toml", "--out", "run", "--quiet"]
    training = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        wait_for(tmp_path / "run/status.json")
        with serving(tmp_path / "run") as (_, address):
            news = follow(address)
    finally:
        training.wait(60)
    progress = [float(found[1]) for each in news if (found := re.search(r'aria-valuenow="(\d+)"', each["content"]))]
    assert progress == sorted(progress)
    assert len(set(progress)) > 2
    assert any("left" in each["content"] for each in news)
    assert [each["running"] for each in news] == [True] * (len(news) - 1) + [False]
    assert "trained a model" in news[-1]["content"]
    steps = [
        sum(row[1] for row in figure["rows"]) for each in news for figure in each["figures"] if "steps" in figure["id"]
    ]
    assert steps == sorted(steps)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


def follow(address: str) -> list[dict[str, Any]]:
    """What a page hears until the run has ended."""
    news = []
    while not news or news[-1]["running"]:
        status, text, _ = get(address + "update")
        assert status == 200
        news.append(json.loads(text, parse_constant=pytest.fail))
        time.sleep(0.5)
    return news


def test_many_pages_cost_no_more_than_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, looks = Live([folder]), []
    monkeypatch.setattr("adp2sgd.report.live.read_run", lambda *given: looks.append(given) or read_run(*given))
    for _ in range(5):
        live.update()
    assert len(looks) == 1


def test_a_second_look_reads_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    parse = logs_module.lines
    monkeypatch.setattr(logs_module, "lines", lambda text: parsed.append(len(text)) or parse(text))
    path, logs = tmp_path / "events.jsonl", StepLogs()
    row = '{"seconds": %d, "staleness": 1, "start": 0}\n'
    path.write_text(row % 1 + row % 2 + '{"seconds": 3, "stal')  # the last line is still being written
    assert logs.read(path).seconds.tolist() == [1, 2]
    path.write_text(row % 1 + row % 2 + row % 3)
    assert logs.read(path).seconds.tolist() == [1, 2, 3]
    assert parsed == [2 * len(row % 1), len(row % 1)]
    path.write_text(row % 7)  # resumed from a checkpoint before these steps
    assert logs.read(path).seconds.tolist() == [7]


def test_the_address_is_in_no_process_argument(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "get", lambda: SimpleNamespace(open=opened.append))
    with doorway(folder, "http://127.0.0.1:1/secret/") as found:
        assert found
        door = folder / "live.html"
        assert opened == [door.resolve().as_uri()]
        assert "url=http://127.0.0.1:1/secret/" in door.read_text()
        assert door.stat().st_mode & 0o777 == 0o600
    assert not door.exists()


def test_wrong_use_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = adp2sgd("status", str(folder), "--serve", "--port", str(taken.getsockname()[1]), cwd=tmp_path)
    nowhere = adp2sgd("status", "nowhere", "--serve", cwd=tmp_path)
    assert (busy.returncode, nowhere.returncode) == (2, 2)
    assert "cannot be used (Address already in use); choose another" in busy.stderr
    assert "nowhere holds no run" in nowhere.stderr


@pytest.mark.integration
def test_train_opens_the_page_and_takes_it_down(tmp_path: Path) -> None:
    """A browser of our own notes what it was told to open, and looks at it."""
    browser = tmp_path / "browser"
    browser.write_text(f"""#!{sys.executable}
import re, sys, urllib.request
door = open(sys.argv[1].removeprefix("file://")).read()
page = urllib.request.urlopen(re.search('href="([^"]+)', door)[1]).read()
open("{tmp_path}/told", "w").write(sys.argv[1] + f" {{len(page)}}")
""")
    browser.chmod(0o700)
    (tmp_path / "run.toml").write_text(SMALL.to_toml())
    command = [sys.executable, "-m", "adp2sgd", "train", "run.toml", "--out", "run", "--quiet", "--open"]
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told, size = (tmp_path / "told").read_text().split()
    assert told == (tmp_path / "run/live.html").resolve().as_uri()
    assert int(size) > 1_000_000
    assert not (tmp_path / "run/live.html").exists()


def test_a_status_of_every_moment_can_be_shown(tmp_path: Path) -> None:
    """Also before the first evaluation, and in private mode before anything is spent."""
    shown = []

    def look(status: RunStatus) -> None:
        if status.global_steps > 20 and status.global_steps % 20:
            return
        shown.append(update([read_run(tmp_path / "run")])["content"])

    simulate(SMALL.replace(epochs=2), tmp_path / "run", on_status=look)
    assert all("is running: epoch" in each for each in shown)
