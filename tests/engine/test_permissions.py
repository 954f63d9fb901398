"""Who may read a run's folder: figures that stay at a learner are for their owner alone, the rest follows the umask."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from adp2sgd.config import Config, Privacy
from adp2sgd.engine.processes.train import train
from adp2sgd.engine.simulation.simulate import simulate
from adp2sgd.files import replacing

PUBLIC = {"config.toml", "result.json", "model/weights.safetensors", "model/model.json"}
SETTINGS = Config(
    task="digits/logistic",
    learners=2,
    epochs=1,
    seed=1,
    device="cpu",
    checkpoint_every=0.25,
    evaluate_every=0.25,
    privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-5),
)


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


umasks = pytest.mark.parametrize("umask", [0o022, 0o000, 0o077], ids=oct, indirect=True)


def modes(folder: Path) -> dict[str, int]:
    """Of every file and folder of a run. A file that is about to get its name is left out."""
    found = {}
    for path in folder.rglob("[!.]*"):
        with suppress(FileNotFoundError):  # a run under way replaces files
            found[str(path.relative_to(folder))] = path.stat().st_mode & 0o777
    return found


def expected(names: Any, umask: int) -> dict[str, int]:
    found = {}
    for name in names:
        public = 0o666 & ~umask if name in PUBLIC else 0o600
        if name == "model":
            public = 0o777 & ~umask
        found[name] = 0o700 if name.startswith("learner-") and "/" not in name else public
    return found


def check(run: Callable[..., Any], folder: Path, umask: int, also: set[str]) -> None:
    during: dict[str, int] = {}
    run(SETTINGS, folder, on_status=lambda _: during.update(modes(folder)))
    after = modes(folder)
    own = {f"learner-{k}/{name}" for k in range(2) for name in ("events.jsonl", "ledger.jsonl", "plan.json")}
    kept = {f"learner-{k}/checkpoint.safetensors" for k in range(2)}
    assert after.keys() >= PUBLIC | own | kept
    assert during.keys() | after.keys() >= also
    assert after == expected(after, umask)
    assert during == expected(during, umask)


@umasks
def test_files_of_a_simulation(tmp_path: Path, umask: int) -> None:
    check(simulate, tmp_path / "run", umask, {"simulation.safetensors"})


@pytest.mark.processes
@pytest.mark.parametrize("umask", [0o022], ids=oct, indirect=True)
def test_files_of_real_learners(tmp_path: Path, umask: int) -> None:
    check(train, tmp_path / "run", umask, {"session.json", "events.jsonl"})


@umasks
@pytest.mark.parametrize("private", [True, False])
def test_a_replaced_file_has_the_mode_that_it_should_have_whatever_it_had(
    private: bool, umask: int, tmp_path: Path
) -> None:
    target = tmp_path / "file"
    target.write_text("before")
    target.chmod(0o640)
    with replacing(target, private=private) as part:
        part.write_text("after")
        part.chmod(0o600 if not private else 0o644)  # as some writers do
    assert target.stat().st_mode & 0o777 == (0o600 if private else 0o666 & ~umask)
