"""A finished run continues for more epochs; a new one begins with the model of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adp2sgd.config import Config, Data, Optimizer, Privacy
from adp2sgd.engine import simulate, train
from adp2sgd.engine.setup import prepare
from adp2sgd.errors import ConfigError, RunError
from adp2sgd.run_folder import Folder, read_result
from conftest import adp2sgd

SHORT = Config(task="digits/mlp", learners=2, epochs=2, seed=0, device="cpu", optimizer=Optimizer(lr=0.2, momentum=0.5))


@pytest.mark.parametrize("algorithm", ["sync", "adpsgd"])
def test_a_finished_simulation_is_extended(algorithm: str, tmp_path: Path) -> None:
    """SYNC with equal speeds: as a run that was longer from the beginning, to the bit."""
    short, longer = SHORT.replace(algorithm=algorithm), SHORT.replace(algorithm=algorithm, epochs=4)
    before = simulate(short, tmp_path / "run")
    run = simulate(longer, tmp_path / "run", resume=True)
    whole = simulate(longer, tmp_path / "whole")
    assert run.global_steps == whole.global_steps > before.global_steps
    assert run.epochs == pytest.approx(4, abs=0.1)
    assert run.seconds == pytest.approx(whole.seconds)
    assert [each.steps for each in run.learners] == [each.steps for each in whole.learners]
    assert run.curve[: len(before.curve)] == before.curve
    assert Folder.open(tmp_path / "run").settings.epochs == 4
    assert read_result(tmp_path / "run", "result.before.json") == before
    assert (run.loss or 1) < (before.loss or 0)
    if algorithm == "sync":
        models = [load_file(tmp_path / name / "model/weights.safetensors") for name in ("run", "whole")]
        assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


def test_an_extension_that_dies_at_once_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(SHORT, tmp_path / "run")

    def die(status: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(SHORT.replace(epochs=3), tmp_path / "run", resume=True, on_status=die)
    assert not (tmp_path / "run/result.json").exists()
    assert simulate(SHORT.replace(epochs=3), tmp_path / "run", resume=True).epochs == pytest.approx(3, abs=0.1)


@pytest.mark.processes
def test_a_finished_run_of_processes_is_extended(tmp_path: Path) -> None:
    settings = SHORT.replace(seed=None)
    before = train(settings, tmp_path / "run")
    run = train(settings.replace(epochs=4), tmp_path / "run", resume=True)
    assert run.global_steps > 1.8 * before.global_steps
    assert run.seconds > before.seconds
    assert sum(each.steps for each in run.learners) == run.global_steps
    assert not any("no checkpoint" in note for note in run.notes)


def test_the_command_extends(tmp_path: Path) -> None:
    simulate(SHORT.replace(epochs=1), tmp_path / "run")
    done = adp2sgd("simulate", "--resume", "run", "--set", "epochs=2", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_result(tmp_path / "run").epochs == pytest.approx(2, abs=0.1)
    done = adp2sgd("simulate", "--resume", "run", "--set", "learners=3", cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert "finished run" in done.stderr or "learners = 3" in done.stderr


def test_what_cannot_be_extended_is_refused_and_stays(tmp_path: Path) -> None:
    simulate(SHORT, tmp_path / "run")
    with pytest.raises(RunError, match="finished"):
        simulate(SHORT, tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="batch_size = 8, but"):
        simulate(SHORT.replace(epochs=3, batch_size=8), tmp_path / "run", resume=True)
    private = SHORT.replace(privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-4), epochs=1)
    simulate(private, tmp_path / "private")
    with pytest.raises(ConfigError, match="init_from"):
        simulate(private.replace(epochs=2), tmp_path / "private", resume=True)
    for name, kept in (("run", 2), ("private", 1)):
        assert Folder.open(tmp_path / name).settings.epochs == kept
        assert read_result(tmp_path / name).folder


@pytest.mark.parametrize("engine", [simulate, pytest.param(train, marks=pytest.mark.processes)])
def test_a_run_begins_with_another_ones_model(engine: Any, tmp_path: Path) -> None:
    first = simulate(SHORT.replace(epochs=5), tmp_path / "first")
    for source in (tmp_path / "first", tmp_path / "first/model/weights.safetensors"):
        model = prepare(SHORT.replace(init_from=str(source))).compute.model
        kept = load_file(tmp_path / "first/model/weights.safetensors")
        assert all(torch.equal(kept[name], tensor) for name, tensor in model.module.state_dict().items())
    still = SHORT.replace(epochs=0.5, init_from=str(tmp_path / "first"), optimizer=Optimizer(lr=1e-9))
    assert engine(still, tmp_path / "second").loss == pytest.approx(first.loss, rel=1e-4)


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    simulate(SHORT.replace(epochs=0.1), tmp_path / "first")
    with pytest.raises(ConfigError, match="holds another model"):
        prepare(SHORT.replace(task="digits/cnn", init_from=str(tmp_path / "first")))
    with pytest.raises(ConfigError, match=r"init_from = .*nowhere.* cannot be read"):
        prepare(SHORT.replace(init_from=str(tmp_path / "nowhere")))
    private = SHORT.replace(
        init_from=str(tmp_path / "first"), privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-4)
    )
    assert any("init_public = true" in note for note in prepare(private.replace(init_public=True)).notes)


def test_a_private_run_begins_with_public_weights_or_on_the_same_ledger_only(tmp_path: Path) -> None:
    rows = [f"{k % 50},{k % 2},{'north' if k % 3 else 'south'}{chr(10)}" for k in range(400)]
    (tmp_path / "patients.csv").write_text("".join(["age,ill,clinic\n", *rows]))
    options = {"path": str(tmp_path / "patients.csv"), "label": "ill", "site": "clinic", "classes": [0, 1]}
    options["ranges"] = {"age": [0, 50]}
    sites = SHORT.replace(task="table/logistic", epochs=1, seed=None, options=options, data=Data(partition="site"))
    privacy = Privacy(mode="private", epsilon=5.0, delta=1e-4, ledger=str(tmp_path / "ledger"), dataset="patients")
    simulate(sites, tmp_path / "plain")
    simulate(sites.replace(privacy=privacy.replace(epsilon=2.0, ledger=str(tmp_path / "else"))), tmp_path / "elsewhere")
    simulate(sites.replace(privacy=privacy), tmp_path / "private")
    start = sites.replace(privacy=privacy, init_from=str(tmp_path / "private"))
    prepare(start)
    weights = str(tmp_path / "private/model/weights.safetensors")
    for changes, why in (
        ({"init_from": str(tmp_path / "plain")}, "a run without privacy"),
        ({"init_from": str(tmp_path / "elsewhere")}, "does not share"),
        ({"privacy": privacy.replace(ledger=None)}, "does not share"),
        ({"init_from": weights}, "is no run's folder"),
    ):
        with pytest.raises(ConfigError, match=why):
            prepare(start.replace(**changes))
        assert any("init_public" in note for note in prepare(start.replace(**changes, init_public=True)).notes)


@pytest.mark.parametrize("engine", [simulate, pytest.param(train, marks=pytest.mark.processes)])
def test_a_run_that_was_killed_before_it_left_anything_begins_anew(engine: Any, tmp_path: Path) -> None:
    Folder.create(tmp_path / "run", SHORT)  # and SIGTERM, as its first learner was made
    run = engine(SHORT, tmp_path / "run", resume=True)
    assert run.epochs == pytest.approx(2, abs=0.2)
    assert read_result(tmp_path / "run") == run


def test_a_checkpoint_is_also_due_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SHORT.replace(checkpoint_every=0, checkpoint_every_s=1e-6)
    kept: list[bool] = []
    path = tmp_path / "run/simulation.safetensors"
    simulate(settings, tmp_path / "run", on_status=lambda _: kept.append(path.exists()))
    assert kept[-1]
    simulate(settings.replace(checkpoint_every_s=0), tmp_path / "other", on_status=lambda _: kept.append(path.exists()))
    assert not kept[-1]


def test_a_result_says_that_nothing_was_learned_or_that_the_models_differ() -> None:
    still = SHORT.replace(optimizer=Optimizer(lr=1e-9), epochs=0.5)
    assert any("no better than always answering" in note for note in simulate(still).notes)
    assert not simulate(SHORT).notes
    wild = Config(
        task="quadratic", learners=4, epochs=2, batch_size=8, seed=1, device="cpu", optimizer=Optimizer(lr=4.0),
        options={"records": 200, "dimension": 3},
    )  # fmt: skip
    assert any("the learners' models do not agree" in note for note in simulate(wild).notes)
