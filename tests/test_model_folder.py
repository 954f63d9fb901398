"""The finished model: used by a new process, in another folder, without the training data and the user's code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import adp2sgd
from adp2sgd import Config, ConfigError, DataError, Optimizer, Task
from adp2sgd.models.graph import CannotCaptureError, Graph, capture
from conftest import ROOT
from conftest import adp2sgd as command
from data_files import write_image, write_table

OWN = '''
import torch
from torch import nn
from adp2sgd import Task

class Net(nn.Module):
    """Image and table, with a buffer and a constant."""
    def __init__(self):
        super().__init__()
        self.image, self.table = nn.Conv2d(1, 4, 3), nn.Linear(3, 4)
        self.out = nn.Linear(8, 2)
        self.register_buffer("scale", torch.tensor(2.0))
    def forward(self, image, table):
        seen = self.image(image).relu().mean(dim=(2, 3))
        return self.out(torch.cat([seen * self.scale, self.table(table)], dim=1)) + torch.tensor([0.1, 0.2])

def prepare(inputs):
    return {"image": inputs["image"].float() / 255, "table": inputs["table"]}

def both() -> Task:
    stream = torch.Generator().manual_seed(0)
    image = torch.randint(0, 255, (60, 1, 6, 6), generator=stream, dtype=torch.uint8)
    table = torch.randn(60, 3, generator=stream)
    data = {"image": image, "table": table}, (table[:, 0] > 0).long()
    return Task(model=Net, train=data, test=data, prepare=prepare, metrics=["accuracy", "auc"])
'''


def python(program: str, cwd: Path, *arguments: str) -> str:
    """The output of a new process that knows this package and nothing else."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_own_model_works_where_neither_its_code_nor_its_data_are(tmp_path: Path) -> None:
    before, elsewhere = tmp_path / "before", tmp_path / "elsewhere"
    before.mkdir()
    (before / "own_net.py").write_text(OWN)
    train = """
import torch, numpy as np, adp2sgd, own_net
task = own_net.both()
run = adp2sgd.simulate(adp2sgd.Config(learners=2, epochs=1, batch_size=8, seed=0), "run", task=task)
assert not any("graph" in note for note in run.notes), run.notes
inputs, targets = task.test.read(torch.arange(60))
model = adp2sgd.load_model("run", task=task)
np.savez("new.npz", **{k: v.numpy() for k, v in inputs.items()}, targets=targets.numpy())
torch.set_printoptions(precision=6)
print(model(inputs).double().sum().item(), run.metrics["accuracy"], run.metrics["auc"])
"""
    expected, accuracy, auc = map(float, python(f"import sys; sys.path.append('.'){train}", before).split())
    elsewhere.mkdir()
    shutil.move(before / "run", elsewhere / "moved")
    shutil.move(before / "new.npz", elsewhere / "new.npz")
    shutil.rmtree(before)
    use = """
import sys, numpy as np, torch, adp2sgd
model = adp2sgd.load_model("moved")
new = np.load("new.npz")
rows = {"image": new["image"], "table": new["table"]}
told = model.predict(rows)
assert "own_net" not in sys.modules
print(model({k: torch.as_tensor(v) for k, v in rows.items()}).double().sum().item(), (told == new["targets"]).mean())
"""
    found, right = map(float, python(use, elsewhere).split())
    assert found == pytest.approx(expected, abs=1e-4)
    assert right == accuracy
    done = command("predict", "moved", "new.npz", "-o", "out.csv", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    lines = (elsewhere / "out.csv").read_text().splitlines()
    assert lines[0] == "row,prediction,probability"
    assert len(lines) == 61
    evaluated = command("evaluate", "moved", "--data", "new.npz", "--json", cwd=elsewhere)
    figures = json.loads(evaluated.stdout)
    assert figures["accuracy"] == accuracy
    assert figures["auc"] == pytest.approx(auc)
    assert figures["records"] == 60


def table_run(folder: Path) -> Path:
    stream = np.random.default_rng(0)
    age, smoker = stream.integers(20, 90, 200), stream.choice(["never", "now"], 200)
    ill = np.where(age / 20 + 2 * (smoker == "now") + stream.normal(size=200) > 4, "yes", "no")
    columns: dict[str, Any] = {"age": age.tolist(), "smoker": smoker.tolist(), "ill": ill.tolist()}
    write_table(folder / "patients.csv", columns)
    options = {
        "path": str(folder / "patients.csv"), "label": "ill", "classes": ["no", "yes"],
        "ranges": {"age": [0, 100]}, "categories": {"smoker": ["never", "now"]},
    }  # fmt: skip
    config = Config(task="table/logistic", learners=2, epochs=20, batch_size=16, seed=0, options=options)
    run = adp2sgd.simulate(config.replace(optimizer=Optimizer(lr=0.5)), folder / "run")
    assert run.accuracy is not None
    assert run.accuracy > 0.75
    (folder / "patients.csv").rename(folder / "new.csv")
    return folder / "run"


def test_a_table_is_predicted_evaluated_and_exported_from_the_folder_alone(tmp_path: Path) -> None:
    run = table_run(tmp_path)
    model = adp2sgd.load_model(run)
    assert model.predict([{"age": 85, "smoker": "now"}, {"age": 21, "smoker": "never"}]) == ["yes", "no"]
    assert model.predict({"age": [85], "smoker": ["now"]}) == ["yes"]
    with pytest.raises(DataError, match="no column 'smoker'"):
        model.predict([{"age": 85}])
    done = command("predict", "run", "new.csv", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == "row,prediction,probability"
    assert {line.split(",")[1] for line in lines[1:]} == {"yes", "no"}
    evaluated = command("evaluate", "run", "--data", "new.csv", cwd=tmp_path)
    assert "accuracy" in evaluated.stdout, evaluated.stderr
    for wrong, words in (("nowhere.csv", "does not exist"), ("run", "holds no")):
        refused = command("evaluate", "run", "--data", wrong, cwd=tmp_path)
        assert refused.returncode == 2
        assert words in refused.stderr


def test_images_are_predicted_by_their_files(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    for number in range(40):
        for label, level in (("dark", 40), ("light", 200)):
            pixels = stream.integers(level - 30, level + 30, (8, 8, 3)).astype(np.uint8)
            write_image(tmp_path / "photos" / label / f"{number}.png", pixels)
    options = {"folder": str(tmp_path / "photos"), "classes": ["dark", "light"]}
    config = Config(task="images/logistic", learners=2, epochs=5, batch_size=8, seed=0, options=options)
    adp2sgd.simulate(config.replace(optimizer=Optimizer(lr=0.1)), tmp_path / "run")
    shutil.move(tmp_path / "photos", tmp_path / "new")
    model = adp2sgd.load_model(tmp_path / "run")
    files = [tmp_path / "new/dark/0.png", tmp_path / "new/light/0.png"]
    assert model.predict(files) == ["dark", "light"]
    done = command("evaluate", "run", "--data", "new", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["accuracy"] > 0.95, done.stderr
    write_image(tmp_path / "one.png", np.full((30, 20, 3), 210, np.uint8))  # of another size
    shown = command("predict", "run", "one.png", cwd=tmp_path)
    assert ",light," in shown.stdout, shown.stderr


def test_a_built_in_model_is_built_from_its_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = adp2sgd.simulate(Config(task="digits/mlp", learners=2, epochs=2, seed=0), tmp_path / "run")
    monkeypatch.setattr("adp2sgd.data.synthetic.digits", None)  # no data is loaded
    model = adp2sgd.load_model(tmp_path / "run")
    assert not (tmp_path / "run/model/graph.json").exists()
    monkeypatch.undo()
    from adp2sgd.tasks import resolve

    test = resolve("digits/mlp", {}).test
    inputs, targets = test.read(torch.arange(len(test)))
    assert model.evaluate(inputs, targets) == pytest.approx(run.metrics)
    assert np.mean(np.array(model.predict(inputs)) == targets.numpy()) == run.accuracy


@pytest.mark.parametrize("form", ["safetensors", "onnx", "torch.export"])
def test_exports_compute_the_same_as_the_model(form: str, tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(torch.cat([a, b], dim=1)).tanh()

    data = {"a": torch.randn(30, 2), "b": torch.randn(30, 3)}, torch.arange(30) % 2
    task = Task(model=Pair, train=data, test=data, name="pair")
    adp2sgd.simulate(Config(learners=1, epochs=1, batch_size=8, seed=0), tmp_path / "run", task=task)
    done = command("export", "run", "--format", form, "--out", "given/model.bin", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = [tmp_path / each for each in json.loads(done.stdout)["files"]]
    expected = adp2sgd.load_model(tmp_path / "run")(data[0]).detach()
    if form == "safetensors":
        from safetensors.torch import load_file

        module = Pair()
        module.load_state_dict(load_file(files[0]))
        found = module(**data[0]).detach()
    elif form == "onnx":
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(str(files[0]))
        [raw] = session.run(None, {name: part.numpy() for name, part in data[0].items()})
        found = torch.as_tensor(raw)
    else:
        found = torch.export.load(files[0]).module()(*data[0].values())
    assert torch.allclose(found, expected, atol=1e-5)
    card = files[1].read_text()
    assert "# Model card: <pair>" in card
    assert "**No privacy guarantee**" in card
    assert "| accuracy |" in card


def test_a_model_without_a_graph_says_so_and_is_loaded_with_its_task(tmp_path: Path) -> None:
    class Moody(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if x.sum().item() >= 0 else 2.0)  # depends on values

    data = torch.randn(30, 3), torch.arange(30) % 2
    task = Task(model=lambda: Moody(3, 2), train=data, test=data)
    run = adp2sgd.simulate(Config(learners=1, epochs=1, batch_size=8, seed=0), tmp_path / "run", task=task)
    assert any("load_model needs task=" in note for note in run.notes)
    with pytest.raises(ConfigError, match='task = "<own>" was a Task object'):
        adp2sgd.load_model(tmp_path / "run")
    assert len(adp2sgd.load_model(tmp_path / "run", task).predict(data[0])) == 30


@pytest.mark.parametrize("name", ["torch.os.system", "aten.from_file.default", "os.system", "aten.__class__.mro", ""])
def test_a_graph_calls_nothing_but_operations_on_tensors(name: str, tmp_path: Path) -> None:
    data = torch.randn(30, 3), torch.arange(30) % 2
    task = Task(model=lambda: nn.Linear(3, 2), train=data, test=data)
    adp2sgd.simulate(Config(learners=1, epochs=1, batch_size=8, seed=0), tmp_path / "run", task=task)
    file = tmp_path / "run/model/graph.json"
    kept = json.loads(file.read_text())
    kept["steps"].insert(0, {"name": "x", "call": name, "args": [f"touch {tmp_path}/executed"], "kwargs": {}})
    file.write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match="no operation that a model may use"):
        adp2sgd.load_model(tmp_path / "run")
    assert not (tmp_path / "executed").exists()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embed(x)).mean(dim=1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "example"),
    [
        (Recurrent(), torch.randn(2, 5, 4)),
        (Attentive(), torch.arange(14).view(2, 7)),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)),
            torch.randn(2, 1, 8, 8),
        ),
    ],
)
def test_graphs_survive_json_and_any_batch_size(module: nn.Module, example: Tensor) -> None:
    module.eval()(example)
    steps, result, tensors = capture(module, [example])
    steps, result = json.loads(json.dumps([steps, result]))
    graph = Graph(steps, result, tensors)
    for rows in (1, 2, 5):
        batch = torch.cat([example] * 3)[:rows]
        assert torch.allclose(graph(batch), module(batch), atol=1e-6)


def test_random_outputs_have_no_graph() -> None:
    class Dice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(2)

    with pytest.raises(CannotCaptureError, match="random numbers"):
        capture(Dice(3, 2), [torch.zeros(2, 3)])
