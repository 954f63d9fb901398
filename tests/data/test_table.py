"""The user's own tables."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from adp2sgd.data import images, kaldi, table
from adp2sgd.errors import Adp2sgdError, ConfigError
from data_files import DECLARED, kaldi_folder, patients, pixels, refused, utterances, write_image, write_table

pytestmark = pytest.mark.usefixtures("nothing_of_this_machine")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table_with_a_site_column(suffix: str, tmp_path: Path) -> None:
    columns = patients()
    source = table.load(write_table(tmp_path / f"t{suffix}", columns), site="clinic", **DECLARED)
    assert source.fitted is None
    assert source.classes == 2
    assert source.train.site_names == ("north", "south")
    assert len(source.train) + len(source.test) == 200
    assert 25 < len(source.test) < 75  # the hash is fixed: no false alarm
    expected = sorted(
        [age / 50 - 1, 0, kind == "mild", kind == "severe", kind is None, clinic == "south", ill]
        for age, kind, clinic, ill in zip(*columns.values(), strict=True)
    )
    found = []
    for records in (source.train, source.test):
        assert records.sites is not None
        found += torch.cat([records.inputs, records.sites[:, None], records.targets[:, None]], 1).tolist()
    np.testing.assert_allclose(sorted(found), np.array(expected, float), atol=1e-6)


def test_table_with_one_file_per_site(tmp_path: Path) -> None:
    columns = {name: values for name, values in patients().items() if name != "clinic"}
    write_table(tmp_path / "sites" / "berlin.csv", {name: values[:120] for name, values in columns.items()})
    write_table(tmp_path / "sites" / "athens.csv", {name: values[120:] for name, values in columns.items()})
    source = table.load(tmp_path / "sites", **DECLARED)
    assert source.train.site_names == ("athens", "berlin")
    assert source.train.inputs.shape[1] == 5  # the site is no feature
    assert source.train.sites is not None
    assert source.test.sites is not None
    assert (source.train.sites.bincount() + source.test.sites.bincount()).tolist() == [80, 120]
    write_table(tmp_path / "sites" / "cairo.csv", {"age": [1], "ill": [0]})
    with refused("cairo and athens differ in their columns"):
        table.load(tmp_path / "sites", **DECLARED)


def test_table_splits_by_a_column(tmp_path: Path) -> None:
    columns = {**patients(), "part": ["train"] * 150 + ["test"] * 50}
    source = table.load(write_table(tmp_path / "t.csv", columns), split="part", site="clinic", **DECLARED)
    assert source.test.targets.tolist() == columns["ill"][150:]
    columns["part"][7] = "dev"
    with refused("record 8", "column 'part' is neither train nor test", never=("dev",)):
        table.load(write_table(tmp_path / "t.csv", columns), split="part", **DECLARED)


def test_table_names_everything_that_it_fitted(tmp_path: Path) -> None:
    columns = {**patients(), "part": ["train"] * 150 + ["test"] * 50}
    columns["age"][3] = None
    path = write_table(tmp_path / "t.csv", columns)
    source = table.load(path, label="ill", site="clinic", split="part")
    assert source.fitted is not None
    for name in ("'age'", "'kind'", "'ill'"):
        assert name in source.fitted
    ages = source.train.inputs[:, 0]
    known = torch.arange(150) != 3
    assert ages[known].mean().abs() < 1e-5
    assert ages[known].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert source.train.inputs[3, :2].tolist() == [0, 1]
    for left_out in ("ranges", "categories", "classes"):  # each of them alone is enough to say so
        fewer = {name: value for name, value in DECLARED.items() if name != left_out}
        assert table.load(path, site="clinic", split="part", **fewer).fitted is not None


def test_adding_a_record_to_a_table_moves_no_other(tmp_path: Path) -> None:
    columns = patients()
    more = {name: [value, *columns[name]] for name, value in zip(columns, (44, "mild", "south", 1), strict=True)}
    before = table.load(write_table(tmp_path / "a.csv", columns), site="clinic", **DECLARED)
    after = table.load(write_table(tmp_path / "b.csv", more), site="clinic", **DECLARED)
    grown = [len(after.train) - len(before.train), len(after.test) - len(before.test)]
    assert sorted(grown) == [0, 1]
    for old, new, extra in ((before.train, after.train, grown[0]), (before.test, after.test, grown[1])):
        assert torch.equal(new.inputs[extra:], old.inputs)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"label": "sick"}, ("'sick' is none of the 4", "first line")),
        ({"classes": (0, 2)}, ("'ill' is none of the classes", "'2'")),
        ({"categories": {"kind": ("mild",)}}, ("kind", "none of its categories ['mild']")),
        ({"categories": {}, "ranges": {"age": (0, 100), "kind": (0, 1)}}, ("kind", "categories")),
        ({"ranges": {"age": (5, 5)}}, ("age", "low < high")),
        ({"ranges": {"age": (-math.inf, 5)}}, ("age", "finite")),
        ({"ranges": {"age": (-1e308, 1e308)}}, ("age", "finite")),
        ({"classes": (0, 1, 1)}, ("[0, 1, 1]", "twice")),
        ({"test_fraction": 0.0}, ("no test set",)),
    ],
)
def test_table_refuses_what_does_not_fit(change: dict[str, object], parts: tuple[str, ...], tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", patients())
    with refused(*parts, error=Adp2sgdError):
        table.load(path, **{**DECLARED, **change})


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ("OLD,mild,1,train", {"ranges": {"age": (0, 100)}}, "the value in column 'age' is no number"),
        ("iNf,mild,1,train", {}, "the value in column 'age' is not finite"),
        (
            "40,WILD,1,train",
            {"categories": {"kind": ("mild",)}},
            "the value in column 'kind' is none of its categories",
        ),
        ("40,mild,SICK,train", {"classes": (0, 1)}, "the value in column 'ill' is none of the classes"),
        ("40,mild,?,train", {}, "lacks a label"),
        ("40,mild,1,BOTH", {"split": "part"}, "the value in column 'part' is neither train nor test"),
    ],
)
def test_a_wrong_value_is_named_by_its_place_and_never_shown(
    row: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    rows = ["age,kind,ill,part", "30,mild,0,train", "31,mild,1,test"]
    (tmp_path / "north.csv").write_text("\n".join([*rows, "32,mild,0,train"]))
    (tmp_path / "south.csv").write_text("\n".join([*rows, row]))
    cells = [cell for cell in row.split(",") if cell.isupper() or cell == "iNf"]
    for path in (tmp_path, tmp_path / "south.csv"):
        with refused("south.csv, record 3: ", words, never=cells):
            table.load(path, **{"label": "ill", "test_fraction": 0.5, **changes})


def test_a_file_without_a_header_shows_no_record(tmp_path: Path) -> None:
    """Its first line is one, and not the names of columns."""
    record = "71.5,HIV,71.5"
    (tmp_path / "t.csv").write_text(f"{record}\n40,mild,1\n")
    with refused("t.csv", "columns 1 and 3 alike", never=("71.5", "HIV")):
        table.load(tmp_path / "t.csv", label="ill")
    (tmp_path / "t.csv").write_text("71.5,HIV,1\n40,mild,0\n")
    with refused("t.csv", "'ill' is none of the 3", never=("71.5", "HIV"), error=ConfigError):
        table.load(tmp_path / "t.csv", label="ill")
    (tmp_path / "s.csv").write_text("age,kind,ill\n40,mild,0\n")
    with refused("t and s differ in their columns", never=("71.5", "HIV")):
        table.load(tmp_path, label="ill")


def test_bytes_of_a_damaged_file_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"age,ill\n1\xe9,0\n")
    with refused("t.csv", "UTF-8", "byte 9", never=("e9",)):
        table.load(tmp_path / "t.csv", label="ill")
    where = kaldi_folder(tmp_path / "speech", utterances(("a", "b")))
    (where / "utt2spk").write_bytes(b"a-0 \xe9\n")
    with refused("utt2spk", "UTF-8", "byte 4", never=("e9",)):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    for i in range(8):
        write_image(tmp_path / "scans" / "a" / f"{i}.png", pixels(i))
    path = tmp_path / "scans" / "a" / "3.png"
    path.write_bytes(path.read_bytes()[:33] + b"\0\0\0\4S\1CR\0\0\0\0\0\0\0\0")
    with refused("3.png", "damaged", never=("S\\x01CR",)):
        images.load(tmp_path / "scans")


def test_a_file_is_a_site_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "north.csv").write_text("age,site,ill\n1,arm,0\n2,leg,1\n")
    (tmp_path / "south.csv").write_text("age,site,ill\n3,leg,0\n4,arm,1\n")
    with refused("column 'site' besides", "options.site"):
        table.load(tmp_path, label="ill", test_fraction=0.5)
    assert table.load(tmp_path, label="ill", test_fraction=0.5, site="site").train.site_names == ("arm", "leg")
    ignored = table.load(tmp_path, label="ill", test_fraction=0.5, ignore=["site"]).train
    assert (ignored.site_names, ignored.inputs.shape[1]) == (("north", "south"), 2)
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace("site", "limb"))
    for site in (None, "site"):
        assert table.load(tmp_path, label="ill", test_fraction=0.5, site=site).train.site_names == ("north", "south")
    (tmp_path / "north.CSV").write_text("age,limb,ill\n5,arm,0\n")
    with refused("two files of one name", "north.CSV"):
        table.load(tmp_path, label="ill", test_fraction=0.5)


def test_table_refuses_damaged_files(tmp_path: Path) -> None:
    with refused("nowhere.csv", "cannot read"):
        table.load(tmp_path / "nowhere.csv", label="ill")
    with refused(".xlsx", ".parquet"):
        table.load(tmp_path / "t.xlsx", label="ill")
    (tmp_path / "empty").mkdir()
    with refused("holds no", "one per site"):
        table.load(tmp_path / "empty", label="ill")
    (tmp_path / "t.csv").write_text("age,ill\n")
    with refused("no record"):
        table.load(tmp_path / "t.csv", label="ill")
    (tmp_path / "t.csv").write_text("age,ill\n1,0\n2\n")
    with refused("record 2", "1 fields"):
        table.load(tmp_path / "t.csv", label="ill")
    (tmp_path / "t.csv").write_text("age,age\n1,0\n")
    with refused("columns 1 and 2 alike"):
        table.load(tmp_path / "t.csv", label="age")
    whole = write_table(tmp_path / "t.parquet", patients()).read_bytes()
    (tmp_path / "t.parquet").write_bytes(whole[: len(whole) // 2])
    with refused("t.parquet", "Parquet"):
        table.load(tmp_path / "t.parquet", label="ill")
