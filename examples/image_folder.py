"""A folder of images, one folder per class. Needs no model and no loss of your own.

python examples/image_folder.py [FOLDER]     # without a folder, some images are drawn first
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

import adp2sgd

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "shapes")
if not folder.exists():
    stream = np.random.default_rng(0)
    for label in ("horizontal", "vertical"):
        (folder / label).mkdir(parents=True)
        for number in range(150):
            pixels = stream.integers(0, 90, (16, 16, 3), dtype=np.uint8)
            place = stream.integers(2, 14)
            pixels[(place, slice(None)) if label == "horizontal" else (slice(None), place)] = 250
            Image.fromarray(pixels).save(folder / label / f"{number}.png")

config = adp2sgd.Config(
    task="images/cnn",
    options={"folder": str(folder), "classes": sorted(each.name for each in folder.iterdir()), "augment": False},
    learners=4,
    epochs=8,
    batch_size=8,
    optimizer=adp2sgd.Optimizer(lr=0.05),
)
run = adp2sgd.simulate(config, "runs/shapes")
print(f"accuracy {run.metrics['accuracy']:.1%}")

model = adp2sgd.load_model("runs/shapes")  # needs the folder of the run alone
print(model.predict(sorted(folder.rglob("*.png"))[:2]))
