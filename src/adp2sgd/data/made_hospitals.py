"""Made-up patients of four hospitals, in files of the heart data's format: for demonstrations and tests without it."""

from __future__ import annotations

import random
from pathlib import Path

from adp2sgd.data.heart import FOLDER, HOSPITALS

PATIENTS = {"cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200}  # as many as the real data has


def write_patients(root: Path) -> Path:
    """Write one file per hospital under `root`; returns `root`, for `options.data_dir`. Always the same patients."""
    folder = root / FOLDER
    folder.mkdir(parents=True)
    for seed, name in enumerate(HOSPITALS):
        draw = random.Random(seed)
        lines = [_patient(draw) for _ in range(PATIENTS[name])]
        (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n", encoding="ascii")
    return root


def _patient(draw: random.Random) -> str:
    """Age, heart rate and chest pain foretell the disease, as they do in the real data."""
    sick = draw.random() < 0.5
    age, rate = draw.gauss(58 if sick else 48, 8), draw.gauss(125 if sick else 160, 18)
    pain, angina = (4, 1) if draw.random() < (0.75 if sick else 0.2) else (draw.choice((1, 2, 3)), 0)
    sex, oldpeak = draw.choice((0, 1)), draw.uniform(0, 2)
    known = [f"{age:.1f}", sex, pain, 130, 240, 0, 0, f"{rate:.0f}", angina, f"{oldpeak:.3f}"]
    return ",".join(map(str, [*known, "?", "?", "?", int(sick)]))
