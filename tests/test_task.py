"""Tasks on files: options, the named experiments, the feed to the device, and learning on real data."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adp2sgd import sampler
from adp2sgd.config import Config, Data, Optimizer, Privacy, Speeds, load_config
from adp2sgd.data import cifar10
from adp2sgd.data.batches import Batches, PoissonBatches, ReshuffledBatches
from adp2sgd.data.feed import Ahead, Feed, Resident, feed
from adp2sgd.data.records import Records
from adp2sgd.engine import simulate
from adp2sgd.engine.validate import check_fit
from adp2sgd.errors import ConfigError, DataError, PrivacyError
from adp2sgd.flat import FlatModel
from adp2sgd.randomness.streams import Streams
from adp2sgd.task import Task
from adp2sgd.tasks import IMAGE_MODELS, resolve
from conftest import ROOT, adp2sgd, make_learner
from data_files import (
    DECLARED,
    cifar_files,
    heart_files,
    idx_files,
    kaldi_folder,
    patients,
    pixels,
    utterances,
    write_image,
    write_table,
)

EXPERIMENTS = sorted((ROOT / "experiments").glob("*.toml"))
Folder = Callable[[str], Path]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every data set in its real format, a few records each; nothing of this machine is found."""
    root = tmp_path / "data"
    cifar_files(root, cifar10.BINARY, monkeypatch, records=8)
    idx_files(root / "fashion", monkeypatch, packed=False)
    heart_files(root)
    for part, speakers in (("train", ("a", "b", "c")), ("test", ("d", "e"))):
        kaldi_folder(root / "speech" / part, utterances(speakers))
    monkeypatch.setenv("ADP2SGD_DATA", str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


def outputs(name: str, **options: Any) -> tuple[int, ...]:
    """The shape of the model's output for two training records."""
    task = resolve(name, options)
    with torch.no_grad():
        return tuple(task.model().eval()(task.prepare(task.train.inputs[:2])).shape)


# --- options ------------------------------------------------------------------------------------------------------


def test_the_models_take_their_sizes_from_the_data() -> None:
    assert outputs("heart") == outputs("heart/mlp", hidden=[8]) == (2, 2)
    assert outputs("speech/lstm", hidden=8, layers=1, projection=4, classes=9) == (2, 21, 9)
    assert outputs("cifar10") == outputs("fashion") == (2, 10)
    for model in ("cnn", "mlp", "logistic", "shufflenet", "mobilenet", "efficientnet_b0", "wrn16_4"):
        assert outputs(f"fashion/{model}") == (2, 10)


def test_every_image_model_is_offered_and_checks_its_options() -> None:
    for model in IMAGE_MODELS:
        assert resolve(f"cifar10/{model}", {}).augment is not None
    assert sum(p.numel() for p in resolve("cifar10/resnet18", {"norm": "group"}).model().parameters()) == 11_173_962
    assert not any("Batch" in type(m).__name__ for m in resolve("cifar10/vgg19", {"norm": "group"}).model().modules())


def test_options_of_the_source_are_consumed_and_the_rest_goes_to_the_model(small_files: Path) -> None:
    task = resolve("speech/lstm", {"classes": 12, "normalize": "speaker", "hidden": 3, "layers": 1, "projection": 5})
    assert task.model()[2].weight.shape == (12, 5)
    assert "speaker" in (task.fitted or "")
    shutil.move(small_files / "speech", small_files / "elsewhere")
    moved = {"data_dir": str(small_files), "name": "elsewhere", "classes": 12, "hidden": 3, "layers": 1}
    assert len(resolve("speech", moved).train) == len(task.train)


def test_limit_spreads_over_the_files_and_only_keeps_one_site() -> None:
    whole, part = resolve("heart", {}), resolve("heart", {"limit": 10})
    assert len(part.train) == len(part.test) == 10
    assert len(part.train.sites.unique()) == 4
    assert len(resolve("heart", {"limit": 10**6}).train) == len(whole.train)
    va = resolve("heart", {"only": "va"})
    assert torch.equal(va.train.inputs, whole.train.inputs[whole.train.sites == 3])
    assert len(va.test) == len(whole.test)


def test_augmentation_only_where_configured() -> None:
    assert resolve("cifar10", {"augment": False}).augment is None
    assert resolve("fashion", {}).augment is None
    assert resolve("fashion", {"augment": True}).augment is not None
    task = resolve("cifar10", {})
    learner = make_learner(0, task)
    learner.begin()
    seen, plain = learner.sampler.batch().inputs, task.prepare(task.train.inputs[learner.sampler.rows])
    assert seen.shape == plain.shape
    assert not torch.equal(seen, plain)


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("heart/cnn", {}, ("heart/cnn", "logistic, mlp")),
        ("cifar10/lstm", {}, ("cifar10/lstm", "resnet18")),
        ("heart", {"only": "mars"}, ("mars", "cleveland")),
        ("cifar10", {"only": "va"}, ("va", "this data has none")),
        ("heart", {"limit": 0}, ("limit = 0", "at least 1")),
        ("heart", {"limit": "3"}, ("options.limit", "whole number")),
        ("heart", {"augment": True}, ("augment", "images")),
        ("heart", {"depth": 3}, ("options.depth", "heart/logistic", "only, limit, augment")),
        ("table/mlp", {"inputs": 7}, ("options.inputs", "table/mlp", "hidden", "path, label")),
        ("cifar10/resnet18", {"norm": "layer"}, ("layer", "batch, group")),
        ("speech", {"normalize": "utterance"}, ("utterance", "speaker")),
        ("speech", {"classes": 3.5}, ("options.classes", "whole number")),
        ("table", {"label": "ill"}, ("options.path", "[options]")),
        ("images", {}, ("options.folder",)),
        ("digits", {"model": 3}, ("options.model", "string")),
    ],
)
def test_wrong_options_are_one_line_that_names_them(name: str, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name, options)
    for part in (*parts, ";"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


# --- the user's own data ------------------------------------------------------------------------------------------


def test_a_table_of_the_users_own(tmp_path: Path) -> None:
    path = write_table(tmp_path / "patients.csv", patients())
    declared = {**DECLARED, "classes": [0, 1], "ranges": {"age": [0, 100]}, "categories": {"kind": ["mild", "severe"]}}
    task = resolve("table/mlp", {**declared, "path": str(path), "site": "clinic", "hidden": [4]})
    assert task.fitted is None
    assert task.train.site_names == ("north", "south")
    assert outputs("table/logistic", path=str(path), label="ill") == (2, 2)


def test_private_mode_refuses_what_was_fitted_on_records(tmp_path: Path) -> None:
    path = write_table(tmp_path / "patients.csv", patients())
    private = Privacy(mode="private", noise_multiplier=1.0, delta=1e-4)
    config = Config(task="table", learners=2, epochs=1, batch_size=8, options={"path": str(path), "label": "ill"})
    assert simulate(config.replace(seed=0)).accuracy is not None
    with pytest.raises(PrivacyError, match=r"mean and deviation of 'age' \(declare options\.ranges\)") as caught:
        simulate(config.replace(privacy=private))
    assert "options.ignore" in str(caught.value)


def test_columns_of_a_table_can_be_ignored(tmp_path: Path) -> None:
    path = write_table(tmp_path / "patients.csv", patients())
    options: dict[str, Any] = {"path": str(path), "label": "ill"}
    whole, part = (resolve("table", options | {"ignore": names}) for names in ([], "kind"))
    assert "'kind'" in str(whole.fitted)
    assert "'kind'" not in str(part.fitted)
    assert part.train.inputs.shape[1] < whole.train.inputs.shape[1]
    assert len(part.train) == len(whole.train)
    with pytest.raises(ConfigError, match="column 'king' is none of the 4"):
        resolve("table", options | {"ignore": ["king"]})


def test_a_value_that_is_no_number_is_named(tmp_path: Path) -> None:
    columns = patients()
    columns["age"][4] = "old"
    path = write_table(tmp_path / "patients.csv", columns)
    with pytest.raises(DataError, match=r"patients\.csv, record 5: the value in column 'age' is no number"):
        resolve("table", {"path": str(path), "label": "ill", "ranges": {"age": [0, 100]}})


def test_images_of_the_users_own(tmp_path: Path) -> None:
    for i in range(16):
        write_image(tmp_path / "scans" / "ab"[i % 2] / f"{i}.png", pixels(i))
    options = {"folder": str(tmp_path / "scans"), "classes": ["a", "b"]}
    assert outputs("images/logistic", **options) == (2, 2)
    assert outputs("images", **options, size=[8, 8], widths=[4]) == (2, 2)
    with pytest.raises(ConfigError, match=r"square images, not 6 × 8; set options\.size = \[6, 6\]"):
        resolve("images", options)


def test_the_example_of_an_own_task_learns(tmp_path: Path) -> None:
    settings = {"task": "own_task:disc", "options.radius": 1.0, "optimizer.lr": 0.5, "seed": 0, "learners": 4}
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = adp2sgd("simulate", *changes, "--out", str(tmp_path / "run"), "--json", "--quiet", cwd=ROOT / "examples")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["accuracy"] > 0.9


# --- the named experiments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_is_valid_and_its_model_fits_its_data(path: Path) -> None:
    config = load_config(path)
    task = resolve(config.task, config.options)
    model = task.model()
    with torch.no_grad():
        found = model.eval()(task.prepare(task.test.inputs[:2]))
    assert torch.isfinite(task.loss(found, task.test.targets[:2])).all()
    assert path.read_text().startswith("# ")
    assert f"simulate experiments/{path.name}" in path.read_text()
    if config.privacy.mode == "private":
        assert task.fitted is None
        assert not any("BatchNorm" in type(layer).__name__ for layer in model.modules())


def test_the_papers_recipes() -> None:
    cifar, speech = (
        load_config(ROOT / "experiments" / "paper_cifar10.toml"),
        load_config(ROOT / "experiments" / "paper_speech.toml"),
    )
    assert (cifar.learners, cifar.batch_size, cifar.epochs, cifar.privacy.sigma) == (16, 256, 300, 2.0)
    assert [cifar.optimizer.rate(e) for e in (0, 159.9, 160, 239.9, 240, 300)] == [0.4, 0.4, 0.04, 0.04, 0.004, 0.004]
    assert cifar.optimizer.weight_decay == 5e-4
    assert cifar.optimizer.momentum == speech.optimizer.momentum == 0.9
    assert cifar.topology.partner == speech.topology.partner == "sender-receiver"
    assert (speech.learners, speech.batch_size, speech.epochs, speech.privacy.sigma) == (16, 128, 20, 0.16)
    rates = [speech.optimizer.rate(e) for e in (0, 5, 10, 11, 20)]
    assert rates == pytest.approx([0.1, 0.55, 1.0, math.sqrt(0.5), 1 / 32])
    assert [speech.options[key] for key in ("hidden", "layers", "projection")] == [512, 6, 256]


def test_the_papers_cases() -> None:
    names = ("cifar10", "case1", "case2", "case3")
    base, one, two, three = (load_config(ROOT / "experiments" / f"paper_{name}.toml") for name in names)
    assert one == base.replace(speeds=Speeds(kind="random-slow", factor=2.0))
    assert two == base.replace(speeds=Speeds(kind="one-slow", factor=10.0))
    assert three.batch_size == 2 * base.batch_size
    for epoch in (0, 200, 300):
        assert three.optimizer.rate(epoch) == 2 * base.optimizer.rate(epoch)
    assert three.privacy.sigma == 1.0


# --- records on their way to the device ---------------------------------------------------------------------------


def batches_of(kind: Callable[..., Batches], seed: int | None = 0) -> Batches:
    return kind(50, 8, Streams(seed, 0))


@pytest.mark.parametrize("kind", [PoissonBatches, ReshuffledBatches])
def test_fetching_ahead_gives_the_same_batches(kind: Callable[..., Batches]) -> None:
    records = Records(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), torch.arange(50))
    one, other = (make(records, batches_of(kind), torch.device("cpu")) for make in (Resident, Ahead))
    for step in [0, 1, 2, *range(20), 7, 3]:  # a run that resumes goes to any step
        rows = one.draw(step)
        assert torch.equal(rows, other.draw(step))
        for mine, theirs in zip(one.take(), other.take(), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(one.take()[1], rows)


def test_unseeded_batches_are_drawn_once_and_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a seed a second draw would give other rows: what is fetched must be what was announced."""
    batches = batches_of(PoissonBatches, seed=None)
    drawn: list[torch.Tensor] = []
    original = batches.draw
    monkeypatch.setattr(batches, "draw", lambda step: drawn.append(original(step)) or drawn[-1])
    ahead = Ahead(Records(torch.arange(50.0), torch.arange(50)), batches, torch.device("cpu"))
    for step in range(10):
        rows = ahead.draw(step)
        assert rows is drawn[step]
        assert torch.equal(ahead.take()[1], rows)
    assert len(drawn) == 11


def test_a_run_fetches_ahead_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(learners=3, epochs=1, seed=0, device="cpu")
    resident = simulate(config)
    used: list[Ahead] = []

    def always(records: Records, batches: Batches, device: torch.device) -> Feed:
        used.append(Ahead(records, batches, device))
        return used[-1]

    monkeypatch.setattr(sampler, "feed", always)
    assert simulate(config).curve == resident.curve
    assert len(used) == 3


def test_host_memory_always_holds_the_records() -> None:
    records = Records(torch.zeros(50), torch.arange(50))
    assert isinstance(feed(records, batches_of(PoissonBatches), torch.device("cpu")), Resident)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_does_not_fit_stays_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(learners=3, epochs=2, seed=0, device="cuda")
    resident = simulate(config)
    monkeypatch.setattr("adp2sgd.data.feed.SHARE", 0.0)
    records = Records(torch.zeros(50), torch.arange(50))
    assert isinstance(feed(records, batches_of(PoissonBatches), torch.device("cuda")), Ahead)
    assert simulate(config).curve == resident.curve


# --- real data ----------------------------------------------------------------------------------------------------


def hospitals() -> Any:
    """experiments/hospitals.py as a module."""
    spec = importlib.util.spec_from_file_location("hospitals", ROOT / "experiments" / "hospitals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hospitals"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_four_hospitals_learn_more_together_than_each_alone(real_data: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/data.md has the table of five seeds; here one run per row."""
    monkeypatch.setenv("ADP2SGD_DATA", str(real_data("heart")))
    script = hospitals()
    rows = [script.measure(name, config, seeds=1) for name, config in script.settings([3.0])]
    *alone, pooled, together, private = (row.mean for row in rows)
    assert len(alone) == 4
    assert together > max(alone)
    assert private > max(alone)
    assert together > pooled - 0.05
    assert rows[-1].epsilon == pytest.approx(3.0, rel=0.01)
    assert all(set(row.hospitals) == {"cleveland", "hungarian", "switzerland", "va"} for row in rows)
    table = script.markdown(rows).splitlines()
    assert len(table) == 9
    assert all(line.count("|") == 7 for line in table)


def test_a_small_cnn_learns_real_images(real_data: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 images of CIFAR-10 at four learners, with and without privacy; chance is 10 %."""
    monkeypatch.undo()  # the official checksums
    monkeypatch.setenv("ADP2SGD_DATA", str(real_data("cifar10")))
    config = Config(
        task="cifar10/cnn",
        learners=4,
        epochs=4,
        batch_size=8,
        seed=0,
        device="cpu",
        evaluate_every=8,
        options={"limit": 2000, "augment": False, "widths": [8, 16]},
        optimizer=Optimizer(lr=0.03),
    )
    run = simulate(config)
    assert run.accuracy is not None
    assert run.accuracy > 0.3
    privacy = Privacy(mode="private", epsilon=8.0, delta=1e-4, headroom=1.0)
    private = simulate(config.replace(epochs=8, batch_size=64, optimizer=Optimizer(lr=0.5), privacy=privacy))
    assert private.accuracy is not None
    assert private.accuracy > 0.2
    assert all(learner.epsilon is not None and learner.epsilon <= 8 for learner in private.learners)


def test_a_small_lstm_learns_real_speech(real_data: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out loss below the entropy of the held-out class frequencies, the best that no input can give."""
    monkeypatch.setenv("ADP2SGD_DATA", str(real_data("speech")))
    options = {"limit": 1500, "hidden": 64, "layers": 1, "projection": 64}
    frequencies = resolve("speech/lstm", options).test.targets.flatten().bincount().double()
    frequencies = frequencies[frequencies > 0] / frequencies.sum()
    entropy = -float((frequencies * frequencies.log()).sum())
    assert 5 < entropy < math.log(320)
    run = simulate(
        Config(
            task="speech/lstm",
            learners=4,
            epochs=3,
            batch_size=16,
            seed=0,
            device="cpu",
            evaluate_every=3,
            options=options,
            data=Data(partition="iid"),
            optimizer=Optimizer(lr=2.0),
        )
    )
    assert run.loss < entropy - 1
    assert set(run.sites) == {f"s{n}" for n in range(49, 61)}  # each held-out speaker's own figures


def test_the_example_of_hospitals_with_tables_of_their_own(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    for site in ("north", "south", "west"):
        age, pressure = stream.integers(20, 90, 120), stream.integers(90, 190, 120)
        smoker = stream.choice(["never", "past", "now"], 120)
        ill = np.where(age / 20 + pressure / 40 + 2 * (smoker == "now") + stream.normal(size=120) > 7, "yes", "no")
        columns = {"age": age.tolist(), "pressure": pressure.tolist(), "smoker": smoker.tolist(), "ill": ill.tolist()}
        write_table(tmp_path / "patients" / f"{site}.csv", columns)
    config = load_config(ROOT / "examples" / "hospitals.toml").replace(seed=0)
    assert config.data == Data(partition="site")
    run = simulate(config.replace(options={**config.options, "path": str(tmp_path / "patients")}))
    assert set(run.sites) == {"north", "south", "west"}
    assert run.accuracy is not None
    assert run.accuracy > 0.7
    assert all(learner.epsilon == pytest.approx(3.0, rel=0.01) for learner in run.learners)


def test_targets_that_are_no_labels_have_no_accuracy() -> None:
    records = Records(torch.randn(8, 3), torch.randn(8, 1))
    task = Task(
        model=lambda: nn.Linear(3, 1), train=records, test=records, loss=lambda out, y: (out - y)[:, 0].square(),
        metrics="accuracy",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="leave accuracy out"):
        check_fit(task, FlatModel(task.model()), private=False)
    check_fit(replace(task, metrics=(), monitor=None), FlatModel(task.model()), private=False)
    whole = Records(records.inputs, torch.zeros(8))  # a floating type alone is no reason
    two = Task(model=lambda: nn.Linear(3, 2), train=whole, test=whole, loss=lambda out, y: (out[:, 0] - y).square())
    check_fit(two, FlatModel(two.model()), private=False)


@pytest.mark.parametrize("privacy", [Privacy(), Privacy(mode="private", noise_multiplier=1.0, delta=1e-3)])
@pytest.mark.parametrize(
    ("outputs", "targets", "loss", "words"),
    [
        (2, torch.zeros(8, dtype=torch.long), nn.CrossEntropyLoss(), r"loss of 2 records has shape \(\).*per record"),
        (1, torch.randn(8, 1), nn.functional.mse_loss, "no whole numbers"),
        (2, torch.zeros(8, 1), lambda out, y: (out - y).sum(1), r"\(2, 1\) are no labels.*give them shape \(2,\)"),
    ],
)
def test_figures_that_would_mean_nothing_are_refused(
    outputs: int, targets: torch.Tensor, loss: Any, words: str, privacy: Privacy
) -> None:
    """A mean over a batch is not summed over its records, and labels are one number for each row of outputs."""
    records = Records(torch.randn(8, 3), targets)
    task = Task(model=lambda: nn.Linear(3, outputs), train=records, test=records, loss=loss, metrics="accuracy")
    with pytest.raises(ConfigError, match=words):
        check_fit(task, FlatModel(task.model()), private=privacy.mode == "private")


def test_outputs_that_are_no_tensor_have_no_accuracy() -> None:
    class Pair(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    records = Records(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))
    task = Task(model=lambda: Pair(3, 2), train=records, test=records, loss=lambda out, y: out[0].square().sum(1))
    check_fit(task, FlatModel(task.model()), private=False)
    with pytest.raises(ConfigError, match="a tuple of outputs has no accuracy"):
        check_fit(replace(task, metrics="accuracy"), FlatModel(task.model()), private=False)


def test_private_mode_tells_nothing_of_records_that_do_not_fit() -> None:
    """And looks at held-out ones only."""
    wrong = Records(torch.randn(8, 3), torch.full((8,), 77))
    right = Records(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))
    task = Task(model=lambda: nn.Linear(3, 2), train=right, test=wrong)
    with pytest.raises(ConfigError, match="do not fit") as caught:
        check_fit(task, FlatModel(task.model()), private=True)
    assert "77" not in str(caught.value)
    check_fit(replace(task, train=wrong, test=right), FlatModel(task.model()), private=True)


def needy(*, size: int) -> Task:
    raise AssertionError(f"called with {size}")


def test_what_an_own_task_lacks_is_one_line() -> None:
    records = Records(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))
    with pytest.raises(ConfigError, match="function that makes the model"):
        Task(model=nn.Linear(3, 2), train=records, test=records)
    with pytest.raises(ConfigError, match='"recall" is unknown; use one of: accuracy, balanced_accuracy'):
        Task(model=lambda: nn.Linear(3, 2), train=records, test=records, metrics="recall")
    with pytest.raises(DataError, match=r"inputs of Records are a ndarray; give a torch\.Tensor"):
        Records(np.zeros((8, 3)), records.targets)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'"test_task:needy" needs options\.size'):
        resolve("test_task:needy", {})


def test_a_record_that_is_not_finite_is_named() -> None:
    settings = Config(task="test_task:one_is_missing", learners=1, batch_size=8, epochs=1, seed=0, device="cpu")
    with pytest.raises(ConfigError, match=r"training record 5 \(counted from 0\): inputs at position 1 is NaN"):
        simulate(settings)


def one_is_missing() -> Task:
    inputs = torch.randn(8, 3)
    inputs[5, 1] = torch.nan
    records = Records(inputs, torch.arange(8) % 2)
    return Task(model=lambda: nn.Linear(3, 2), train=records, test=records)
