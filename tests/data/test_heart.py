"""The heart disease data, from small files in its real format and from the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adp2sgd.data import heart
from data_files import PATIENT, SHARED, heart_files, refused

pytestmark = pytest.mark.usefixtures("nothing_of_this_machine")


def test_heart_encodes_by_public_ranges(tmp_path: Path) -> None:
    heart_files(tmp_path, {"va": [PATIENT.replace("145.0", f"{100 + i}") for i in range(21)]})
    source = heart.load(tmp_path)
    records = source.train
    assert records.sites is not None
    assert records.site_names == tuple(heart.HOSPITALS)
    assert records.inputs.shape[1] == 38
    assert source.fitted is None
    row = records.inputs[records.sites == 3][0].tolist()
    age, sex, pain = row[0:2], row[2:5], row[5:10]
    assert age == pytest.approx([2 * 43 / 70 - 1, 0])
    assert sex == [0, 1, 0]
    assert pain == [1, 0, 0, 0, 0]
    assert row[-4:] == [0, 1, 0, 0]  # thal = 6
    swiss = records.inputs[records.sites == 2][0].tolist()
    assert swiss[-4:] == [0, 0, 0, 1]  # thal = ?
    assert swiss[12:14] == [0, 1]  # cholesterol 0 was not measured
    assert records.inputs.abs().max() <= 1


def test_removing_a_patient_changes_no_other(tmp_path: Path) -> None:
    """Sensitivity from the raw files: neighbours differ in one row of one set, and in nothing else."""
    rows = [PATIENT.replace("145.0", f"{100 + i}").replace("233.0", f"{150 + 7 * i}") for i in range(40)]
    heart_files(tmp_path / "all", {"va": rows})
    for removed in (0, 17, 39):
        heart_files(tmp_path / str(removed), {"va": rows[:removed] + rows[removed + 1 :]})
        whole, less = heart.load(tmp_path / "all"), heart.load(tmp_path / str(removed))
        gone = 0
        for full, part in ((whole.train, less.train), (whole.test, less.test)):
            left = [tuple(row) for row in full.inputs.tolist()]
            for row in part.inputs.tolist():
                left.remove(tuple(row))
            gone += len(left)
        assert gone == 1


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (PATIENT[:-2], ("13 fields", "14")),
        (PATIENT[:-1] + "5", ("diagnosis", "0 … 4")),
        (PATIENT[:-1] + "?", ("diagnosis",)),
        (PATIENT.replace("145.0", "HIGH"), ("trestbps is not a number",)),
        ("63.0,1.0,9" + PATIENT[10:], ("cp is none of",)),
    ],
)
def test_heart_refuses_damaged_records(line: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    heart_files(tmp_path, {"hungarian": [PATIENT, line]})
    with refused("processed.hungarian.data, line 2", *parts, never=("HIGH", "9", "5", "?;")):
        heart.load(tmp_path)


def test_heart_refuses_an_incomplete_folder(tmp_path: Path) -> None:
    (heart_files(tmp_path) / "processed.cleveland.data").unlink()
    with refused("processed.cleveland.data", "cannot read"):
        heart.load(tmp_path)


@pytest.mark.skipif(not (SHARED / "heart_disease").is_dir(), reason="the real data is not at hand")
def test_real_heart_teaches_more_together_than_alone() -> None:
    from sklearn.linear_model import LogisticRegression

    source = heart.load(SHARED)
    train, test = source.train, source.test
    assert train.sites is not None
    assert test.sites is not None
    assert (train.sites.bincount() + test.sites.bincount()).tolist() == [303, 294, 123, 200]
    assert all(0.15 < part < 0.35 for part in (test.sites.bincount() / torch.tensor([303, 294, 123, 200])).tolist())

    def mean_accuracy(rows: torch.Tensor) -> float:
        model = LogisticRegression(max_iter=2000).fit(train.inputs[rows].numpy(), train.targets[rows].numpy())
        right = torch.from_numpy(model.predict(test.inputs.numpy())) == test.targets
        return sum(right[test.sites == site].float().mean().item() for site in range(4)) / 4

    alone = [mean_accuracy(train.sites == site) for site in range(4)]
    pooled = mean_accuracy(train.sites >= 0)
    assert pooled > 0.8
    assert pooled > max(alone)
