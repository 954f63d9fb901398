"""`adp2sgd doctor` tries what runs need, and says what to do."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adp2sgd import doctor
from adp2sgd.doctor import BAD, GOOD, WARNING, Finding, examine
from conftest import adp2sgd


def found(name: str, folder: Path) -> Finding:
    return next(each for each in examine(folder) if each.name == name)


def test_a_machine_that_runs_the_tests_is_well(tmp_path: Path) -> None:
    done = adp2sgd("doctor", "--json", "--folder", str(tmp_path / "runs"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    told = {each["name"]: each["state"] for each in json.loads(done.stdout)}
    assert {"Python", "packages", "PyTorch", "cores", "disk", "file locks", "shared memory", "open files"} <= set(told)
    assert BAD not in told.values()
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_locks_that_exclude_nobody_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    finding = found("file locks", tmp_path)
    assert (finding.state, finding.found) == (BAD, "a second lock was granted")
    assert "two processes could spend one budget" in finding.fix


def test_a_full_or_slow_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLOW_SYNC_S", -1.0)
    assert "local disk" in found("disk", tmp_path).fix
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert found("disk", tmp_path).fix == "make room, or choose another --out"


def test_a_gpu_that_torch_does_not_reach_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else which(name))
    monkeypatch.setattr(torch.version, "cuda", None)
    finding = found("GPU", tmp_path)
    assert (finding.state, finding.fix) == (WARNING, "install a build of PyTorch for CUDA")


def test_a_check_that_fails_is_a_finding_and_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = found("shared memory", tmp_path)
    assert finding.state == BAD
    assert "Operation not permitted" in finding.found
    assert found("Python", tmp_path).state == GOOD
