"""Data that needs no files: generated blobs, generated quadratics, and the digits that come with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from adp2sgd.data.records import Records
from adp2sgd.errors import DataError


def blobs(*, records: int, features: int, classes: int, spread: float, seed: int) -> tuple[Records, Records]:
    """Gaussian clouds around random centres, one per class, as (training, held-out) records, 4 to 1."""
    stream = np.random.default_rng([seed, 0xB10B])
    centres = stream.normal(size=(classes, features))
    labels = stream.integers(classes, size=records)
    points = centres[labels] + spread * stream.normal(size=(records, features))
    everything = Records(torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels))
    return _hold_out(everything, every=5)


def quadratic(*, records: int, dimension: int, noise: float, seed: int) -> tuple[Records, Records]:
    """Points a_i = 1 + noise·N(0, I) for the loss ½‖w − a_i‖²: optimum mean(a), gradient variance noise²·dimension."""
    stream = np.random.default_rng([seed, 0x9A4D])
    points = 1 + noise * stream.normal(size=(records, dimension))
    everything = Records(torch.from_numpy(points), torch.zeros(records, dtype=torch.int64))
    return everything, everything


def digits() -> tuple[Records, Records]:
    """1,797 images [1, 8, 8] of handwritten digits, values 0 to 16; every fifth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits come with scikit-learn, which is missing; pip install scikit-learn") from None
    found = load_digits()
    images = torch.from_numpy(found.images.astype(np.float32)).unsqueeze(1)
    return _hold_out(Records(images, torch.from_numpy(found.target.astype(np.int64))), every=5)


def _hold_out(records: Records, every: int) -> tuple[Records, Records]:
    held_out = torch.arange(len(records)) % every == every - 1
    return records.take(torch.nonzero(~held_out).flatten()), records.take(torch.nonzero(held_out).flatten())
