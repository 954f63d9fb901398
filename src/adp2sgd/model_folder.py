"""A finished model in its folder, and its use on a machine that has nothing but that folder.

model/weights.safetensors    θ under torch's own names: for load_state_dict
model/model.json             the model's spec, how inputs are prepared, the encoder of new rows or images, the metrics
model/graph.json             of a model of the user's own: the graph of its operations (models/graph.py)
model/constants.safetensors  tensors of the graph that are no weights

Guarantee: reading these files runs no code that they name. They hold tensors and JSON; nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adp2sgd import config, models, tree
from adp2sgd.data import preparation
from adp2sgd.data.encoder import Encoder
from adp2sgd.data.image_encoder import ImageEncoder
from adp2sgd.data.preparation import Prepare
from adp2sgd.errors import ConfigError, DataError
from adp2sgd.files import to_json
from adp2sgd.losses import LOSSES
from adp2sgd.metrics import METRICS, OF_CLASSES, Figures, Scores
from adp2sgd.models.graph import CannotCaptureError, Graph, capture
from adp2sgd.run_folder import Folder
from adp2sgd.task import Task
from adp2sgd.tasks import resolve
from adp2sgd.tree import Inputs

WEIGHTS, SPEC = "model/weights.safetensors", "model/model.json"
GRAPH, CONSTANTS = "model/graph.json", "model/constants.safetensors"
PIECE = 1000  # rows at a time
ENCODERS: dict[str, Any] = {"table": Encoder, "images": ImageEncoder}


class Whole(nn.Module):
    """A model with the preparation of its inputs: it reads inputs as they are stored, their tensors by position."""

    def __init__(self, module: nn.Module, prepare: Prepare, layout: Mapping[str, Any]) -> None:
        super().__init__()
        self.module, self._prepare, self._layout = module, prepare, layout

    def forward(self, *parts: Tensor) -> Any:
        return tree.call(self.module, self._prepare(_assembled(parts, self._layout)))


class Model(nn.Module):
    """A finished model. Called with inputs as they are stored, it gives the module's outputs; `predict` reads rows of a
    table, image files or arrays, and says what the outputs mean."""

    def __init__(self, whole: nn.Module, module: nn.Module, facts: Mapping[str, Any], encoder: Any) -> None:
        super().__init__()
        self.whole, self.module = whole, module
        self.facts, self.encoder = facts, encoder
        self.eval()

    def forward(self, inputs: Inputs) -> Any:
        return self.whole(*tree.tensors(inputs))

    def predict(self, rows: Any) -> list[Any]:
        """What the model says of each row: the name of a class, a class's number, or numbers.

        `rows`: for a table, dictionaries, columns by name or a data frame; for images, paths; otherwise tensors or
        arrays, one row per record, or a dictionary or tuple of them.
        """
        return self.told(self.outputs(self.encoded(rows)))

    def encoded(self, rows: Any) -> Inputs:
        """The inputs, as they were stored in training, for `rows` as in `predict`."""
        if isinstance(self.encoder, ImageEncoder):
            return self.encoder.encode([rows] if isinstance(rows, str | Path) else rows)
        if self.encoder is not None:
            return self.encoder.encode(rows.to_dict("list") if hasattr(rows, "to_dict") else rows)
        return self._as_stored(rows)

    @torch.no_grad()
    def outputs(self, inputs: Inputs) -> Any:
        """The module's outputs for all rows, computed some at a time."""
        count = tree.rows(inputs)
        pieces = [self(tree.take(inputs, rows)) for rows in torch.arange(count).split(PIECE)]
        return tree.joined([tuple(piece) if isinstance(piece, list) else piece for piece in pieces])

    def told(self, outputs: Any) -> list[Any]:
        """What the outputs mean, one entry per row."""
        if self.encoder is not None:
            return list(self.encoder.decode(outputs))
        if self.facts["classes"]:
            found: list[Any] = outputs.argmax(dim=-1).tolist()
            return found
        plain: list[Any] = (outputs.squeeze(-1) if outputs.dim() == 2 else outputs).tolist()
        return plain

    def evaluate(self, inputs: Inputs, targets: Tensor) -> Figures:
        """Loss and metrics of the run, as far as they have names."""
        metrics = {name: METRICS[name] for name in self.facts["metrics"]}
        scores = Scores(LOSSES.get(str(self.facts["loss"])), metrics)
        with torch.no_grad():
            for rows in torch.arange(len(targets)).split(PIECE):
                scores.add(self(tree.take(inputs, rows)), targets[rows])
        return scores.figures()

    def example(self, rows: int = 2) -> tuple[Tensor, ...]:
        """Zeros of the types and shapes that the model reads."""
        return tuple(_zeros(part, rows) for part in self.facts["inputs"]["parts"])

    def _as_stored(self, rows: Any) -> Inputs:
        layout = self.facts["inputs"]
        names = layout["names"]
        given = [rows[name] for name in names] if names else list(rows) if layout["kind"] == "tuple" else [rows]
        parts = []
        for value, part in zip(given, layout["parts"], strict=True):
            tensor = torch.as_tensor(np.asarray(value) if not isinstance(value, Tensor) else value)
            if list(tensor.shape[1:]) != part["shape"]:
                raise DataError(
                    f"rows have shape {list(tensor.shape[1:])}, the model reads {part['shape']}; reshape them"
                )
            parts.append(tensor.to(getattr(torch, part["dtype"])))
        return _assembled(parts, layout)


