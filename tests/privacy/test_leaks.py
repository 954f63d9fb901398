"""What private mode prints and writes quotes no record, and no held-out record costs a run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leaky
from adp2sgd import engine, errors, load_model
from adp2sgd.cli import view
from adp2sgd.config import Config, Optimizer, Privacy
from adp2sgd.data.records import Records
from adp2sgd.engine.processes.supervisor import Patience
from adp2sgd.engine.setup import explain_gradients
from adp2sgd.engine.simulation.simulate import Simulation
from adp2sgd.errors import Adp2sgdWarning, ConfigError, DataError, RunError
from adp2sgd.files import to_json
from adp2sgd.run_folder import read_result
from adp2sgd.task import Task
from adp2sgd.tasks import resolve

PRIVATE = Config(
    task="leaky:leaky",
    learners=2,
    epochs=0.4,
    batch_size=30,
    seed=0,
    device="cpu",
    evaluate_every=0.1,
    checkpoint_every=0.1,
    optimizer=Optimizer(lr=0.1),
    privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-4),
)
ENGINES = pytest.mark.parametrize(
    "run",
    [pytest.param(engine.simulate, id="simulate"), pytest.param(engine.train, id="train", marks=pytest.mark.processes)],
)


def config(fault: str, **changes: Any) -> Config:
    return PRIVATE.replace(options={"fault": fault}, **changes)


def strict(path: Path) -> Any:
    """The JSON in a file; NaN and Infinity are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path} holds {word}")

    return json.loads(path.read_text(), parse_constant=refuse)


def assert_no_secret(*texts: str) -> None:
    for text in texts:
        for secret in leaky.SECRETS:
            assert secret not in text, text


