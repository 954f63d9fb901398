"""Commands that compute or list something without training: topology, models, explain."""

from __future__ import annotations

from typing import Annotated

import typer

from adp2sgd.cli.options import ConfigFile, Json, Settings, Trust, configuration
from adp2sgd.errors import ConfigError, did_you_mean


def topology(
    graph: Annotated[str, typer.Argument(help="ring, torus, complete, hypercube, exponential, random-regular or star")],
    learners: Annotated[int, typer.Option(help="The number of learners.")] = 8,
    partner: Annotated[str, typer.Option(help="neighbour or sender-receiver")] = "neighbour",
    degree: Annotated[int, typer.Option(help="The degree of a random-regular graph.")] = 4,
    exchanges: Annotated[int, typer.Option(help="Exchanges that an initiator starts per step.")] = 1,
    json: Json = False,
) -> None:
    """Show how quickly a graph spreads information: the spectral quantities of one step's exchanges."""
    from adp2sgd import config
    from adp2sgd import topology as graphs
    from adp2sgd.cli import view

    if graph not in graphs.GRAPHS:
        known = ", ".join(graphs.GRAPHS)
        raise ConfigError(f'graph "{graph}" is unknown{did_you_mean(graph, graphs.GRAPHS)}; use one of: {known}')
    wanted = config.Topology(graph=graph, partner=partner, degree=degree, exchanges=exchanges)
    settings = config.Config(learners=learners, topology=wanted)
    with view.waiting(f"eigenvalues of {learners:,} learners"):
        built = graphs.build(settings.topology, learners)
        figures = {
            "graph": graph,
            "learners": learners,
            "partner": partner,
            "exchanges": exchanges,
            "degree": built.degree,
            "edges": len(built.edges),
            "connected": True,
            "rho": built.rho,
            "rho_bar": built.rho_bar,
        }
    if json:
        view.print_json(figures)
    else:
        view.table(f"{graph} of {learners} learners", ["quantity", "value"], [(k, str(v)) for k, v in figures.items()])


def models(json: Json = False) -> None:
    """List the built-in models with their sizes."""
    from dataclasses import asdict

    from adp2sgd.cli import view

    with view.waiting("building the models"):
        from adp2sgd.models import catalogue

        found = catalogue()
    if json:
        view.print_json([asdict(each) for each in found])
        return
    rows = [(m.name, f"{m.parameters:,}", f"{m.mib:.2f}", f"{m.multiply_adds / 1e6:,.1f} M") for m in found]
    view.table("models", ["name", "parameters", "MiB", "multiply-adds"], rows)


def explain(
    config: ConfigFile = None,
    settings: Settings = [],  # noqa: B006
    trust: Trust = None,
    json: Json = False,
) -> None:
    """Show how private mode would take the per-record gradients of each layer, and why."""
    from dataclasses import asdict

    from adp2sgd.cli import view

    chosen = configuration(config, settings, trust)
    with view.waiting(f"building {chosen.task}"):
        from adp2sgd.engine.setup import explain_gradients

        rows = explain_gradients(chosen)
    if json:
        view.print_json([asdict(row) for row in rows])
    else:
        shown = [(row.layer, f"{row.parameters:,}", row.rule, row.why) for row in rows]
        view.table("per-record gradients", ["layer", "parameters", "rule", "why"], shown)
