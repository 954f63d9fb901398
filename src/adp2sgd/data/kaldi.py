"""Speech from Kaldi archives: frames and alignments by scp file, cut into windows of 21 frames."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from adp2sgd.data.folder import Source, check_labels, find, read_bytes
from adp2sgd.data.records import Records, Units
from adp2sgd.errors import ConfigError, DataError

SPEAKER = "speaker"
WINDOW = 21  # frames per record, as in the paper

# Public constants for natural-log mel energies at 100 frames/s: 16-bit speech runs from about 2 (silence) to 14
# (loud), and regression slopes are several times smaller per frame. Round values; never fitted on the records read.
LOG_MEL_MEAN, LOG_MEL_STD = 7.0, 2.0
DELTA_STD, DELTA2_STD = 0.3, 0.1

SLOPE = np.array([-2.0, -1.0, 0.0, 1.0, 2.0]) / 10  # least-squares slope over ±2 frames
CURVE = np.convolve(SLOPE, SLOPE)  # the slope of the slope, over ±4 frames
REACH = len(CURVE) // 2

PLACE = re.compile(r"([^|\[]+):(\d+)(\[[\d:,]+\])?")  # file, offset, range; never a command ("… |"), which would run

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class _Speech:
    """Utterances one after another: `frames` [frames, features], `labels` [frames], `lengths` in frames."""

    frames: Floats
    labels: npt.NDArray[np.int32]
    lengths: Ints
    speakers: list[str]


def load(
    data_dir: str | Path | None = None,
    *,
    classes: int,
    test_speakers: Collection[str] | None = None,
    normalize: str = "fixed",
    unit: str | None = None,
    name: str = "speech",
) -> Source:
    """Windows of 21 frames with deltas and double deltas, float32 [n, 21, 3·features]; targets [n, 21].

    Reads NAME/train and NAME/test, or with `test_speakers` one folder, each with feats.scp, ali.scp and utt2spk;
    paths in an scp are absolute or relative to it. Windows do not overlap and the rest of an utterance is dropped.
    Sites are speakers. A record is a window, not a speaker; its deltas look 4 frames beyond its ends. With `unit` =
    "speaker" a private run protects a speaker with all windows.
    """
    if unit not in (None, SPEAKER):
        raise ConfigError(f'unit = "{unit}" is unknown to speech; use "{SPEAKER}", or leave it out')
    if normalize not in NORMALIZERS:
        raise ConfigError(f"normalize = {normalize!r} is unknown; use one of {sorted(NORMALIZERS)}")
    markers = ("feats.scp",) if test_speakers is not None else ("train/feats.scp",)
    folder = find((name,), markers, data_dir)
    if folder is None:
        raise DataError(f"no {name}/{markers[0]} found; put the folder {name} into the data folder or set ADP2SGD_DATA")
    if test_speakers is None:
        train, test = _read(folder / "train"), _read(folder / "test")
        if shared := set(train.speakers) & set(test.speakers):
            raise DataError(f"speaker {min(shared)} is in both train and test of {folder}; move its utterances to one")
    else:
        train, test = _split(_read(folder), test_speakers, folder)
    names = tuple(sorted({*train.speakers, *test.speakers}))
    parts = [_windows(part, names, classes, normalize, folder) for part in (train, test)]
    if unit is not None:
        parts = [replace(part, units=Units(part.sites, unit)) for part in parts if part.sites is not None]
    fitted = "mean and variance of each speaker's frames" if normalize == "speaker" else None
    return Source(train=parts[0], test=parts[1], classes=classes, fitted=fitted, identifier=None if unit else SPEAKER)


def _read(folder: Path) -> _Speech:
    speaker_of = dict(_pairs(folder / "utt2spk"))
    states = _arrays(folder / "ali.scp")
    frames: list[Floats] = []
    labels, speakers = [], []
    for utterance, matrix in _arrays(folder / "feats.scp").items():
        if utterance not in states or utterance not in speaker_of:
            where = "utt2spk" if utterance in states else "ali.scp"
            raise DataError(f"{folder / where} lacks utterance {utterance} of feats.scp; add it or drop the utterance")
        if matrix.ndim != 2 or states[utterance].shape != matrix.shape[:1]:
            raise DataError(
                f"{folder}: utterance {utterance} has features {matrix.shape} but an alignment of "
                f"{states[utterance].shape}; both need one row per frame"
            )
        if frames and matrix.shape[1] != frames[0].shape[1]:
            raise DataError(
                f"{folder}: utterance {utterance} has {matrix.shape[1]} features, others {frames[0].shape[1]}; "
                "compute them alike"
            )
        frames.append(matrix)
        labels.append(states[utterance])
        speakers.append(speaker_of[utterance])
    if not frames:
        raise DataError(f"{folder / 'feats.scp'} names no utterance; compute features first")
    lengths = np.array([len(matrix) for matrix in frames])
    return _Speech(np.concatenate(frames).astype(np.float32, copy=False), np.concatenate(labels), lengths, speakers)


def _pairs(path: Path) -> list[tuple[str, str]]:
    """The lines "key value" of a Kaldi text file."""
    pairs = []
    try:
        lines = read_bytes(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8 (from byte {error.start} on); save it as such") from None
    for number, line in enumerate(lines, 1):
        fields = line.split(maxsplit=1)
        if len(fields) != 2:
            raise DataError(f"{path}, line {number} is not a key and a value; correct the line")
        pairs.append((fields[0], fields[1].strip()))
    return pairs


def _arrays(scp: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Every array that an scp file points to."""
    import kaldiio

    arrays = {}
    with ExitStack() as stack:
        opened: dict[str, BinaryIO] = {}
        for number, (key, place) in enumerate(_pairs(scp), 1):
            if not (match := PLACE.fullmatch(place)):
                raise DataError(f"{scp}, line {number}: only FILE:OFFSET in a binary archive is read; correct the line")
            ark, offset = match[1], match[2]
            if ark not in opened:
                try:
                    opened[ark] = stack.enter_context((scp.parent / ark).open("rb"))
                except OSError as error:
                    raise DataError(f"{scp}: cannot read {ark} ({error.strerror}); paths are relative to it") from None
            opened[ark].seek(int(offset))
            if opened[ark].read(2) != b"\0B":  # kaldiio would also run pickles
                raise DataError(
                    f"{scp}: {ark} holds no binary Kaldi array at {offset}; write the archive and scp again"
                )
            try:
                arrays[key] = kaldiio.load_mat(place, fd_dict=opened)
            except (ValueError, AssertionError, IndexError, struct.error):
                raise DataError(f"{scp}: {ark} is truncated or damaged at {offset} ({key}); write it again") from None
    return arrays


