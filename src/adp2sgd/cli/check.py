"""The command `check`: what a run would do, before it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from adp2sgd.cli.options import ConfigFile, Json, Settings, Trust, configuration
from adp2sgd.errors import ConfigError

if TYPE_CHECKING:
    from adp2sgd.engine.forecast import Check, Forecast

MOST_SHARES = 12  # learners that are listed one by one


def check(
    config: ConfigFile = None,
    settings: Settings = [],  # noqa: B006
    learners: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="K,K,…", help="Compare these numbers of learners, for example 4,16,64."),
    ] = None,
    trust: Trust = None,
    json: Json = False,
) -> None:
    """Say what a run would do: records, ε, noise, steps, bytes, memory and time.

    Everything that a run refuses is refused here. One step is measured on synthetic records; no budget is spent.
    """
    from dataclasses import asdict

    from adp2sgd.cli import view

    chosen = configuration(config, settings, trust)
    counts = [] if learners is None else _counts(learners)
    with view.waiting(f"checking {chosen.task}"):
        from adp2sgd.engine import forecast
        from adp2sgd.errors import telling_no_values

        with telling_no_values(chosen.privacy.mode == "private"):
            found = forecast.check(chosen, counts)
    if json:
        view.print_json(asdict(found))
    else:
        _print(found)


def _counts(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--learners {text} is no list of numbers; write for example --learners 4,16,64")
    return [int(word) for word in words]


def _print(found: Check) -> None:
    from adp2sgd.cli import view

    facts = [
        ("training records", f"{found.records:,}, {_bytes(found.record_bytes)}"),
        ("held-out records", f"{found.held_out:,}"),
        ("parameters", f"{found.parameters:,}"),
        ("bytes per exchange", f"{_bytes(found.bytes_per_exchange)} each way"),
        ("a step", f"{_seconds(found.step_s)} on {found.device}, measured"),
    ]
    if found.memory_bytes is not None:
        facts.append(("memory per learner", f"about {_bytes(found.memory_bytes)} beside the program"))
    view.say(f"{found.task} {found.algorithm}, privacy: {found.privacy}")
    for name, fact in facts:
        view.say(f"  {name:<20}{fact}")
    _print_shares(found.forecasts[0])
    names = ["learners", "steps", "steps each", "sample rate", "train", "simulate", "each sends"]
    view.table("a run; times are estimates", names, [_row(each) for each in found.forecasts])
    for note in found.notes:
        view.say(f"note: {note}")


def _print_shares(found: Forecast) -> None:
    from adp2sgd.cli import view

    private = any(share.epsilon is not None for share in found.shares)
    names = ["learner", "records", *(["ε at most", "noise", "steps at most"] if private else [])]
    rows = []
    for share in found.shares[:MOST_SHARES]:
        row = [share.learner, f"{share.records:,}"]
        if share.epsilon is not None:
            row += [f"{share.epsilon:.3g}", f"{share.noise_multiplier:.3g}", f"{share.max_steps:,}"]
        rows.append(row)
    more = len(found.shares) - len(rows)
    view.table(f"{found.learners} learners" + (f" (and {more:,} more)" if more else ""), names, rows)


def _row(found: Forecast) -> list[str]:
    return [
        f"{found.learners:,}",
        f"{found.steps:,}",
        f"{found.steps_per_learner:,}",
        f"{found.sample_rate:.3g}",
        _seconds(found.train_s),
        _seconds(found.simulate_s),
        f"{_bytes(found.bytes_per_second)}/s",
    ]


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} bytes"


def _seconds(seconds: float) -> str:
    from adp2sgd.cli.liveview import duration

    return f"{1000 * seconds:.3g} ms" if seconds < 1 else duration(seconds)