def save(folder: Folder, task: Task, weights: Mapping[str, Tensor], name: str, *, graph: bool) -> str | None:
    """Write the model of the task called `name`. Returns a note where it can be loaded only with `task=…`.

    `graph`: whether a model of the user's own gets one; it takes seconds.
    """
    folder.save_tensors(WEIGHTS, weights, {"task": name})
    prepare, why = preparation.written(task.prepare), None
    facts = {
        "format": 1,
        "task": name,
        "inputs": _layout(task.train.blank()[0]),
        "classes": task.loss is LOSSES["cross_entropy"] or bool(OF_CLASSES & task.metrics.keys()),
        "loss": next((known for known, loss in LOSSES.items() if loss is task.loss), None),
        "metrics": [known for known, metric in task.metrics.items() if METRICS.get(known) is metric],
        "encoder": None if task.encoder is None else task.encoder.to_dict(),
    }
    if isinstance(task.model, models.BuiltIn) and prepare is not None:
        facts |= {"model": {"name": task.model.name, "options": dict(task.model.options)}, "prepare": prepare}
    elif graph:
        why = _save_graph(folder, task, weights, facts["inputs"])
    with folder.replacing(SPEC) as part:
        part.write_text(to_json(facts, indent=1) + "\n", encoding="utf-8")
    return why


def _save_graph(folder: Folder, task: Task, weights: Mapping[str, Tensor], layout: Mapping[str, Any]) -> str | None:
    with torch.random.fork_rng(devices=[]):
        module = task.model().cpu()
    module.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()})
    whole = Whole(module, task.prepare, layout)
    try:
        steps, result, tensors = capture(whole, [_zeros(part, 2) for part in layout["parts"]])
    except CannotCaptureError as error:
        return f"load_model needs task=…, because the model was not kept as a graph: {error}"
    names = {name: name.removeprefix("whole.module.") for name in tensors}
    own = {name: tensor for name, tensor in tensors.items() if names[name] not in weights}
    if own:
        folder.save_tensors(CONSTANTS, own, {})
    kept = {"steps": steps, "result": result, "weights": {k: v for k, v in names.items() if k not in own}}
    with folder.replacing(GRAPH) as part:
        part.write_text(to_json(kept) + "\n", encoding="utf-8")
    return None


def load_model(folder: str | Path, task: str | Task | None = None) -> Model:
    """The average model θ of a finished run, in evaluation mode. Needs the run's folder and no training data.

    Guarantee: runs no code that the folder names. Where the run's task was the caller's own, `task` may be the Task
    itself, or its name "package.module:function"; without it the graph of the model's operations is run.
    """
    home = Folder.open(folder)
    if not (home.path / WEIGHTS).exists():
        raise ConfigError(f"{folder} holds no {WEIGHTS}; give the folder of a finished run")
    facts = _facts(home)
    encoder = None if facts["encoder"] is None else ENCODERS[facts["encoder"]["kind"]].from_dict(facts["encoder"])
    if task is None and not facts.get("model") and (home.path / GRAPH).exists():
        graph = _graph(home, home.load_tensors(WEIGHTS)[0])
        return Model(graph, graph, facts, encoder)
    module, prepare = _parts(home, facts, task)
    try:
        module.load_state_dict(home.load_tensors(WEIGHTS)[0])
    except RuntimeError:
        raise ConfigError(
            f"the model in {folder} is not that of the task; give the task that it was trained with"
        ) from None
    return Model(Whole(module, prepare, facts["inputs"]), module, facts, encoder)


def _facts(home: Folder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((home.path / SPEC).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{home.path / SPEC} cannot be read; give the folder of a finished run") from None
    return found


def _parts(home: Folder, facts: Mapping[str, Any], task: str | Task | None) -> tuple[nn.Module, Prepare]:
    """The module, not yet with its weights, and the preparation of its inputs."""
    if task is None and facts.get("model"):
        made = models.BuiltIn(str(facts["model"]["name"]), facts["model"]["options"])
        return made(), preparation.read(facts["prepare"])
    if not isinstance(task, Task):
        settings = config.naming(home.settings, task)
        task = resolve(settings.task, settings.options, private=settings.privacy.mode == "private")
    return task.model(), task.prepare


def _graph(home: Folder, weights: Mapping[str, Tensor]) -> Graph:
    try:
        kept = json.loads((home.path / GRAPH).read_text(encoding="utf-8"))
        tensors = {name: weights[place] for name, place in kept["weights"].items()}
        if (home.path / CONSTANTS).exists():
            tensors |= home.load_tensors(CONSTANTS)[0]
        return Graph(kept["steps"], kept["result"], tensors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{home.path / GRAPH} is damaged ({type(error).__name__}); give task=… instead") from None


def _layout(blank: Inputs) -> dict[str, Any]:
    """The structure, types and shapes of inputs, as plain values."""
    kind = "tensor" if isinstance(blank, Tensor) else "dictionary" if isinstance(blank, dict) else "tuple"
    parts = [{"dtype": str(p.dtype).removeprefix("torch."), "shape": list(p.shape[1:])} for p in tree.tensors(blank)]
    return {"kind": kind, "names": list(blank) if isinstance(blank, dict) else [], "parts": parts}


def _assembled(parts: Any, layout: Mapping[str, Any]) -> Inputs:
    if layout["kind"] == "tensor":
        return parts[0]
    return dict(zip(layout["names"], parts, strict=True)) if layout["kind"] == "dictionary" else tuple(parts)


def _zeros(part: Mapping[str, Any], rows: int) -> Tensor:
    dtype = getattr(torch, part["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f'{SPEC} names the type "{part["dtype"]}", which PyTorch does not have; it is damaged')
    return torch.zeros(rows, *part["shape"], dtype=dtype)