def _split(speech: _Speech, test_speakers: Collection[str], folder: Path) -> tuple[_Speech, _Speech]:
    """Training and test utterances, by speaker."""
    if unknown := set(test_speakers) - set(speech.speakers):
        raise DataError(f"test speaker {min(unknown)} is not in {folder / 'utt2spk'}; use one of its speakers")
    test = np.array([speaker in test_speakers for speaker in speech.speakers])
    frame_test = np.repeat(test, speech.lengths)
    parts = []
    for chosen, rows in ((~test, ~frame_test), (test, frame_test)):
        speakers = [speaker for speaker, keep in zip(speech.speakers, chosen, strict=True) if keep]
        parts.append(_Speech(speech.frames[rows], speech.labels[rows], speech.lengths[chosen], speakers))
    return parts[0], parts[1]


def _windows(speech: _Speech, names: tuple[str, ...], classes: int, normalize: str, folder: Path) -> Records:
    """Cut each utterance into consecutive windows of 21 frames, from its start."""
    counts = speech.lengths // WINDOW
    if not counts.sum():
        raise DataError(f"{folder}: no utterance has {WINDOW} frames; longer utterances are needed")
    ends = np.cumsum(speech.lengths)
    start, end = np.repeat(ends - speech.lengths, counts), np.repeat(ends, counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = start + WINDOW * within
    at = first[:, None] + np.arange(-REACH, WINDOW + REACH)
    inputs = _with_deltas(speech.frames[np.clip(at, start[:, None], end[:, None] - 1)])  # ends of utterances repeat
    index = {name: i for i, name in enumerate(names)}
    sites = np.repeat([index[speaker] for speaker in speech.speakers], counts)
    NORMALIZERS[normalize](inputs, sites)
    targets = check_labels(speech.labels, classes, folder)[torch.from_numpy(first)[:, None] + torch.arange(WINDOW)]
    return Records(torch.from_numpy(inputs), targets, torch.from_numpy(sites), names)


def _with_deltas(context: Floats) -> Floats:
    """[n, 4 + 21 + 4, features] → [n, 21, 3·features]: the values, their slope, the slope's slope.

    The same numbers as Kaldi's add-deltas with its default window of ±2 frames.
    """
    features = context.shape[2]
    result = np.empty((len(context), WINDOW, 3 * features), np.float32)
    result[:, :, :features] = context[:, REACH:-REACH]
    np.matmul(_band(SLOPE), context, out=result[:, :, features : 2 * features])
    np.matmul(_band(CURVE), context, out=result[:, :, 2 * features :])
    return result


def _band(taps: npt.NDArray[np.float64]) -> Floats:
    """The matrix [21, 29] whose row t weighs the frames around frame t with `taps`."""
    padded = np.pad(taps, REACH - len(taps) // 2)
    band = np.zeros((WINDOW, WINDOW + 2 * REACH), np.float32)
    for row in range(WINDOW):
        band[row, row : row + len(padded)] = padded
    return band


def _fixed(inputs: Floats, speakers: Ints) -> None:
    """By the public constants above, in place: each frame on its own."""
    del speakers
    features = inputs.shape[2] // 3
    inputs -= np.repeat(np.array([LOG_MEL_MEAN, 0, 0], np.float32), features)
    inputs /= np.repeat(np.array([LOG_MEL_STD, DELTA_STD, DELTA2_STD], np.float32), features)


def _per_speaker(inputs: Floats, speakers: Ints) -> None:
    """Mean 0 and variance 1 over each speaker's windows, in place: depends on the records, so never private."""
    for speaker in np.unique(speakers):
        own = inputs[speakers == speaker]
        inputs[speakers == speaker] = (own - own.mean((0, 1))) / np.maximum(own.std((0, 1)), 1e-5)


NORMALIZERS = {"fixed": _fixed, "speaker": _per_speaker}
