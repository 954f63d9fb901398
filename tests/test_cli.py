"""The command line in real processes: figures, errors in one line, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import adp2sgd


def test_topology_prints_its_figures(tmp_path: Path) -> None:
    done = adp2sgd("topology", "ring", "--learners", "16", "--json", cwd=tmp_path)
    figures = json.loads(done.stdout)
    assert figures["rho"] == pytest.approx(0.9952424583617858, abs=1e-12)
    assert figures["degree"] == 2
    assert figures["connected"] is True
    assert figures["rho_bar"] > 1e5
    other = adp2sgd("topology", "ring", "--learners", "16", "--partner", "sender-receiver", "--json", cwd=tmp_path)
    assert json.loads(other.stdout)["rho"] == pytest.approx(1 - 1 / 16, abs=1e-12)
    assert "rho" in adp2sgd("topology", "torus", cwd=tmp_path).stdout


def test_simulate_prints_the_result_and_keeps_the_record(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('task = "blobs"\nlearners = 3\nepochs = 1\nseed = 1\n')
    done = adp2sgd("simulate", "run.toml", "--set", "batch_size=50", "--out", "here", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads((tmp_path / "here/result.json").read_text())
    assert printed["clock"] == "virtual"
    assert {"accuracy", "seconds", "global_steps", "consensus", "learners"} <= set(printed)
    assert {"steps", "share", "staleness_mean", "exchanges"} <= set(printed["learners"][0])
    assert printed["guarantee"] == "none"
    assert "batch_size = 50" in (tmp_path / "here/config.toml").read_text()
    shown = adp2sgd("simulate", "run.toml", cwd=tmp_path)
    assert "guarantee: none" in shown.stdout
    assert "accuracy" in shown.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "nowhere.toml"], "nowhere.toml"),
        (["simulate", "--set", "learners=0"], "learners = 0"),
        (["simulate", "--set", "task=digits/vgg"], "digits/vgg"),
        (["simulate", "--set", "task=bogus"], "bogus"),
        (["simulate", "--set", "task=no.such:thing"], "no.such"),
        (["simulate", "--set", "task=os:no_such"], "no_such"),
        (["simulate", "--set", "options.depth=3"], "depth"),
        (["simulate", "--set", "device=gpu9"], "gpu9"),
        (["simulate", "--set", "data.partition=site"], "site"),
        (["simulate", "--set", "learners=100000"], "100000"),
        (["simulate", "--resume", "nowhere"], "nowhere"),
        (["simulate", "--set", "topology.graph=mesh"], "mesh"),
        (["topology", "mesh"], "mesh"),
        (["topology", "ring", "--learners", "0"], "learners = 0"),
        (["topology", "ring", "--learners", "many"], "many"),
        (["nothing"], "nothing"),
        (["simulate", "--nothing"], "--nothing"),
        (["--data-dir", "nowhere", "models", "extra"], "extra"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = adp2sgd(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("adp2sgd: error: ")
    assert words in lines[0]
    assert not done.stdout


@pytest.mark.parametrize("verb", ["simulate", "topology", "models", "demo", "privacy"])
def test_help_has_an_example(verb: str, tmp_path: Path) -> None:
    done = adp2sgd(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Example: adp2sgd" in done.stdout


def test_version(tmp_path: Path) -> None:
    assert adp2sgd("--version", cwd=tmp_path).stdout.startswith("adp2sgd 0.1")


def test_the_demo_ends_in_a_table(tmp_path: Path) -> None:
    done = adp2sgd("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SYNC" in done.stdout
    assert "8.9×" in done.stdout
    assert not list(tmp_path.iterdir())
