"""A table with two sites at ε = 3, from a CSV file to predictions for new patients. Run it in an empty folder."""

import random
import re
import subprocess
import sys
from pathlib import Path


def adp2sgd(*arguments: str) -> None:
    print("$ adp2sgd", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "adp2sgd", *arguments], check=True)


def patients(count: int, seed: int) -> str:
    draw, lines = random.Random(seed), ["age,pressure,smoker,clinic,ill"]
    for _ in range(count):
        age, pressure, smoker = draw.randint(20, 89), draw.randint(90, 189), draw.choice(["never", "past", "now"])
        ill = age / 20 + pressure / 40 + 2 * (smoker == "now") + draw.gauss(0, 0.7) > 7
        lines.append(f"{age},{pressure},{smoker},{draw.choice(['north', 'south'])},{'yes' if ill else 'no'}")
    return "\n".join(lines) + "\n"


Path("patients.csv").write_text(patients(800, seed=1))
adp2sgd("init", "patients.csv", "--label", "ill", "--site", "clinic")
# What only a person knows. On a terminal `init` asks for it.
known = {"classes": '["no", "yes"]', "age": "[0, 100]", "pressure": "[80, 200]", "smoker": '["never", "past", "now"]'}
text = Path("patients.toml").read_text()
for name, value in known.items():
    text = re.sub(rf"^{name} = \[\]", f"{name} = {value}", text, flags=re.MULTILINE)
Path("patients.toml").write_text(text)
adp2sgd("check", "patients.toml")
adp2sgd("train", "patients.toml", "--out", "run", "--quiet")
Path("new.csv").write_text(patients(200, seed=2))
Path("patients.csv").unlink()  # the run's folder is all that predictions need
adp2sgd("predict", "run", "new.csv", "-o", "predicted.csv")
adp2sgd("evaluate", "run", "--data", "new.csv")
