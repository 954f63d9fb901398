"""From data of one's own to a configuration, without editing but for what only a person knows."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from adp2sgd.config import load_config
from command import Command
from data_files import pixels, write_image

ANSWERS = {
    "classes": '["no", "yes"]',
    "age": "[0, 100]",
    "pressure": "[5, 25]",
    "smoker": '["seldom", "past", "now"]',
    "seen": '["1980-01-01", "2030-01-01"]',
}
SECRETS = ("seldom", "past", "P0", "1987-", "97,5", "17,5", "north", "south")


def write_patients(path: Path, records: int = 320, encoding: str = "cp1252") -> Path:
    """A table as a German Excel writes it; the last column says whether a patient is ill."""
    stream = np.random.default_rng(0)
    lines = ["patient_id;age;pressure;smoker;seen;ländle;ill"]
    for number in range(records):
        age, pressure = int(stream.integers(20, 90)), int(stream.integers(90, 190))
        smoker, site = stream.choice(["seldom", "past", "now"]), stream.choice(["north", "south"], p=[0.6, 0.4])
        ill = age / 20 + pressure / 40 + 2 * (smoker == "now") + stream.normal() > 7
        comma = f"{pressure / 10:.1f}".replace(".", ",")
        lines.append(f"P{number:03};{age};{comma};{smoker};1987-0{1 + number % 9}-01;{site};{'yes' if ill else 'no'}")
    path.write_text("\n".join(lines), encoding=encoding)
    return path


def fill_in(path: Path) -> None:
    """What a person would edit."""
    text = path.read_text()
    for key, value in ANSWERS.items():
        text = re.sub(rf"^{key} = \[\]", f"{key} = {value}", text, flags=re.MULTILINE)
    path.write_text(text)


def test_from_a_table_to_a_private_result(command: Command, tmp_path: Path) -> None:
    write_patients(tmp_path / "patients.csv")
    code, out, complaint = command("init", "patients.csv", "--label", "ill", "--site", "ländle")
    assert (code, complaint) == (0, "")
    written = (tmp_path / "patients.toml").read_text()
    for secret in SECRETS:
        assert secret not in out
        assert secret not in written
    config = load_config(tmp_path / "patients.toml")
    assert (config.learners, config.privacy.mode, config.data.partition) == (2, "private", "site")
    assert config.options["ignore"] == ["patient_id"]
    assert (config.options["encoding"], config.options["decimal"]) == ("cp1252", ",")
    assert list(config.options["ranges"]) == ["age", "pressure", "seen"]
    for name in ("options.classes", "options.ranges.seen", "options.categories.smoker"):
        assert name in out
    code, _, complaint = command("simulate", "patients.toml", "--quiet")
    assert (code, len(complaint.splitlines())) == (2, 1)
    assert all(f"'{name}'" in complaint for name in ("age", "pressure", "seen", "smoker", "ill"))
    fill_in(tmp_path / "patients.toml")
    result = command.json("simulate", "patients.toml", "--quiet")
    assert result["guarantee"]["epsilon"] <= 3.0
    assert result["metrics"]["accuracy"] > 0.7
    assert set(result["sites"]) == {"north", "south"}


def test_a_configuration_with_open_fields_runs_without_privacy(command: Command, tmp_path: Path) -> None:
    write_patients(tmp_path / "patients.csv")
    assert command("init", "patients.csv", "--label", "pressure", "--out", "cost.toml")[0] == 0
    config = load_config(tmp_path / "cost.toml")
    assert config.options["target"] == "number"
    assert config.options["ranges"]["pressure"] == []
    settings = ("--set", "privacy.mode=none", "--set", "epochs=2", "--set", 'options.ignore=["patient_id","ill"]')
    code, out, complaint = command("simulate", "cost.toml", *settings, "--quiet")
    assert code == 0, complaint
    assert "drops privacy.epsilon, privacy.delta" in complaint
    assert "loss" in out


def test_a_terminal_is_asked_for_what_only_a_person_knows(tmp_path: Path) -> None:
    write_patients(tmp_path / "patients.csv")
    replies = [
        ("predict?", "il"),  # no column: asked again
        ("did you mean", "ill"),
        ("owns a record?", "ländle"),
        ("Classes of ill", "no, yes"),
        ("age: smallest", "0 hundred"),
        ("no two numbers", "0 100"),
        ("pressure: smallest", "5 25"),
        ("seen: smallest", "-"),
        ("smoker: its categories", "seldom, past, now"),
    ]
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "adp2sgd", "init", "patients.csv"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, cwd=tmp_path, env=environment
    ) as process:
        os.close(theirs)
        guard = threading.Timer(100, process.kill)
        guard.start()
        shown = ""
        for question, reply in replies:
            seen = len(shown)
            while question not in shown[seen:]:
                shown += os.read(ours, 1000).decode()
            os.write(ours, f"{reply}\n".encode())
        with suppress(OSError):
            while part := os.read(ours, 1000):
                shown += part.decode()
        out = process.communicate()[0].decode()
        guard.cancel()
    os.close(ours)
    assert process.returncode == 0, shown
    assert "fill in" not in out
    options = load_config(tmp_path / "patients.toml").options
    assert options["classes"] == ["no", "yes"]
    assert options["ranges"] == {"age": [0, 100], "pressure": [5, 25]}
    assert options["categories"] == {"smoker": ["seldom", "past", "now"]}
    assert options["ignore"] == ["patient_id", "seen"]
    asked = re.sub("seldom, past, now", "", shown)
    assert not any(secret in asked for secret in SECRETS)


@pytest.mark.parametrize("sites", [False, True])
def test_a_folder_of_images_tells_classes_and_sites(sites: bool, command: Command, tmp_path: Path) -> None:
    for number in range(40):
        site = ("east", "west")[number % 2] if sites else ""
        path = tmp_path / "scans" / site / ("ill", "well")[number // 2 % 2] / f"{number}.png"
        write_image(path, pixels(number))
    assert command("init", "scans")[0] == 0
    config = load_config(tmp_path / "scans.toml")
    assert config.options["classes"] == ["ill", "well"]
    assert config.learners == (2 if sites else 1)
    assert config.options.get("sites", False) == sites
    code, _, complaint = command("check", "scans.toml")
    assert (code, complaint) == (0, "")


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("71.5,HIV,1\n40,mild,0\n", ["--label", "ill"], "field 1 of the first line looks like a record's"),
        ("mild,HIV,yes\nmild,none,no\n", ["--label", "ill"], "field 1 of the first line looks like a record's"),
        ("age,ill\n40,1\n", ["--label", "il"], '(did you mean "ill"?)'),
        ("age,ill\n40,1\n", [], "--label"),
        ("age,ill\n40,1\n", ["--label", "ill", "--site", "clinic"], "--site clinic"),
        ("age,ill\n40,1\n", ["--label", "ill", "--target", "both"], "class or number"),
        ("age,ill\n40,1\n", ["--label", "ill", "--out", "t.csv"], "t.csv exists already"),
    ],
)
def test_what_init_refuses(text: str, arguments: list[str], words: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    code, out, complaint = command("init", "t.csv", *arguments)
    assert (code, out, len(complaint.splitlines())) == (2, "", 1)
    assert words in complaint
    assert "HIV" not in complaint
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]
