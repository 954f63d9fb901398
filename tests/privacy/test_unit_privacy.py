"""Privacy of whole units: from raw files on, a patient with all records moves the sum by at most the clip norm."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adp2sgd.config import Config, Data, Optimizer, Privacy
from adp2sgd.data import table
from adp2sgd.data.batches import PoissonBatches
from adp2sgd.data.units import UnitBatches
from adp2sgd.engine import simulate, train
from adp2sgd.errors import ConfigError, LedgerError, PrivacyError
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import choose
from adp2sgd.losses import cross_entropy
from adp2sgd.privacy import ledger
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.mechanism import SampledGaussian
from adp2sgd.privacy.spent import spent_in
from adp2sgd.randomness.streams import Streams
from conftest import ROOT
from data_files import SHARED

OPTIONS = {"label": "ill", "classes": ["0", "1"], "ranges": {"age": [0, 100], "pressure": [80, 200]}}
CLIP = 1.0


def write_patients(path: Path, visits: list[list[tuple[int, int, int]]], **more: str) -> Path:
    """One row per visit of (age, pressure, ill); the last patient's rows come last."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["patient_id", "age", "pressure", "ill", *more])
        for number, own in enumerate(visits):
            rows.writerows([f"p{number:03}", *visit, *more.values()] for visit in own)
    return path


