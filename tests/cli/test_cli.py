"""The command line: figures, errors in one line, exit codes. A few calls are real processes."""

from __future__ import annotations

import json
import math
import os
import platform
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from adp2sgd.cli import main as cli
from adp2sgd.cli import view
from command import Command
from conftest import adp2sgd


def test_topology_prints_its_figures(command: Command) -> None:
    figures = command.json("topology", "ring", "--learners", "16")
    assert figures["rho"] == pytest.approx(1 - (1 - math.cos(math.pi / 8)) / 16, abs=1e-12)
    assert figures["degree"] == 2
    assert figures["connected"] is True
    assert figures["rho_bar"] > 1e5
    other = command.json("topology", "ring", "--learners", "16", "--partner", "sender-receiver")
    assert other["rho"] == pytest.approx(1 - 1 / 16, abs=1e-12)
    assert "rho" in command("topology", "torus")[1]


def test_simulate_prints_the_result_and_keeps_the_record(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('task = "blobs"\nlearners = 3\nepochs = 1\nseed = 1\n')
    done = adp2sgd("simulate", "run.toml", "--set", "batch_size=50", "--out", "here", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads((tmp_path / "here/result.json").read_text())
    assert printed["clock"] == "virtual"
    assert {"metrics", "seconds", "global_steps", "consensus", "learners"} <= set(printed)
    assert {"steps", "share", "staleness_mean", "exchanges"} <= set(printed["learners"][0])
    assert printed["guarantee"] is None
    assert "batch_size = 50" in (tmp_path / "here/config.toml").read_text()
    shown = adp2sgd("simulate", "run.toml", cwd=tmp_path)
    assert "guarantee: none" in shown.stdout
    assert "accuracy" in shown.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("simulate nowhere.toml", "nowhere.toml"),
        ("simulate --set learners=0", "learners = 0"),
        ("simulate --set task=digits/vgg", "digits/vgg"),
        ("simulate --set task=bogus", "bogus"),
        ("simulate --set task=no.such:thing", "no"),
        ("simulate --set task=os:no_such", "no_such"),
        ("simulate --set task=math:pi", "is a float"),
        ("simulate --out . --set learners=2", "--out '.'"),
        ("simulate --set task=table --set options.path=nowhere --set options.label=y", "nowhere does not exist"),
        ("simulate --set options.depth=3", "depth"),
        ("simulate --set device=gpu9", "gpu9"),
        ("simulate --set data.partition=site", "site"),
        ("simulate --set learners=100000", "100000"),
        ("simulate --resume nowhere", "nowhere"),
        ("simulate --set topology.graph=mesh", "mesh"),
        ("simulate --set seed=18446744073709551616", "seed = 18446744073709551616"),
        ("simulate --set optimizer.lr=1e300", "optimizer.lr = 1e+300"),
        ("simulate --set optimizer.weight_decay=inf", "optimizer.weight_decay = inf"),
        ("simulate --set optimizer.schedule=[[0,inf]]", "optimizer.schedule"),
        ("simulate --set optimizer.warmup.from=inf", "optimizer.warmup.from = inf"),
        ("simulate --set speeds.kind=log-normal --set speeds.spread=1000", "speeds.spread = 1000"),
        ("simulate --set learners=2 --set data.sizes=[inf,1]", "data.sizes"),
        ("simulate --set data.partition=dirichlet --set data.alpha=inf", "data.alpha = inf"),
        ("simulate --set privacy.mode=private --set privacy.delta=1e-5 --set privacy.epsilon=1e-300", "1e-300"),
        ("simulate --set privacy.mode=private --set privacy.delta=1e-5 --set privacy.noise_multiplier=1e-9", "1e-09"),
        ("simulate --set device=meta", "meta"),
        ("simulate --set task=:f", ":f"),
        ("simulate --set task=.x:f", ".x:f"),
        ("simulate --set task=blobs --set options.records=-5", "blobs"),
        ("simulate --set task=quadratic --set options.dimension=-1", "quadratic"),
        ("simulate --set learners=1000000000000", "learners = 1000000000000"),
        ("train --set learners=300", "learners = 300"),
        ("topology mesh", "mesh"),
        ("topology ring --learners 0", "learners = 0"),
        ("topology ring --learners many", "--learners"),
        ("privacy epsilon", "--sample-rate"),
        ("privacy epsilon --sample-rate 2 --noise-multiplier 1 --steps 1 --delta 1e-5", "sample_rate = 2"),
        ("privacy epsilon --sample-rate 1 --noise-multiplier 0 --steps 1 --delta 1e-5", "noise_multiplier = 0"),
        ("privacy epsilon --sample-rate 1 --noise-multiplier 1 --steps 1 --delta 2", "delta = 2"),
        ("privacy noise --sample-rate 1 --epsilon 0 --steps 1 --delta 1e-5", "epsilon = 0"),
        (
            "privacy theorem --epsilon 9 --delta 1e-5 --learners 0 --smallest-shard 3125 --steps 58594 --batch-size 9",
            "learners = 0",
        ),
        (
            "privacy theorem --epsilon 9 --delta 1e-5 --learners 4 --smallest-shard 99 --steps 9 --batch-size 9 "
            "--lipschitz 0",
            "lipschitz = 0.0",
        ),
        (
            "privacy theorem --epsilon 9 --delta 1e-5 --learners 4 --smallest-shard 99 --steps 58594 --batch-size 256",
            "batch_size = 256 of 99",
        ),
        ("nothing", "nothing"),
        ("simulate --nothing", "--nothing"),
        ("models extra", "extra"),
        ("simulate --set options.hidden=[100000000,100000000]", "does not fit into memory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(line: str, words: str, command: Command, tmp_path: Path) -> None:
    code, out, complaint = command(*line.split())
    assert code == 2
    assert complaint.startswith("adp2sgd: error: ")
    assert len(complaint.strip().splitlines()) == 1, complaint
    assert words in complaint
    assert not out
    assert not [path for path in tmp_path.rglob("*") if path.name != "__pycache__"]


def test_a_real_process_exits_with_2(tmp_path: Path) -> None:
    done = adp2sgd("simulate", "--set", "learners=0", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_every_verb_has_help_with_an_example(command: Command) -> None:
    from typer.main import get_command

    verbs = list(get_command(cli.app).commands)  # type: ignore[attr-defined]
    assert len(verbs) >= 6
    for verb in [*([each] for each in verbs), ["privacy", "noise"], ["privacy", "theorem"]]:
        code, out, _ = command(*verb, "--help")
        assert code == 0
        assert "Example: adp2sgd" in out, verb


def test_privacy_figures(command: Command) -> None:
    rate = ("--sample-rate", ".08192", "--delta", "1e-5")
    spent = command.json("privacy", "epsilon", *rate, "--noise-multiplier", "2", "--steps", "3662")
    assert spent["epsilon"] == pytest.approx(14.2603, rel=0.002)
    assert 14.1 < spent["epsilon_lower"] < 14.2603
    told = command("privacy", "epsilon", *rate, "--noise-multiplier", "2", "--steps", "3662")[1]
    assert "The true ε is at least 14.2" in told
    noise = command.json("privacy", "noise", *rate, "--epsilon", "8", "--steps", "3662")
    assert noise["noise_multiplier"] == pytest.approx(3.0740, rel=0.002)
    steps = command.json("privacy", "steps", *rate, "--epsilon", "8", "--noise-multiplier", "2")
    assert steps["steps"] == 1412


def test_privacy_theorem(command: Command) -> None:
    line = (
        "privacy theorem --delta 1e-5 --learners 16 --smallest-shard 3125 --steps 58594 --batch-size 256 --lipschitz 1"
    )
    theorem: Callable[..., Any] = lambda *more: command.json(*line.split(), *more)  # noqa: E731
    holds = theorem("--epsilon", "9", "--mu", "0.2")
    assert holds["sigma"] == pytest.approx(0.02602, abs=5e-6)
    assert holds["alpha"] == pytest.approx(2.599, abs=5e-4)
    assert holds["alpha_bound"] == pytest.approx(2.782, abs=5e-4)
    assert holds["conditions_hold"] is True
    assert holds["neighbour_epsilon"]["noise_on_sum"] > 1e5
    fails = theorem("--epsilon", "1", "--mu", "0.5")
    assert fails["conditions_hold"] is False
    assert fails["failed"] == ["second"]
    assert fails["epsilon"] is None


def test_models_and_explain(command: Command) -> None:
    sizes = {each["name"]: each["parameters"] for each in command.json("models")}
    assert sizes["resnet18"] == 11_173_962
    rules = command.json("explain", "--set", "task=digits/cnn")
    assert {"layer", "parameters", "rule", "why"} == set(rules[0])


def test_what_was_spent(command: Command) -> None:
    private = ["privacy.mode=private", "privacy.noise_multiplier=2", "privacy.delta=1e-4", "epochs=0.2", "seed=1"]
    settings = [part for each in private for part in ("--set", each)]
    assert command("simulate", *settings, "--out", "run", "--quiet")[0] == 0
    rows = command.json("privacy", "spent", "run")
    assert [row["ledger"] for row in rows][:2] == ["run/learner-0/ledger.jsonl", "run/learner-1/ledger.jsonl"]
    assert rows[0]["epsilon"] > 0
    told = command("privacy", "spent", "run")[1]
    assert f"{rows[0]['epsilon']:.4g}" in told
    assert "note: the run is seeded" in told
    [row] = command.json("privacy", "spent", "run/learner-0/ledger.jsonl")  # the ledger's policy knows δ
    assert (row["epsilon"], row["delta"], row["composition"]) == (rows[0]["epsilon"], 1e-4, "pld")


def test_version(command: Command) -> None:
    import torch

    own, python, torch_line, cuda = command("--version")[1].splitlines()
    assert own.startswith("adp2sgd 0.1")
    assert python.startswith(f"Python {platform.python_version()}")
    assert torch_line == f"torch {torch.__version__}"
    assert cuda.startswith(f"CUDA {torch.version.cuda or 'none'}")


def test_help_is_whole_sentences_and_short_options_work(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ([], ["privacy"]):
        code, out, _ = command(*group, "-h")
        listed = out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
        assert code == 0
        assert len(listed) >= 5
        assert all(line.endswith(".") and not line.endswith("...") for line in listed), listed
    assert command("simulate", "-h")[1] == command("simulate", "--help")[1]


def test_the_shell_completes_commands_and_fields(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        words = {"_ADP2SGD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        command = [sys.executable, "-m", "adp2sgd"]
        done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=False)
        return done.stdout.split()

    assert completed("adp2sgd si") == ["simulate"]
    assert completed("adp2sgd simulate --set privacy.ep") == ["privacy.epsilon="]


def test_a_misspelt_command_is_met_with_the_right_one(command: Command) -> None:
    code, _, complaint = command("simulat")
    assert (code, "Did you mean 'simulate'?" in complaint) == (2, True)


def test_the_demo_ends_in_a_table(tmp_path: Path) -> None:
    done = adp2sgd("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SYNC" in done.stdout
    assert "8.9×" in done.stdout
    rows = {line[:21].strip(): line.split()[-6] for line in done.stdout.splitlines() if "×  " in line}
    assert rows == {
        "SYNC": "95.8%",
        "ADPSGD": "96.7%",
        "ADPSGD, 4 learners": "98.1%",
        "A(DP)²SGD, 4 learners": "91.6%",
    }
    assert "A(DP)²SGD" in done.stdout
    assert "not this run" in done.stdout
    assert not list(tmp_path.iterdir())


def test_names_with_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    view.table("sites", ["site", "steps"], [("west [/x]", "1"), ("north [old]", "2")])
    shown = capsys.readouterr().out
    assert "west [/x]" in shown
    assert "north [old]" in shown


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "adp2sgd", "simulate", "--set", "epochs=.1", "--json", "--quiet"]
    runs = [subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {json.loads(run.communicate()[0])["folder"] for run in runs}
    assert len(folders) == len(list((tmp_path / "runs").iterdir())) == 3


@pytest.mark.parametrize(
    ("command", "sign"),
    [
        ("models", "building the models"),
        ("topology ring", "eigenvalues of 8 learners"),
        ("topology none", "unknown"),
        ("simulate --set epochs=1 --json", "preparing data, model and checks"),
        ("simulate --set task=none", "preparing data, model and checks"),
        ("train --set learners=1 --set epochs=0.1 --json", "preparing data, model and checks"),
    ],
)
def test_a_terminal_shows_that_something_is_under_way(command: str, sign: str, tmp_path: Path) -> None:
    """And takes it back before the answer, or the error, of which standard output holds nothing else."""
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "adp2sgd", *command.split()]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}, cwd=tmp_path
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the terminal is gone when the last program that writes to it is
            while part := os.read(ours, 1000):
                shown += part
        answer = process.communicate()[0].decode()
    os.close(ours)
    assert sign in " ".join(shown.decode().split())
    assert shown.rpartition(b"\x1b[2K")[2].count(b"\n") == (process.returncode == 2)  # erased, but for an error's line
    assert "eigenvalues" not in answer


def test_an_output_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "adp2sgd", "topology", "ring", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["adp2sgd: error: cannot write to standard output (No space left on device)"]


def test_a_terminal_without_greek_letters_is_no_reason_to_fail() -> None:
    command = [sys.executable, "-m", "adp2sgd", "privacy", "epsilon", "--sample-rate", ".01", "--steps", "9"]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    command += ["--noise-multiplier", "1", "--delta", "1e-5"]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\u03b5 = ")


def test_ctrl_c_before_a_run_begins_says_so(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "adp2sgd", "simulate", "--set", "epochs=10000"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text():
        time.sleep(0.01)
    for _ in range(5):  # one that falls into certain lines of an import is lost in Python
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(2)
            break
    told = child.communicate(timeout=60)[1].strip().splitlines()
    assert child.returncode == 130
    assert told[-1].startswith("adp2sgd: error: interrupted")


def test_a_closed_output_is_no_failure() -> None:
    command = f"{sys.executable} -m adp2sgd topology ring --json >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
