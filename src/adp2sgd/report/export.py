"""A finished model in a format that others read, with a model card beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adp2sgd.errors import ConfigError
from adp2sgd.model_folder import WEIGHTS, Model, load_model
from adp2sgd.report.card import card
from adp2sgd.task import Task

CARD = "MODEL_CARD.md"


def export_model(
    run: str | Path,
    format_: str = "safetensors",
    out: str | Path | None = None,
    task: str | Task | None = None,
    *,
    with_metrics: bool = False,
) -> list[Path]:
    """Write the run's model to `out` (by default into the run's folder) and its card beside it; returns both paths.

    `with_metrics`: the card of a private run tells its metrics of held-out records too."""
    if format_ not in FORMATS:
        raise ConfigError(f'--format "{format_}" is unknown; use one of: {", ".join(FORMATS)}')
    suffix, write = FORMATS[format_]
    model = load_model(run, task)
    target = Path(out) if out is not None else Path(run) / f"model{suffix}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(model, Path(run), target)
        (target.parent / CARD).write_text(card(run, target.name, with_metrics=with_metrics), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target} ({error.strerror}); choose another --out") from None
    return [target, target.parent / CARD]


def _safetensors(model: Model, run: Path, target: Path) -> None:
    shutil.copyfile(run / WEIGHTS, target)


def _exported(model: Model) -> Any:
    """The whole model, with the preparation of its inputs, for batches of any size."""
    records = {0: torch.export.Dim("records")}
    example = model.example()
    try:
        with torch.no_grad():
            return torch.export.export(model.whole, example, dynamic_shapes=((records,) * len(example),), strict=False)
    except Exception as error:
        raise ConfigError(
            f"torch.export cannot trace this model ({type(error).__name__}); use --format safetensors"
        ) from None


def _torch_export(model: Model, run: Path, target: Path) -> None:
    torch.export.save(_exported(model), target)


def _onnx(model: Model, run: Path, target: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError("--format onnx needs onnx and onnxscript; install adp2sgd[onnx]") from None
    names = model.facts["inputs"]["names"] or [f"inputs{k}" for k in range(len(model.example()))]
    try:
        made: Any = torch.onnx.export(
            _exported(model), model.example(), input_names=names, output_names=["outputs"], dynamo=True, verbose=False
        )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"this model has no form in ONNX ({type(error).__name__}); use --format torch.export"
        ) from None
    made.save(target, external_data=False)


FORMATS: dict[str, tuple[str, Callable[[Model, Path, Path], None]]] = {
    "safetensors": (".safetensors", _safetensors),
    "onnx": (".onnx", _onnx),
    "torch.export": (".pt2", _torch_export),
}
