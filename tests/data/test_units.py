"""Units of several records: where they come from, that they stay together, and how batches draw them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from adp2sgd.config import Data
from adp2sgd.data import images, kaldi, shards, table
from adp2sgd.data.batches import PoissonBatches
from adp2sgd.data.records import Records, Units
from adp2sgd.data.units import UnitBatches, looks_like_people, population
from adp2sgd.errors import ConfigError, DataError
from adp2sgd.randomness.streams import Streams
from data_files import refused


def write_visits(path: Path, owners: list[str], **columns: list[str]) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["patient", "age", "ill", *columns])
        for i, owner in enumerate(owners):
            rows.writerow([owner, 20 + i % 60, i % 2, *(column[i] for column in columns.values())])
    return path


OPTIONS = {"label": "ill", "classes": ["0", "1"], "ranges": {"age": [0, 100]}}


def test_a_table_holds_out_whole_units_and_no_unit_moves_another(tmp_path: Path) -> None:
    owners = [f"p{i // 3}" for i in range(300)]
    source = table.load(write_visits(tmp_path / "a.csv", owners), unit="patient", **OPTIONS)
    assert source.train.units is not None
    assert source.test.units is not None
    assert source.train.units.name == "patient"
    assert not set(source.train.units.of.tolist()) & set(source.test.units.of.tolist())
    assert source.train.units.count + source.test.units.count == 100
    assert len(source.train) == 3 * source.train.units.count
    assert source.train.inputs.shape[1] == 2  # age, and whether it is missing: the identifier is no feature
    fewer = table.load(write_visits(tmp_path / "b.csv", owners[:297]), unit="patient", **OPTIONS)
    assert torch.equal(fewer.test.inputs, source.test.inputs[: len(fewer.test)])
    assert len(source.train) + len(source.test) - len(fewer.train) - len(fewer.test) == 3


def test_a_record_of_nobody_and_a_divided_unit_are_refused(tmp_path: Path) -> None:
    with refused("a.csv, record 2", "'patient' names no unit"):
        table.load(write_visits(tmp_path / "a.csv", ["secret", "", "x"]), unit="patient", **OPTIONS)
    split = write_visits(tmp_path / "b.csv", ["secret", "secret", "x"], part=["train", "test", "test"])
    with refused("b.csv, record 2", "training and for testing", never=["secret"]):
        table.load(split, unit="patient", split="part", **OPTIONS)


def test_images_of_a_unit_lie_in_a_folder_below_their_class(tmp_path: Path) -> None:
    for label in ("ill", "well"):
        for patient in range(12):
            folder = tmp_path / label / f"p{patient}"
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = np.full((4, 4), 10 * patient + number, np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    source = images.load(tmp_path, unit="patient", channels=1)
    assert source.train.units is not None
    assert source.test.units is not None
    assert source.train.units.count + source.test.units.count == 12  # the same patient below both classes
    assert len(source.train) == 4 * source.train.units.count
    with refused("does not fit the layout", "unit"):
        images.load(tmp_path, channels=1)


def test_a_unit_of_speech_is_its_speaker() -> None:
    with refused('unit = "sentence"', '"speaker"', error=ConfigError):
        kaldi.load(classes=3, unit="sentence")


def test_iid_shards_keep_units_whole_and_other_partitions_are_refused() -> None:
    units = Units(torch.arange(90) % 30, "patient")
    records = Records(torch.zeros(90, 1), torch.zeros(90, dtype=torch.int64), units=units)
    rows = shards.split(records, Data(sizes=(1.0, 2.0)), 2, seed=3)
    assert units.divided(rows) is None
    assert [units.take(own).count for own in rows] == [10, 20]
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(90))
    assert units.divided((torch.arange(45), torch.arange(45, 90))) is not None
    with pytest.raises(ConfigError, match=r"dirichlet.*would divide the records of a patient"):
        shards.split(records, Data(partition="dirichlet"), 2, seed=3)
    with pytest.raises(ConfigError, match="exceeds the 30 units"):
        shards.split(records, Data(), 31, seed=3)


def test_units_fit_their_records() -> None:
    with pytest.raises(DataError, match="2 records but 3 units"):
        Records(torch.zeros(2, 1), torch.zeros(2), units=Units(torch.arange(3), "patient"))
    with pytest.raises(DataError, match="one whole number per record"):
        Units(torch.zeros(3), "patient")


def test_each_unit_is_drawn_at_the_rate_and_its_records_evenly() -> None:
    """4,000 batches: a unit's count has a standard deviation of 27 around 1,000; 5 of them (fixed seed)."""
    sizes = torch.arange(1, 21)
    units = Units(torch.repeat_interleave(torch.arange(20), sizes), "patient")
    drawn = torch.zeros(20)
    rows = torch.zeros(len(units.of))
    streams, each = Streams(7, 0), 6
    batches = UnitBatches(units, each, PoissonBatches(20, 5, streams), streams)
    assert (batches.expected, batches.rows) == (5.0, 30)
    for step in range(4000):
        batch = batches.draw(step)
        owners = units.of[batch].view(-1, each)
        assert bool((owners == owners[:, :1]).all())  # consecutive rows are of one unit
        whole = sizes[owners[:, 0]] <= each
        for mine, complete in zip(batch.view(-1, each), whole.tolist(), strict=True):
            assert len(mine.unique()) == (int(sizes[units.of[mine[0]]]) if complete else each)
        drawn[owners[:, 0]] += 1
        rows += torch.bincount(batch, minlength=len(rows))
    assert bool(((drawn - 1000).abs() < 5 * 27).all())
    share = rows / (drawn[units.of] * each / sizes[units.of])
    assert bool(((share - 1).abs() < 0.1).all())


def test_batches_of_fixed_size_are_filled_up_with_whole_blank_units() -> None:
    units, streams = Units(torch.arange(12) // 3, "patient"), Streams(1, 0)
    batches = UnitBatches(units, 2, PoissonBatches(4, 2, streams, fixed_rows=5), streams)
    for step in range(50):
        batch = batches.draw(step)
        assert len(batch) == batches.rows == 10
        known = batches.counted(batch)
        assert known is not None
        assert bool((batch[: 2 * known] < 12).all())
        assert bool((batch[2 * known :] == 12).all())


def test_what_batches_are_samples_of() -> None:
    records = Records(torch.zeros(6, 1), torch.zeros(6), units=Units(torch.tensor([0, 0, 1, 1, 1, 2]), "patient"))
    assert population(records, private=True).count == 3
    assert population(records, private=True, rows=torch.tensor([0, 1, 2])).count == 2
    assert population(records, private=False).unit == "record"


@pytest.mark.parametrize("name", ["patient_id", "Patient ID", "MRN", "subject", "user-id", "id", "person.name"])
def test_columns_that_identify_people_are_recognized(name: str) -> None:
    assert looks_like_people(["age", name]) == name
    assert looks_like_people(["age", "idle", "username_length", "humidity"]) is None
