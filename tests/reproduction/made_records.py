"""Cells and records that the tests make by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from conftest import ROOT
from reproduction import paper
from reproduction.__main__ import app
from reproduction.cells import Cell, Choice

QUICK = Choice(quick=True, device="cpu")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def reproduction(*arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The study's command line in a real process."""
    command = [sys.executable, "-m", "reproduction", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
    )


def chosen(words: list[str]) -> Choice:
    """What the command line would make of these words."""
    parsed = typer.main.get_command(app).make_context("reproduction", words).params
    names = {"models": "model", "algorithms": "algorithm", "seeds": "seed"}
    given = {each.name: parsed[names.get(each.name, each.name)] for each in fields(Choice)}
    return Choice(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def times_called(scratch: Path, quiet: bool) -> dict[str, Any]:
    """A measure that shows in a file beside the results how often it ran."""
    count = scratch.parents[2] / "count"
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    return {"value": 1.5}


def a_cell(name: str) -> Cell:
    return Cell(study="study", identity={"name": name, "sigma": 2.0}, measure=times_called)


def resnet_row(sync: list[float], asynchronous: list[float]) -> list[dict[str, Any]]:
    rows = []
    for algorithm, accuracies in zip(paper.ALGORITHMS, (sync, asynchronous), strict=True):
        for sigma, accuracy in zip(paper.NOISE["cifar10"], accuracies, strict=True):
            record = slow_record(algorithm, "", [1.0], [accuracy / 100])
            record["cell"] |= {"sigma": sigma, "engine": ""}
            rows.append(record)
    return rows


def slow_record(algorithm: str, variant: str, seconds: list[float], accuracy: list[float]) -> dict[str, Any]:
    """ResNet-18 with 16 learners, 30 rounds of SYNC, and batches so large that no run of the paper's saw more."""
    cell = {"form": "", "model": "resnet18", "algorithm": algorithm, "sigma": 2.0, "variant": variant}
    curve = {"seconds": seconds, "accuracy": accuracy, "loss": accuracy}
    speeds = {"kind": "one-slow", "factor": 10.0, "step_s": 1.0, "learner": 0}
    return {
        "study": "case2", "name": f"{algorithm}-{variant}", "cell": {**cell, "engine": "processes", "epochs": 300.0,
        "seed": 0}, "config": {"learners": 16, "speeds": speeds, "batch_size": 200_000}, "curve": curve,
        "real_seconds": seconds[-1],
        "accuracy": accuracy[-1], "global_steps": 480, "steps": [3, *[32] * 14, 29],
    }  # fmt: skip


def other(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The record of another cell: `changes` of its identity, and of `accuracy` and `diverged`."""
    figures = {key: changes.pop(key) for key in ("accuracy", "loss", "diverged") if key in changes}
    return {**record, "cell": record["cell"] | changes, **figures}
