"""The command `adp2sgd privacy`: what a budget buys, what it costs, and what was spent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from adp2sgd.cli.options import Json

privacy = typer.Typer(
    help="Compute what a privacy budget buys and what was spent.",
    epilog="Example: adp2sgd privacy noise --epsilon 8 --sample-rate .08192 --steps 3662 --delta 1e-5",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Rate = Annotated[float, typer.Option(help="Expected batch over the learner's own number of records.")]
Noise = Annotated[float, typer.Option(help="Noise on the sum in units of the clip norm.")]
Steps = Annotated[int, typer.Option(help="The learner's own steps.")]
Delta = Annotated[float, typer.Option(help="Well below 1/records.")]
Adjacency = Annotated[str, typer.Option(help="add-remove or replace-one")]
Epsilon = Annotated[float, typer.Option(help="The budget.")]


@privacy.command(
    "epsilon",
    epilog="Example: adp2sgd privacy epsilon --sample-rate .08192 --noise-multiplier 2 --steps 3662 --delta 1e-5",
)
def privacy_epsilon(
    sample_rate: Rate,
    noise_multiplier: Noise,
    steps: Steps,
    delta: Delta,
    accountant: Annotated[str, typer.Option(help="pld (tight, what is reported) or rdp")] = "pld",
    adjacency: Adjacency = "add-remove",
    json: Json = False,
) -> None:
    """Compute ε after a number of private steps."""
    from adp2sgd.cli import view
    from adp2sgd.privacy.accountant import epsilon
    from adp2sgd.privacy.mechanism import SampledGaussian

    with view.waiting("composing the steps"):
        spent = epsilon(SampledGaussian(noise_multiplier, sample_rate), steps, delta, accountant, adjacency)
    _print_budget(spent, noise_multiplier, sample_rate, steps, json)


@privacy.command(
    "noise", epilog="Example: adp2sgd privacy noise --epsilon 8 --sample-rate .08192 --steps 3662 --delta 1e-5"
)
def privacy_noise(
    epsilon: Epsilon,
    sample_rate: Rate,
    steps: Steps,
    delta: Delta,
    adjacency: Adjacency = "add-remove",
    json: Json = False,
) -> None:
    """Find the least noise that keeps a number of steps within ε.

    The noise multiplier is 0.1 at least.
    """
    from adp2sgd.cli import view
    from adp2sgd.privacy import accountant
    from adp2sgd.privacy.calibrate import noise_for
    from adp2sgd.privacy.mechanism import SampledGaussian

    with view.waiting("searching the noise"):
        noise = noise_for(epsilon=epsilon, delta=delta, sample_rate=sample_rate, steps=steps, adjacency=adjacency)
        spent = accountant.epsilon(SampledGaussian(noise, sample_rate), steps, delta, "pld", adjacency)
    _print_budget(spent, noise, sample_rate, steps, json)


@privacy.command(
    "steps", epilog="Example: adp2sgd privacy steps --epsilon 8 --sample-rate .08192 --noise-multiplier 2 --delta 1e-5"
)
def privacy_steps(
    epsilon: Epsilon,
    sample_rate: Rate,
    noise_multiplier: Noise,
    delta: Delta,
    adjacency: Adjacency = "add-remove",
    json: Json = False,
) -> None:
    """Find the most steps that stay within ε.

    The answer is 10¹² where even so many do.
    """
    from adp2sgd.cli import view
    from adp2sgd.privacy import accountant
    from adp2sgd.privacy.calibrate import steps_for
    from adp2sgd.privacy.mechanism import SampledGaussian

    with view.waiting("searching the number of steps"):
        steps = steps_for(
            epsilon=epsilon,
            delta=delta,
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            adjacency=adjacency,
        )
        spent = accountant.epsilon(SampledGaussian(noise_multiplier, sample_rate), steps, delta, "pld", adjacency)
    _print_budget(spent, noise_multiplier, sample_rate, steps, json)


@privacy.command("spent", epilog="Example: adp2sgd privacy spent runs/first")
def privacy_spent(
    path: Annotated[Path, typer.Argument(help="The folder of a run, a folder of ledgers, or a ledger.")],
    delta: Annotated[Optional[float], typer.Option(help="Well below 1/records (default: the ledger's).")] = None,  # noqa: UP045
    adjacency: Annotated[Optional[str], typer.Option(help="add-remove or replace-one (default: the ledger's)")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Show what each ledger has spent, in all runs that it covers.

    Steps that are reserved count as spent.
    """
    from dataclasses import asdict

    from adp2sgd.cli import view
    from adp2sgd.privacy.spent import spent_in

    with view.waiting("composing the steps"):
        rows = spent_in(path, delta, adjacency)
    if json:
        view.print_json([asdict(row) for row in rows])
        return
    shown = [
        (
            row.dataset,
            row.site,
            f"{row.steps:,}",
            f"{row.epsilon:.4g}",
            "–" if row.epsilon_limit is None else f"{row.epsilon_limit:.4g}",
            row.composition,
            f"{row.epsilon_if_fixed:.4g}",
        )
        for row in rows
    ]
    title = f"spent at δ = {rows[0].delta:g} ({rows[0].adjacency})"
    names = ["data set", "site", "steps", "ε", "of at most", "composition", "ε if fixed"]
    view.table(title, names, shown, dispensable=("composition", "ε if fixed"))
    for row in rows:
        view.say(f"ledger: {row.ledger}")
    for note in dict.fromkeys(row.note for row in rows if row.note):
        view.say(f"note: {note}")


