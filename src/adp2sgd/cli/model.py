"""The finished model: predict, evaluate, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from adp2sgd.cli.options import Json
from adp2sgd.errors import ConfigError

RunFolder = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
Trust = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="MODULE:FUNCTION", help="Import this function, the run's own task, instead of its graph."),
]


def predict(
    run: RunFolder,
    data: Annotated[Path, typer.Argument(help="A table; an image or a folder of images; .npy, .npz or .safetensors.")],
    out: Annotated[Optional[Path], typer.Option("--out", "-o", help="A CSV file (default: print it).")] = None,  # noqa: UP045
    trust: Trust = None,
) -> None:
    """What the run's model says of new rows or images. Needs the run's folder alone."""
    from adp2sgd.cli import view

    with view.waiting("loading the model"):
        from adp2sgd.model_folder import load_model
        from adp2sgd.new_data import predictions, read_new

        model = load_model(run, trust)
    with view.waiting(f"predicting {data}"):
        found = predictions(model, read_new(model, data))
    if out is None:
        print(found.text(), end="")
        return
    try:
        out.write_text(found.text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out} ({error.strerror}); choose another --out") from None
    print(f"{len(found.rows)} predictions in {out}")


def evaluate(
    run: RunFolder,
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Labelled data as for predict (default: the held-out records of the run's task)."),
    ] = None,
    trust: Trust = None,
    json: Json = False,
) -> None:
    """Loss and metrics of the run's model on labelled data."""
    from adp2sgd.cli import view

    with view.waiting("evaluating"):
        from adp2sgd.new_data import evaluated

        figures, records = evaluated(run, data, trust)
    if json:
        view.print_json({**figures, "records": records})
        return
    rows = [(name, "none" if value is None else f"{value:.4f}") for name, value in figures.items()]
    view.table(f"{run} on {records:,} records", ["metric", "value"], rows)


def export(
    run: RunFolder,
    format_: Annotated[str, typer.Option("--format", help="safetensors, onnx or torch.export")] = "safetensors",
    out: Annotated[Optional[Path], typer.Option(help="The file (default: in the run's folder).")] = None,  # noqa: UP045
    with_metrics: Annotated[
        bool, typer.Option("--with-metrics", help="Tell a private run's metrics of held-out records in the card.")
    ] = False,
    trust: Trust = None,
    json: Json = False,
) -> None:
    """Hand the run's model on, with a model card beside it."""
    from adp2sgd.cli import view

    with view.waiting(f"exporting to {format_}"):
        from adp2sgd.report.export import export_model

        written = export_model(run, format_, out, trust, with_metrics=with_metrics)
        files: list[Any] = [str(path) for path in written]
    if json:
        view.print_json({"files": files})
    else:
        print("\n".join(files))
