"""Patients who come more than once: what ε means per record and per patient.

    python examples/repeat_visits.py [--data-dir DIR] [--epsilon 3] [--out FOLDER]

Each patient of the UCI Heart Disease data gets one to six synthetic visits: the same diagnosis, with blood pressure,
cholesterol and heart rate measured anew. The visits are written as one CSV file per hospital. Two private runs follow:
one promises ε per visit, the other per patient (`options.unit = "patient_id"`). Without units some held-out visits are
of patients whose other visits were trained on, so the first accuracy is flattered.
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
from pathlib import Path

from adp2sgd.config import Config, Data, Optimizer, Privacy, Topology
from adp2sgd.data.folder import find
from adp2sgd.data.heart import CATEGORIES, COLUMNS, FOLDER, HOSPITALS, RANGES
from adp2sgd.data.heart import load as load_heart
from adp2sgd.engine import simulate
from adp2sgd.run_folder import Run

MOST_VISITS = 6
SPREAD = {"trestbps": 8, "chol": 20, "thalach": 10}  # standard deviation between visits


def write_visits(folder: Path, data_dir: str | None = None, seed: int = 0) -> int:
    """One CSV file per hospital below `folder`; returns the number of visits."""
    load_heart(data_dir)  # downloads the files where they are missing
    found = find((FOLDER, "heart-disease"), tuple(f"processed.{name}.data" for name in HOSPITALS), data_dir)
    assert found is not None
    draw, visits = random.Random(seed), 0
    for hospital in HOSPITALS:
        with (folder / f"{hospital}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["patient_id", *COLUMNS, "ill"])
            for number, line in enumerate((found / f"processed.{hospital}.data").read_text().split()):
                *values, diagnosis = ("" if value in ("?", "-9") else float(value) for value in line.split(","))
                for _ in range(draw.randint(1, MOST_VISITS)):
                    measured = [
                        value if value == "" or name not in SPREAD else round(value + draw.gauss(0, SPREAD[name]))
                        for name, value in zip(COLUMNS, values, strict=True)
                    ]
                    rows.writerow([f"{hospital}-{number}", *measured, int(diagnosis > 0)])
                    visits += 1
    return visits


def settings(folder: Path, unit: str | None, epsilon: float, epochs: float) -> Config:
    """The run on the files in `folder`: per visit, or per `unit`."""
    named = {"ignore": ["patient_id"]} if unit is None else {"unit": unit}
    return Config(
        task="table/logistic",
        learners=len(HOSPITALS),
        epochs=epochs,
        batch_size=16,
        seed=0,  # for a table that can be repeated; leave it out for real noise
        evaluate_every=epochs,
        options={
            "path": str(folder),
            "label": "ill",
            "classes": ["0", "1"],
            "ranges": {name: list(limits) for name, limits in RANGES.items()},
            "categories": {name: list(values) for name, values in CATEGORIES.items()},
            **named,
        },
        data=Data(partition="site"),
        topology=Topology(graph="complete"),
        optimizer=Optimizer(lr=0.1),
        privacy=Privacy(mode="private", epsilon=epsilon, delta=1e-6),
    )


def compare(folder: Path, epsilon: float = 3.0, *, epochs: float = 30, out: Path | None = None) -> dict[str, Run]:
    """The run that protects visits and the run that protects patients."""
    return {
        name: simulate(settings(folder, unit, epsilon, epochs), None if out is None else out / name)
        for name, unit in (("per-visit", None), ("per-patient", "patient_id"))
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data-dir")
    options.add_argument("--epsilon", type=float, default=3.0)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        visits = write_visits(Path(folder), chosen.data_dir)
        runs = compare(Path(folder), chosen.epsilon, out=chosen.out)
    print(f"{visits} visits, at most {MOST_VISITS} of one patient")
    for name, run in runs.items():
        print(f"{name}: accuracy {run.accuracy:.1%}, {run.guarantee}")
    worst = MOST_VISITS * chosen.epsilon
    print(f"Per visit, a patient with {MOST_VISITS} visits has at most ε = {worst:g}, at a larger δ.")


if __name__ == "__main__":
    main()