@privacy.command("statement", epilog="Example: adp2sgd privacy statement runs/first -o statement.md")
def privacy_statement(
    run: Annotated[Path, typer.Argument(help="The folder of a finished private run.")],
    kind: Annotated[str, typer.Option("--format", help="markdown, json or registry (a draft for the DP registry)")] = (
        "markdown"
    ),
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="The file to write (default: print).")] = None,  # noqa: UP045
) -> None:
    """Write the privacy statement of a run.

    It says who is protected, against whom, how strongly, and what is not covered.
    """
    from adp2sgd.cli import view

    with view.waiting("composing the steps"):
        from adp2sgd.report.statement import write_statement

        text = write_statement(run, kind, out)
    print(text if out is None else out)


@privacy.command(
    "theorem",
    epilog="Example: adp2sgd privacy theorem --epsilon 9 --delta 1e-5 --learners 16 --smallest-shard 3125 "
    "--steps 58594 --batch-size 256 --lipschitz 1 --mu 0.2",
)
def privacy_theorem(
    epsilon: Epsilon,
    delta: Delta,
    learners: Annotated[int, typer.Option(help="K")],
    smallest_shard: Annotated[int, typer.Option(help="n₍₁₎")],
    steps: Annotated[int, typer.Option(help="T, of all learners together")],
    batch_size: Annotated[int, typer.Option(help="B")],
    lipschitz: Annotated[float, typer.Option(help="G")] = 1.0,
    mu: Annotated[Optional[float], typer.Option(help="μ (default: the one with the least σ)")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Show what the noise of the paper's Theorem 2 is worth.

    This is its ε against a neighbour. No guarantee of this program rests on the theorem.
    """
    from adp2sgd import theory
    from adp2sgd.cli import view

    setting: dict[str, Any] = {
        "delta": delta,
        "learners": learners,
        "smallest_shard": smallest_shard,
        "steps": steps,
        "batch_size": batch_size,
        "lipschitz": lipschitz,
    }
    with view.waiting("composing the steps"):
        claim = theory.theorem_2(epsilon=epsilon, mu=mu, **setting)
        truth = theory.neighbour_epsilon(claim.sigma, **setting)
    if json:
        view.print_json(_theorem_figures(claim, truth, setting))
    else:
        _print_theorem(claim, truth)


def _theorem_figures(claim: Any, truth: Any, setting: dict[str, Any]) -> dict[str, Any]:
    return {
        "epsilon": claim.epsilon,
        "delta": setting["delta"],
        "noise_multiplier": claim.sigma / setting["lipschitz"],
        "steps": setting["steps"],
        "sigma": claim.sigma,
        "alpha": claim.alpha,
        "alpha_bound": claim.alpha_bound,
        "conditions_hold": claim.conditions_hold,
        "failed": list(claim.failed),
        "neighbour_epsilon": {
            "noise_on_sum": truth.on_sum.epsilon,
            "noise_on_mean_add_remove": truth.on_mean.epsilon,
            "noise_on_mean_replace_one": truth.on_mean_replace_one.epsilon,
        },
    }


def _print_theorem(claim: Any, truth: Any) -> None:
    from adp2sgd.cli import view

    rows = [
        ("the paper's σ", f"{claim.sigma:.5g}"),
        ("α, and its bound", f"{claim.alpha:.4f}, {claim.alpha_bound:.4f}"),
        ("the theorem's conditions", "hold" if claim.conditions_hold else f"fail: {', '.join(claim.failed)}"),
        ("ε that the paper claims", "none" if claim.epsilon is None else f"{claim.epsilon:g}"),
        ("ε for a neighbour, noise on the sum (Algorithm 1)", f"{truth.on_sum.epsilon:.4g}"),
        ("ε for a neighbour, noise on the mean, add-remove", f"{truth.on_mean.epsilon:.4g}"),
        ("ε for a neighbour, noise on the mean, replace-one", f"{truth.on_mean_replace_one.epsilon:.4g}"),
    ]
    view.table("Theorem 2 and what its noise buys", ["quantity", "value"], rows)
    notes = [spent.note for spent in (truth.on_sum, truth.on_mean, truth.on_mean_replace_one) if spent.note]
    for note in dict.fromkeys(notes):
        print(f"note: {note}")


def _print_budget(spent: Any, noise_multiplier: float, sample_rate: float, steps: int, json: bool) -> None:
    from adp2sgd.cli import view

    figures = {
        "epsilon": spent.epsilon,
        "epsilon_lower": spent.epsilon_lower,
        "delta": spent.delta,
        "noise_multiplier": noise_multiplier,
        "sample_rate": sample_rate,
        "steps": steps,
        "accountant": spent.accountant,
        "adjacency": spent.adjacency,
        "note": spent.note,
    }
    if json:
        view.print_json(figures)
        return
    print(
        f"ε = {spent.epsilon:.4g} at δ = {spent.delta:g} after {steps:,} steps with noise multiplier "
        f"{noise_multiplier:g} at rate {sample_rate:g} ({spent.accountant}, {spent.adjacency}, Poisson batches)"
    )
    if spent.epsilon_lower:
        print(f"This is an upper bound. The true ε is at least {_rounded_down(spent.epsilon_lower):.4g}.")
    if spent.note:
        print(f"note: {spent.note}")


def _rounded_down(value: float) -> float:
    """`value` with four digits, never above it."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.floor(value / unit) * unit
