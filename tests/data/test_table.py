"""The user's own tables."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import adp2sgd
from adp2sgd.config import Config, Optimizer, Privacy
from adp2sgd.data import images, kaldi, table
from adp2sgd.data.encoder import Encoder
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
        ({"classes": (0, 2)}, ("'ill' is none of the classes [0, 2]",)),
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


def test_a_measured_label_is_scaled_by_its_range_and_told_in_its_own_unit(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"age": list(range(40)), "cost": [100 + 5 * i for i in range(40)]})
    declared = {"label": "cost", "target": "number", "ranges": {"age": (0, 40), "cost": (100, 300)}}
    source = table.load(path, **declared)
    assert (source.fitted, source.classes, source.metrics) == (None, 1, ("mae", "r2"))
    ages, costs = (source.train.inputs[:, 0] + 1) * 20, source.train.targets
    torch.testing.assert_close(costs, (5 * ages) / 100 - 1)
    assert source.encoder is not None
    assert source.encoder.decode(costs[:3, None]) == pytest.approx((100 + 5 * ages[:3]).tolist())
    assert source.loss is not None
    assert source.loss(torch.tensor([[0.5], [1.0]]), torch.tensor([0.0, 1.0])).tolist() == [0.25, 0.0]
    fitted = table.load(path, label="cost", target="number", ranges={"age": (0, 40)})
    assert fitted.fitted == "mean and deviation of 'cost' (declare options.ranges)"
    assert fitted.train.targets.mean().abs() < 1e-5
    assert fitted.encoder is not None
    torch.testing.assert_close(
        torch.tensor(fitted.encoder.decode(fitted.train.targets[:, None])),
        torch.tensor(source.encoder.decode(costs[:, None])),
    )


def test_decimals_are_not_taken_for_classes_unasked(tmp_path: Path) -> None:
    many = {"age": list(range(200)), "dose": [i + 0.5 for i in range(200)], "name": [f"NAME{i}" for i in range(200)]}
    path = write_table(tmp_path / "t.csv", many)
    with refused('options.target = "number"', "decimals", error=ConfigError, never=("0.5",)):
        table.load(path, label="dose", ignore=["name"])
    with refused("'name'", "100 values", error=ConfigError, never=("NAME",)):
        table.load(path, label="name", ignore=["dose"])
    with refused("'name'", "options.ignore", never=("NAME",)):
        table.load(path, label="dose", target="number")
    grades = write_table(tmp_path / "g.csv", {"age": list(range(90)), "grade": [1 + i % 3 / 2 for i in range(90)]})
    assert table.load(grades, label="grade").classes == 3  # few decimals are classes


def test_class_weights_multiply_the_loss_of_their_records(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", patients())
    source = table.load(path, **DECLARED, ignore=["clinic"], class_weights={"1": 3.0, "0": 0.5})
    assert source.loss is not None
    outputs, labels = torch.tensor([[0.3, -1.0], [0.3, -1.0]]), torch.tensor([0, 1])
    plain = torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
    torch.testing.assert_close(source.loss(outputs, labels), plain * torch.tensor([0.5, 3.0]))
    assert table.load(path, **DECLARED, ignore=["clinic"]).loss is None
    for wrong in ({"1": 3.0}, {"1": 3.0, "0": -1}, {"1": 3.0, "0": 1, "2": 1}, {"1": "many", "0": 1}):
        with refused("class_weights", "each class", error=ConfigError):
            table.load(path, **DECLARED, class_weights=wrong)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found_in_the_first_line(delimiter: str, tmp_path: Path) -> None:
    rows = [["age", "kind, or type", "ill"], *([str(i), "a, b; c", str(i % 2)] for i in range(40))]
    lines = [delimiter.join(f'"{cell}"' for cell in row) for row in rows]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    source = table.load(tmp_path / "t.csv", label="ill", ignore=["kind, or type"], ranges={"age": (0, 40)})
    assert source.train.inputs.shape[1] == 2
    with refused("column 'ill' is none of the 1", "options.delimiter", error=ConfigError):
        table.load(tmp_path / "t.csv", label="ill", delimiter="!")


def test_encodings_and_decimal_commas(tmp_path: Path) -> None:
    text = "größe;art;krank\n" + "".join(f"{100 + i},5;{'ärger' if i % 2 else 'mild'};{i % 2}\n" for i in range(40))
    declared = {
        "label": "krank",
        "classes": (0, 1),
        "ranges": {"größe": (100, 150)},
        "categories": {"art": ("mild", "ärger")},
        "decimal": ",",
    }
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    expected = table.load(path, **declared).train.inputs
    assert expected[:, 0].min() < -0.9
    for encoding in ("utf-8-sig", "utf-16"):  # with a byte order mark, which tells
        path.write_text(text, encoding=encoding)
        assert torch.equal(table.load(path, **declared).train.inputs, expected)
    path.write_text(text, encoding="cp1252")
    with refused("UTF-8", "options.encoding", '"cp1252"'):
        table.load(path, **declared)
    assert torch.equal(table.load(path, **declared, encoding="cp1252").train.inputs, expected)
    with refused("record 1", "'größe' is no number", 'options.decimal = ","', never=("100,5",)):
        table.load(path, **{**declared, "decimal": "."}, encoding="cp1252")
    with refused("encoding", "cp99999", error=ConfigError):
        table.load(path, **declared, encoding="cp99999")
    path.write_text("age;ill\n" + "".join(f"1.23{i},5;0\n" for i in range(8)) + "1.5;1\n")
    with refused("record 9", "no number", never=("1.5",)):  # neither 15 nor 1.5 for certain
        table.load(path, label="ill", ranges={"age": (0, 2000)}, decimal=",", test_fraction=0.5)


def test_dates_are_scaled_by_their_range(tmp_path: Path) -> None:
    dates = [f"{2001 + i}-01-01" for i in range(20)]
    path = write_table(tmp_path / "t.csv", {"seen": [*dates, None], "ill": [i % 2 for i in range(21)]})
    for bounds in (("2001-01-01", "2021-01-01"), (datetime.date(2001, 1, 1), datetime.date(2021, 1, 1))):
        source = table.load(path, label="ill", classes=(0, 1), ranges={"seen": bounds})
        assert source.fitted is None
        inputs = torch.cat([source.train.inputs, source.test.inputs])
        known = inputs[inputs[:, 1] == 0, 0].sort().values
        torch.testing.assert_close(known, torch.arange(20) / 10 - 1, atol=2e-3, rtol=0)
        assert inputs[inputs[:, 1] == 1].tolist() == [[0, 1]]
    assert "mean and deviation of 'seen'" in str(table.load(path, label="ill").fitted)
    german = write_table(tmp_path / "g.csv", {"seen": [f"31.12.{2001 + i}" for i in range(20)], "ill": [0, 1] * 10})
    declared = {"label": "ill", "ranges": {"seen": ("2001-01-01", "2021-01-01")}}
    with refused("record 1", "no date", "YYYY-MM-DD", "options.date_format", never=("31.12",)):
        table.load(german, **declared)
    assert table.load(german, **declared, date_format="%d.%m.%Y").train.inputs[:, 0].max() <= 1


def test_whole_numbers_as_categories_match_every_way_to_write_them(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("pain,ill\n" + "1,0\n1.0,1\n2,0\n02,1\n" * 8)
    source = table.load(tmp_path / "t.csv", label="ill", classes=(0, 1), categories={"pain": (1, 2)})
    assert source.train.inputs.shape[1] == 3
    assert source.train.inputs.sum(0).tolist()[2] == 0
    with refused("record 2", "none of its categories ['1', '2']", never=("1.0",)):  # texts match themselves alone
        table.load(tmp_path / "t.csv", label="ill", classes=(0, 1), categories={"pain": ("1", "2")})


def test_an_encoder_reads_new_rows_without_the_training_data(tmp_path: Path) -> None:
    columns = {
        **patients(),
        "seen": [f"{1990 + i % 30}-05-01" for i in range(200)],
        "weight": [50 + i for i in range(200)],
    }
    path = write_table(tmp_path / "t.csv", columns)
    source = table.load(path, site="clinic", **{**DECLARED, "classes": ("0", "1")}, test_fraction=0.5)
    assert source.encoder is not None
    encoder = Encoder.from_dict(json.loads(json.dumps(source.encoder.to_dict())))
    assert encoder == source.encoder
    assert encoder.width == source.train.inputs.shape[1]
    new = encoder.encode(encoder.read(path).columns)
    known = {tuple(row) for row in torch.cat([source.train.inputs, source.test.inputs]).tolist()}
    assert {tuple(row) for row in new.tolist()} == known
    rows = [{"age": 50, "kind": None, "seen": datetime.date(2000, 1, 1), "weight": 70.5}]
    assert encoder.encode(rows)[0, :5].tolist() == [0, 0, 0, 0, 1]
    assert encoder.decode(torch.tensor([[0.1, 0.9], [2.0, 0.0]])) == ["1", "0"]
    with refused("no column 'kind'"):
        encoder.encode([{"age": 50}])
    with refused("row 1", "'kind' is none of its categories", never=("WILD",)):
        encoder.encode([rows[0], {**rows[0], "kind": "WILD"}])


@pytest.mark.parametrize(
    "options",
    [
        {"label": "cost", "target": "number", "ranges": {"age": (0, 100), "cost": (0, 300)}, "ignore": ["ill"]},
        {"label": "ill", "classes": ("n", "y"), "class_weights": {"n": 1.0, "y": 4.0}, "ignore": ["cost"]},
    ],
)
def test_private_training_on_numbers_and_with_class_weights(options: dict[str, object], tmp_path: Path) -> None:
    ages = [i % 100 for i in range(400)]
    columns = {"age": ages, "cost": [3 * age for age in ages], "ill": ["y" if age > 60 else "n" for age in ages]}
    path = write_table(tmp_path / "t.csv", columns)
    config = Config(
        task="table/logistic",
        learners=2,
        epochs=10,
        batch_size=32,
        seed=1,
        options={"ranges": {"age": (0, 100)}, "path": str(path), "test_fraction": 0.2, **options},
        optimizer=Optimizer(lr=0.5),
        privacy=Privacy(mode="private", epsilon=8.0, delta=1e-4),
    )
    run = adp2sgd.simulate(config)
    first, last = run.curve[0].loss, run.curve[-1].loss
    assert first is not None
    assert last is not None
    assert last < 0.7 * first
    assert (run.accuracy is None) == ("target" in options)


def test_an_empty_cell_of_a_site_is_refused_by_its_place(tmp_path: Path) -> None:
    columns = patients()
    columns["clinic"][4] = None
    with refused("record 5", "'clinic' names no site"):
        table.load(write_table(tmp_path / "t.csv", columns), site="clinic", **DECLARED)