def assert_clean(folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Neither the files of a run nor the terminal hold a value of a record. Returns what was printed as errors."""
    printed = capfd.readouterr()
    written = [path.read_text() for path in folder.rglob("*") if path.suffix in {".json", ".jsonl", ".toml"}]
    assert_no_secret(printed.out, printed.err, *written)
    return printed.err


# --- held-out records -----------------------------------------------------------------------------------------------


@ENGINES
def test_a_held_out_record_that_fails_is_refused_before_anything_is_spent(
    run: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (
        r"held-out record 417 .* cannot be evaluated: the task's loss fails \(IndexError at .*; correct or remove it"
    )
    with pytest.raises(ConfigError, match=words) as caught:
        run(config("held-out"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert_no_secret(str(caught.value))
    assert_clean(tmp_path, capfd)


@ENGINES
def test_an_evaluation_that_fails_costs_the_figures_and_not_the_model(
    run: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run(config("late"), tmp_path / "run")
    result = strict(tmp_path / "run/result.json")
    assert (result["metrics"], result["learners"][0]["metrics"]) == ({}, {})
    assert result["guarantee"]["epsilon_spent"] > 0
    assert result["global_steps"] >= 8
    [note] = [note for note in done.notes if note.startswith("held-out record 0 ")]
    assert "the task's loss fails (ValueError at leaky.py, line " in note
    assert load_model(tmp_path / "run", task="leaky:leaky").module.weight.any()  # type: ignore[union-attr]
    assert read_result(tmp_path / "run").loss is None
    view.print_run(done)
    assert_clean(tmp_path, capfd)


def test_the_model_is_saved_before_anything_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the evaluation ends the process, as the kernel does when memory runs out."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "_evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        engine.simulate(config("none", evaluate_every=100), tmp_path / "run")
    assert load_model(tmp_path / "run", task="leaky:leaky")


@pytest.mark.parametrize("kept", [0.1, 0.4], ids=["steps are left", "all steps are taken"])
def test_a_run_that_goes_on_is_not_refused_for_a_held_out_record(
    kept: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config("none", seed=None, evaluate_every=100)

    def stop(status: Any) -> None:
        if status.epoch >= kept:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.simulate(settings, tmp_path / "run", on_status=stop)
    monkeypatch.setenv(leaky.BAD, "1")
    done = engine.simulate(settings, tmp_path / "run", resume=True)
    assert done.loss is None
    assert any("held-out record 417" in note for note in done.notes)
    assert (tmp_path / "run/model/weights.safetensors").exists()


@pytest.mark.parametrize("mode", ["private", "none"])
def test_a_figure_that_is_no_number_is_null(mode: str, tmp_path: Path) -> None:
    privacy = PRIVATE.privacy if mode == "private" else Privacy()
    run = engine.simulate(config("nan", privacy=privacy), tmp_path / "run")
    result = strict(tmp_path / "run/result.json")
    assert result["metrics"]["loss"] is None
    assert result["metrics"]["accuracy"] > 0
    assert [point["metrics"]["loss"] for point in result["curve"]] == [None] * len(run.curve)
    assert any("loss on held-out records is not finite" in note for note in run.notes)


def test_json_is_strict() -> None:
    told = json.loads(to_json({"a": [float("nan"), (1.5, float("-inf"))], "b": 2}), parse_constant=pytest.fail)
    assert told == {"a": [None, [1.5, None]], "b": 2}


# --- errors and warnings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("prepare", r"ValueError at leaky\.py, line \d+"),
        ("augment", r"ValueError at leaky\.py, line \d+"),
        ("model", r"ValueError at leaky\.py, line \d+"),
        ("loss", r"IndexError at \w+\.py, line \d+"),
    ],
)
def test_what_fails_in_a_step_is_named_by_function_type_and_line(fault: str, kind: str) -> None:
    words = rf"learner \d's step failed in the task's {fault} \({kind}\); .* withheld; .*mode = \"none\""
    with pytest.raises(RunError, match=words) as caught:
        engine.simulate(config(fault))
    assert "\n" not in str(caught.value)
    assert_no_secret(str(caught.value))


@pytest.mark.parametrize("fault", ["making", "model-making"])
@ENGINES
def test_what_fails_while_the_task_is_made_is_withheld(run: Callable[..., Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be made \(ValueError at leaky\.py, line \d+\); .* withheld"
    ) as caught:
        run(config(fault), tmp_path / "run")
    assert_no_secret(str(caught.value))
    with pytest.raises(ValueError, match="98765"):
        run(config(fault, privacy=Privacy()), tmp_path / "run")


def test_an_error_that_nobody_expected_is_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise LookupError(f"no {leaky.SECRET}")

    monkeypatch.setattr(Simulation, "_step_done", fails)
    with pytest.raises(
        RunError, match=r"the run failed \(LookupError at test_leaks\.py, line \d+\); .* withheld"
    ) as caught:
        engine.simulate(config("none"))
    assert_no_secret(str(caught.value))
    with pytest.raises(LookupError, match="98765"):
        engine.simulate(config("none", privacy=Privacy()))


@ENGINES
def test_errors_of_the_callers_callback_are_the_callers(run: Callable[..., Any], tmp_path: Path) -> None:
    def stop(_: Any) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough") as caught:
        run(config("none"), tmp_path / "run", on_status=stop)
    assert caught.value.__cause__ is None


def test_out_of_memory_is_told_with_the_fix() -> None:
    with pytest.raises(RunError, match=r"the run failed \(OutOfMemoryError at .*; lower batch_size$"):
        engine.simulate(config("memory"))


@pytest.mark.processes
def test_a_learners_process_prints_no_text_of_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Out of memory is no error of ours: the process ends with a traceback."""
    with pytest.raises(RunError, match="all learners were lost"):
        engine.train(config("memory"), tmp_path / "run", patience=Patience(failures=0))
    printed = assert_clean(tmp_path, capfd)
    assert "OutOfMemoryError" in printed
    assert "in gradient" in printed  # of the traceback


@ENGINES
def test_the_text_of_a_warning_is_withheld(
    run: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(config("warning"), tmp_path / "run")
    printed = assert_clean(tmp_path, capfd)
    shown = [str(each.message) for each in told] + printed.splitlines()
    assert_no_secret(*shown)
    assert any("is withheld" in line for line in shown)


@ENGINES
def test_what_python_prints_by_itself_is_withheld(
    run: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(config("destructor"), tmp_path / "run")
    assert "ValueError at leaky.py" in assert_clean(tmp_path, capfd)


def test_warnings_of_ours_are_shown() -> None:
    with warnings.catch_warnings(record=True) as told, errors.withholding(private=True):
        warnings.simplefilter("always")
        warnings.warn("slower", Adp2sgdWarning, stacklevel=1)
        warnings.warn("98765", stacklevel=1)
    assert [str(each.message) for each in told] == ["slower", errors.WITHHELD]
    assert told[1].category is UserWarning


def test_an_error_of_ours_is_told_where_our_code_raised_it() -> None:
    def caught(function: Callable[[], object]) -> Exception:
        try:
            function()
        except Exception as error:
            return error
        raise AssertionError

    def quoting() -> None:
        raise DataError("98765 is wrong\nand more")

    ours = caught(lambda: Records(torch.zeros(3), torch.zeros(2)))
    assert errors.reason(ours, private=True) == "3 inputs but 2 targets; every record needs both"
    assert errors.reason(caught(quoting), private=True).startswith("DataError at test_leaks.py, line ")
    assert errors.reason(caught(quoting), private=False) == "98765 is wrong"
    assert errors.reason(KeyError(), private=False) == "KeyError"


def test_what_the_system_says_is_told() -> None:
    """A full disk is mended by who knows of it; a number or a text that code put there is not told."""
    assert errors.reason(OSError(28, "98765"), private=True) == "OSError: No space left on device"
    assert errors.reason(OSError(98765, "98765"), private=True) == "OSError"


def test_explain_looks_at_no_record() -> None:
    for fault in ("prepare", "model", "loss"):
        assert {row.layer for row in explain_gradients(config(fault))} == {"weight", "bias"}
    with pytest.raises(ConfigError, match="withheld") as caught:
        explain_gradients(config("making", privacy=Privacy()))
    assert_no_secret(str(caught.value))


# --- representations ------------------------------------------------------------------------------------------------


def test_no_representation_shows_a_record() -> None:
    records = Records(
        torch.full((3, 2), leaky.SECRET), torch.full((3,), leaky.LABEL), torch.tensor([0, 0, 1]), ("a", "b")
    )
    shifted = partial(torch.sub, torch.full((2,), leaky.SECRET))
    task = Task(model=lambda: nn.Linear(2, 2), train=records, test=records, prepare=shifted)
    assert repr(records) == "Records(inputs=torch.float32 [3, 2], targets=torch.int64 [3], sites=torch.int64 [3])"
    assert_no_secret(repr(task), str(task))


@pytest.mark.parametrize("key", ["task", "seed", "options", "privacy"])
def test_a_wrong_object_in_a_configuration_is_named_by_its_type(key: str) -> None:
    task = resolve("leaky:leaky", {"fault": "none"})
    for value in (task, task.train, task.train.inputs, [task.train.inputs]):
        with pytest.raises(ConfigError, match=rf"{key} = \(a (Task|Records|Tensor|list)\)") as caught:
            Config(**{key: value})
        assert_no_secret(str(caught.value))
