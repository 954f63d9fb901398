"""Kaldi archives, from small ones that the test writes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from adp2sgd.data import kaldi
from adp2sgd.errors import ConfigError
from data_files import kaldi_folder, refused, utterances

pytestmark = pytest.mark.usefixtures("nothing_of_this_machine")


def naive_deltas(x: np.ndarray) -> np.ndarray:
    """Slope over ±2 frames and its slope, with the first and last frame of `x` repeated; frame by frame."""

    def at(t: int) -> np.ndarray:
        return x[min(max(t, 0), len(x) - 1)].astype(np.float64)

    def slope(t: int) -> np.ndarray:
        return sum(k * (at(t + k) - at(t - k)) for k in (1, 2)) / 10

    curve = [sum(k * (slope(t + k) - slope(t - k)) for k in (1, 2)) / 10 for t in range(len(x))]
    return np.concatenate([x, [slope(t) for t in range(len(x))], curve], axis=1)


@pytest.mark.parametrize("absolute", [False, True])
def test_kaldi_windows_equal_a_loop_over_frames(absolute: bool, tmp_path: Path) -> None:
    train, test = utterances(("a", "b", "c")), utterances(("d", "e"))
    kaldi_folder(tmp_path / "speech" / "train", train, absolute)
    kaldi_folder(tmp_path / "speech" / "test", test, absolute)
    source = kaldi.load(tmp_path, classes=9)
    assert source.fitted is None
    for records, speech in ((source.train, train), (source.test, test)):
        inputs, targets, owners = [], [], []
        for key, (frames, labels) in speech.items():
            full = naive_deltas(frames)
            full[:, :5] -= 7
            full /= np.repeat([2, 0.3, 0.1], 5)
            for start in range(0, len(frames) - 20, 21):
                inputs.append(full[start : start + 21])
                targets.append(labels[start : start + 21])
                owners.append(key.split("-")[0])
        assert records.inputs.shape == (len(inputs), 21, 15)
        assert records.inputs.dtype == torch.float32
        np.testing.assert_allclose(records.inputs.numpy(), np.array(inputs), atol=1e-4)
        assert np.array_equal(records.targets.numpy(), np.array(targets))
        assert records.sites is not None
        assert [records.site_names[s] for s in records.sites] == owners


def test_kaldi_split_by_named_speakers(tmp_path: Path) -> None:
    kaldi_folder(tmp_path / "speech", utterances(("a", "b", "c")))
    source = kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    assert source.train.sites is not None
    assert source.test.sites is not None
    assert {source.train.site_names[s] for s in source.train.sites} == {"a", "c"}
    assert {source.test.site_names[s] for s in source.test.sites} == {"b"}
    with refused("test speaker z"):
        kaldi.load(tmp_path, classes=9, test_speakers=["b", "z"])


def test_kaldi_statistics_per_speaker_are_named(tmp_path: Path) -> None:
    kaldi_folder(tmp_path / "speech", utterances(("a", "b", "c")))
    source = kaldi.load(tmp_path, classes=9, test_speakers=["b"], normalize="speaker")
    assert source.fitted is not None
    assert "speaker" in source.fitted
    assert source.train.sites is not None
    own = source.train.inputs[source.train.sites == 0].flatten(0, 1)
    assert own.mean(0).abs().max() < 1e-4
    assert (own.std(0, correction=0) - 1).abs().max() < 1e-3
    with refused("normalize = 'site'", "fixed", "speaker", error=ConfigError):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"], normalize="site")


def kaldi_fault(where: Path, fault: str) -> None:
    """Damage one thing in a Kaldi folder."""
    ali, feats = (where / "ali.scp").read_text().splitlines(), (where / "feats.scp").read_text().splitlines()
    ark = (where / "feats.ark").read_bytes()
    match fault:
        case "no alignment":
            (where / "ali.scp").write_text("\n".join(ali[1:]))
        case "no speaker":
            (where / "utt2spk").write_text("a-1 a\n")
        case "other length":
            keys = [line.split()[0] for line in ali]
            places = [line.split()[1] for line in ali]
            (where / "ali.scp").write_text("\n".join(f"{k} {p}" for k, p in zip(keys, places[::-1], strict=True)))
        case "truncated":
            (where / "feats.ark").write_bytes(ark[: len(ark) * 2 // 3])
        case "truncated labels":
            (where / "ali.ark").write_bytes((where / "ali.ark").read_bytes()[:-7])
        case "no ark":
            (where / "feats.ark").unlink()
        case "offset":
            (where / "feats.scp").write_text("\n".join([f"{feats[0].rsplit(':')[0]}:3", *feats[1:]]))
        case "bad line":
            (where / "feats.scp").write_text("\n".join([feats[0].split()[0], *feats[1:]]))


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("no alignment", ("ali.scp", "a-0")),
        ("no speaker", ("utt2spk", "a-0")),
        ("other length", ("a-0", "one row per frame")),
        ("truncated", ("feats.ark", "write")),
        ("truncated labels", ("ali.ark", "truncated")),
        ("no ark", ("feats.ark", "cannot read")),
        ("offset", ("feats.ark", "no binary Kaldi array")),
        ("bad line", ("feats.scp, line 1",)),
    ],
)
def test_kaldi_refuses_damaged_folders(fault: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    where = kaldi_folder(tmp_path / "speech", utterances(("a", "b")))
    kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    kaldi_fault(where, fault)
    with refused(*parts):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"])


def test_kaldi_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with refused("speech/train/feats.scp", "ADP2SGD_DATA"):
        kaldi.load(tmp_path, classes=9)
    speech = utterances(("a", "b"))
    kaldi_folder(tmp_path / "one" / "speech", speech)
    with refused("label number", "outside 0 … 7"):
        kaldi.load(tmp_path / "one", classes=8, test_speakers=["b"])
    for part in ("train", "test"):
        kaldi_folder(tmp_path / "both" / "speech" / part, speech)
    with refused("speaker a", "both"):
        kaldi.load(tmp_path / "both", classes=9)
    kaldi_folder(tmp_path / "odd" / "speech", {**speech, "b-9": utterances(("c",), features=6)["c-0"]})
    with refused("b-9", "6 features", "others 5"):
        kaldi.load(tmp_path / "odd", classes=9, test_speakers=["b"])


@pytest.mark.parametrize("place", ["touch HERE/pwned |", "| touch HERE/pwned", "feats.ark:4[ touch HERE/pwned |"])
def test_kaldi_never_runs_commands_from_an_scp(place: str, tmp_path: Path) -> None:
    where = kaldi_folder(tmp_path / "speech", utterances(("a", "b")))
    (where / "feats.scp").write_text(f"a-0 {place.replace('HERE', str(tmp_path))}\n")
    with refused("feats.scp, line 1", "FILE:OFFSET", never=("pwned",)):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    assert not (tmp_path / "pwned").exists()


def test_kaldi_never_runs_pickles_from_an_archive(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "was here"),)

    where = kaldi_folder(tmp_path / "speech", utterances(("a", "b")))
    (where / "feats.ark").write_bytes(b"a-0 PKL" + pickle.dumps(Evil()))
    with refused("no binary Kaldi array"):
        kaldi.load(tmp_path, classes=9, test_speakers=["b"])
    assert not (tmp_path / "was here").exists()


def test_real_speech(real_data: Callable[[str], Path]) -> None:
    source = kaldi.load(real_data("speech"), classes=320)
    assert source.train.inputs.shape == (29_646, 21, 120)
    assert source.test.inputs.shape == (7_608, 21, 120)
    assert source.train.targets.shape == (29_646, 21)
    assert source.train.sites is not None
    assert source.test.sites is not None
    assert len(source.train.sites.unique()) == 48
    assert not set(source.train.sites.tolist()) & set(source.test.sites.tolist())
    for part in source.train.inputs[::50].split(40, dim=2):  # the public constants suit the data
        assert part.mean().abs() < 0.2
        assert 0.8 < part.std() < 1.2