def released(path: Path, each: int, seed: int, clipper: str, *, together: bool = True, fixed: bool = False) -> Tensor:
    """The sum before the noise where every unit of the file is drawn; `together`: their rows are clipped as one."""
    source = table.load(path, unit="patient_id", test_fraction=1e-9, split="part", **OPTIONS)
    units = source.train.units
    assert units is not None
    streams = Streams(seed, 0)
    drawn = PoissonBatches(units.count, units.count, streams, fixed_rows=units.count + 2 if fixed else None)
    batches = UnitBatches(units, each, drawn, streams)
    rows = batches.draw(0)
    records = source.train.with_blank()
    torch.manual_seed(seed)
    model = FlatModel(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    model.weights.mul_(10)
    made = choose.build(model, cross_entropy, clipper=clipper, copies=each if together else 1)
    inputs = source.prepare(records.inputs[rows])
    return made.clipped_sum(inputs, records.targets[rows], CLIP, batches.counted(rows)).total.double()


Visit = st.tuples(st.integers(0, 100), st.integers(80, 200), st.integers(0, 1))


@pytest.mark.parametrize("clipper", ["auto", "book-keeping", "functional", "loop"])
@settings(max_examples=12)
@given(
    patients=st.lists(st.lists(Visit, min_size=1, max_size=5), min_size=2, max_size=6),
    own=st.lists(Visit, min_size=1, max_size=20),
    each=st.integers(1, 8),
    seed=st.integers(0, 2**31),
    fixed=st.booleans(),
)
def test_one_more_patient_in_the_raw_file_moves_the_sum_by_at_most_the_clip_norm(
    clipper: str,
    patients: list[list[tuple[int, int, int]]],
    own: list[tuple[int, int, int]],
    each: int,
    seed: int,
    fixed: bool,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with_and_without = []
        for number, some in enumerate(([*patients, own], patients)):
            path = write_split(Path(folder) / f"{number}.csv", some)
            with_and_without.append(released(path, each, seed, clipper, fixed=fixed))
    moved = float((with_and_without[0] - with_and_without[1]).norm())
    assert moved <= CLIP * (1 + 1e-5)


def write_split(path: Path, visits: list[list[tuple[int, int, int]]]) -> Path:
    """As `write_patients`, with one patient held out."""
    write_patients(path, visits, part="train")
    with path.open("a", newline="") as file:
        csv.writer(file).writerow(["a held-out patient", 50, 120, 1, "test"])
    return path


def test_the_sensitivity_test_catches_records_that_are_clipped_one_by_one(tmp_path: Path) -> None:
    draw = random.Random(1)
    patients = [[(draw.randint(0, 100), draw.randint(80, 200), draw.randint(0, 1)) for _ in range(8)] for _ in range(3)]
    patients[-1] = 8 * [(100, 80, 0)]
    paths = [write_split(tmp_path / f"{n}.csv", patients[: 3 - n]) for n in (0, 1)]
    moved = {
        together: float(torch.sub(*(released(path, 8, 3, "auto", together=together) for path in paths)).norm())
        for together in (True, False)
    }
    assert moved[True] <= CLIP * (1 + 1e-5)
    assert moved[False] > 1.5 * CLIP


# ---------------------------------------------------------------- runs


def two_clinics(folder: Path) -> Path:
    """200 patients with one to five visits, at two clinics."""
    draw = random.Random(0)
    (folder / "clinics").mkdir()
    for clinic, first in (("north", 0), ("south", 100)):
        with (folder / "clinics" / f"{clinic}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["patient_id", "age", "pressure", "ill"])
            for number in range(first, first + 100):
                age = draw.randint(20, 90)
                for _ in range(draw.randint(1, 5)):
                    rows.writerow([f"p{number}", age, draw.randint(80, 200), int(age + draw.gauss(0, 10) > 55)])
    return folder / "clinics"


def per_patient(folder: Path, **privacy: Any) -> Config:
    return Config(
        task="table/logistic",
        learners=2,
        epochs=3,
        batch_size=10,
        seed=0,
        device="cpu",
        options={"path": str(folder), "unit": "patient_id", **OPTIONS},
        data=Data(partition="site"),
        optimizer=Optimizer(lr=0.5),
        privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-5, **privacy),
    )


def test_epsilon_ledger_and_words_are_those_of_the_unit(tmp_path: Path) -> None:
    config = per_patient(two_clinics(tmp_path))
    run = simulate(config, tmp_path / "run")
    source = table.load(tmp_path / "clinics", unit="patient_id", **OPTIONS)
    assert source.train.units is not None
    assert source.train.sites is not None
    counts = [source.train.units.take((source.train.sites == k).nonzero()[:, 0]).count for k in (0, 1)]
    for learner, count in zip(run.learners, counts, strict=True):
        assert learner.max_steps is not None
        own = epsilon(SampledGaussian(2.0, 10 / count), learner.max_steps, 1e-5)
        assert learner.epsilon == pytest.approx(own.epsilon)
    assert run.guarantee.unit == "patient_id"
    assert "per patient_id" in str(run.guarantee)
    assert "no patient_id lies at two learners" in str(run.guarantee)
    assert run.global_steps == pytest.approx(3 * sum(counts) / 10, abs=2)  # an epoch draws every patient once
    assert {row.unit for row in spent_in(tmp_path / "run")} == {"patient_id"}
    assert json.loads((tmp_path / "run/learner-0/ledger.jsonl").read_text().splitlines()[0])["unit"] == "patient_id"


def test_units_with_fixed_work_and_a_clip_norm_that_adapts_learn_in_processes_too(tmp_path: Path) -> None:
    folder = two_clinics(tmp_path)
    config = per_patient(folder, fixed_work=True, clip_quantile=0.5, count_noise=4.0, records_per_unit=3)
    run = train(config.replace(epochs=1.0), tmp_path / "run")
    assert run.guarantee.unit == "patient_id"
    assert all(learner.clip_norm not in (None, 1.0) for learner in run.learners)
    assert all(learner.epsilon == pytest.approx(run.guarantee.epsilon, rel=0.2) for learner in run.learners)


def test_a_unit_at_two_learners_is_refused(tmp_path: Path) -> None:
    folder = two_clinics(tmp_path)
    with (folder / "south.csv").open("a") as file:
        file.write("".join(f"p{number},40,120,0\n" for number in range(10)))
    with pytest.raises(PrivacyError, match="a patient_id has records at north and at south") as caught:
        simulate(per_patient(folder))
    assert "\n" not in str(caught.value)
    assert (
        simulate(per_patient(folder).replace(data=Data(partition="iid"))).guarantee.unit == "patient_id"
    )  # dealt out anew


def test_a_ledger_is_for_one_unit(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.Ledger.open(path, dataset="d", site="s").close()
    with pytest.raises(LedgerError, match='spent per "record", not per "patient_id"'):
        ledger.Ledger.open(path, dataset="d", site="s", unit="patient_id")
    ledger.Ledger.open(tmp_path / "other.jsonl", dataset="d", site="s", unit="patient_id").close()
    with pytest.raises(LedgerError, match='spent per "patient_id", not per "record"'):
        ledger.Ledger.open(tmp_path / "other.jsonl", dataset="d", site="s")


def test_records_that_seem_to_be_of_people_raise_a_question(tmp_path: Path) -> None:
    config = per_patient(two_clinics(tmp_path))
    options = {**config.options, "ignore": ["patient_id"]}
    del options["unit"]
    run = simulate(config.replace(options=options))
    assert "per record" in str(run.guarantee)
    [note] = [note for note in run.notes if "patient_id" in note]
    assert 'set options.unit = "patient_id"' in note
    with pytest.raises(ConfigError, match="records_per_unit = 2 means nothing for data without units"):
        simulate(config.replace(options=options, privacy=config.privacy.replace(records_per_unit=2)))


def repeat_visits() -> Any:
    """examples/repeat_visits.py as a module."""
    spec = importlib.util.spec_from_file_location("repeat_visits", ROOT / "examples" / "repeat_visits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["repeat_visits"] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_of_repeat_visits_runs(tmp_path: Path) -> None:
    if not (SHARED / "heart_disease").is_dir():
        pytest.skip("needs the heart-disease files")
    script = repeat_visits()
    assert script.write_visits(tmp_path, str(SHARED)) > 2000
    runs = script.compare(tmp_path, epochs=8)
    assert [run.guarantee.unit for run in runs.values()] == ["record", "patient_id"]
    assert all(run.guarantee.epsilon <= 3 for run in runs.values())
    assert runs["per-patient"].accuracy > 0.7
