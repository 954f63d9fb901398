"""Makes the pictures of the documentation from real runs: `python docs/images/make.py` (needs Chromium)."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image

import adp2sgd
from adp2sgd.config import Config, Optimizer, Privacy, Speeds
from adp2sgd.report.browser import png
from adp2sgd.report.page import page
from adp2sgd.report.read import read_run

HERE = Path(__file__).parent
SLOW = Config(
    task="digits/mlp",
    learners=8,
    epochs=30,
    seed=0,
    optimizer=Optimizer(lr=0.4),
    speeds=Speeds(kind="one-slow", learner=3, factor=10.0),
)
COMPARISON = 970  # pixels: the summary, and the accuracy against epochs and time
RUNS = {
    "adpsgd": SLOW,
    "sync": SLOW.replace(algorithm="sync"),
    "private": SLOW.replace(privacy=Privacy(mode="private", epsilon=6.0, delta=1e-5)),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, config in RUNS.items():
            adp2sgd.simulate(config, Path(scratch) / name)
        found = {name: read_run(Path(scratch) / name) for name in RUNS}
    save("comparison", page([found["adpsgd"], found["sync"]]), height=COMPARISON)
    save("report", page([found["private"]]))


def save(name: str, text: str, height: int | None = None) -> None:
    """The page, or its first `height` pixels, as a small picture."""
    picture = Image.open(io.BytesIO(png(text)))
    picture = picture.crop((70, 0, picture.width - 70, height or picture.height))
    small = picture.resize((picture.width * 5 // 8, picture.height * 5 // 8), Image.Resampling.LANCZOS)
    small.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
