"""`python -m reproduction`: the quick forms run, finished cells are only read, refusals are one line."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from adp2sgd.errors import ConfigError
from conftest import ROOT
from made_records import ENVIRONMENT, QUICK, chosen, reproduction
from reproduction import accounting, command, studies
from reproduction.cells import Choice, finished
from reproduction.studies import STUDIES


@pytest.mark.parametrize("name", list(STUDIES))
def test_the_quick_form_runs_and_a_second_call_only_prints(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command.reproduce(name, QUICK, out=tmp_path, quiet=True)
    first = capsys.readouterr().out
    assert "|" in first
    assert (tmp_path / f"{name}.md").is_file()
    records = finished(tmp_path, name)
    assert records
    assert all(record["device"] and record["versions"]["torch"] for record in records)
    if STUDIES[name].x:
        assert list((tmp_path / name).glob("*.png"))
        assert {record["cell"]["algorithm"] for record in records} == {"sync", "adpsgd"}
        assert all(len(record["curve"]["epoch"]) >= 5 for record in records)
        assert all(record["config"]["privacy"]["mode"] == "paper" for record in records)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr("reproduction.cells.measured", None)  # nothing may be measured again
    command.reproduce(name, QUICK, out=tmp_path, quiet=True)
    assert capsys.readouterr().out == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == stamps


def test_from_the_command_line(tmp_path: Path) -> None:
    arguments = ["case2", "--quick", "--epochs", "1", "--algorithm", "sync", "--out", str(tmp_path / "r")]
    rows = json.loads(reproduction(*arguments, "--json", cwd=tmp_path).stdout)
    assert [row["cell"]["variant"] for row in rows] == ["even", "slow"]
    assert rows[1]["virtual_seconds"] == pytest.approx(10 * rows[0]["virtual_seconds"])
    wrong = reproduction("table7", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "table7" in wrong.stderr
    assert "table1" in wrong.stderr


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_loses_nothing_and_says_how_to_go_on(tmp_path: Path, jobs: int) -> None:
    arguments = ["table1", "--quick", "--noise", "1", "--epochs", "40", "--jobs", str(jobs), "--out", "r"]
    child = subprocess.Popen(
        [sys.executable, "-m", "reproduction", *arguments],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = tmp_path / "r" / ".running" / "table1"
    deadline = time.monotonic() + 60
    while len(list(running.glob("*/run/learner-0/events.jsonl"))) < jobs and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    child.send_signal(signal.SIGINT)
    told = child.communicate(timeout=60)[1].strip().splitlines()
    assert child.returncode == 130
    assert told[-1].endswith("interrupted; nothing is lost: the same command goes on from here")
    assert len(list(running.glob("*/run/simulation.safetensors"))) == jobs
    assert not list((tmp_path / "r" / "table1").glob("*.json"))


@pytest.mark.parametrize(
    ("study", "asked", "words"),
    [
        ("table1", {"epochs": 0.0}, "--epochs 0: use a positive number"),
        ("table1", {"epochs": math.nan}, "--epochs nan"),
        ("table1", {"noise": (math.inf,)}, "--noise inf"),
        ("table1", {"noise": (1.0, -1.0)}, "--noise -1"),
        ("table1", {"seeds": (-1,)}, "--seed -1"),
        ("table1", {"momentum": 1.5}, "momentum = 1.5"),
        ("table1", {"device": "gpu"}, "gpu"),
        ("table1", {"models": ("lstm",)}, "--model lstm is unknown to table1; use one of: shufflenet"),
        ("speech", {"models": ("resnet18",)}, "--model resnet18 is unknown to speech; use one of: lstm, lstm_small"),
        ("table1", {"algorithms": ("fast",)}, "--algorithm fast is unknown"),
        ("theory", {"models": ("resnet18",)}, "theory has no --model"),
        ("privacy", {"private": True}, "privacy has no --private"),
        ("sizes", {"epochs": 3.0}, "sizes has no --epochs"),
        ("sizes", {"models": ("cnn",)}, "--model cnn is unknown to sizes"),
        ("table7", {}, "table7"),
    ],
)
def test_what_a_study_has_no_place_for_is_refused_before_anything_is_measured(
    study: str, asked: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        command.reproduce(study, Choice(**{"quick": True, "device": "cpu"} | asked), out=tmp_path / "r", quiet=True)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("table1 --epochs 0", "--epochs 0: use a positive number"),
        ("sizes --jobs 2", "--jobs 2 would spoil times"),
        ("theory --write-docs", "--write-docs is for the results in"),
    ],
)
def test_a_refusal_on_the_command_line_is_one_line(arguments: str, words: str, tmp_path: Path) -> None:
    asked = reproduction(*arguments.split(), "--quick", "--out", "r", cwd=tmp_path)
    assert asked.returncode == 2
    assert words in asked.stderr
    assert len(asked.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.json"))


def test_an_unusable_folder_or_cell_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*file cannot be a folder"):
        command.reproduce("table1", QUICK, out=tmp_path / "file")
    (tmp_path / "r" / "table1").mkdir(parents=True)
    for content in ("[]", "{}", '{"study"', "\xff"):
        (tmp_path / "r" / "table1" / "other.json").write_text(content, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"other\.json cannot be read"):
            command.reproduce("table1", QUICK, out=tmp_path / "r")
    assert not (tmp_path / "r" / ".running").exists()


@pytest.mark.parametrize(("module", "study"), [("matplotlib", "table1"), ("dp_accounting", "privacy")])
def test_a_library_that_is_not_installed_is_named_with_what_installs_it(
    module: str, study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`matplotlib` is an extra of the package; nothing is trained in vain."""
    monkeypatch.setattr(command, "find_spec", {"matplotlib": None}.get)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setattr(accounting, "TABLES", {"traps": accounting.TABLES["traps"]})
    with pytest.raises(ConfigError, match=rf"{module.replace('_', '-')}.*; run: pip install"):
        command.reproduce(study, Choice(device="cpu"), out=tmp_path / "r", quiet=True)
    assert not list(tmp_path.rglob("*.json"))


def test_the_commands_in_the_documents_exist() -> None:
    found = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "reproduction" / "README.md"]:
        for words in re.findall(r"python -m reproduction ([a-z0-9]+[^`#\n]*)", page.read_text("utf-8")):
            name, found = words.split()[0], found + 1
            studies.check(name, chosen(words.split()))
    assert found > 10
