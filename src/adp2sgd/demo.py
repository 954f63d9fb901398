"""The first result for a newcomer: what asynchrony buys when one machine is slow."""

from __future__ import annotations

from adp2sgd import view
from adp2sgd.config import Config, Optimizer, Speeds
from adp2sgd.engine import simulate
from adp2sgd.record import Run

BASE = Config(
    task="digits/mlp",
    learners=8,
    epochs=30,
    batch_size=16,
    seed=0,
    evaluate_every=5,
    checkpoint_every=0,
    optimizer=Optimizer(lr=0.2),
    speeds=Speeds(kind="one-slow", factor=10.0),
)
STORY = {
    "SYNC": BASE.replace(algorithm="sync"),
    "ADPSGD": BASE,
}


def play(*, as_json: bool = False) -> None:
    """Run the story and print its table."""
    runs = {name: _run(name, config) for name, config in STORY.items()}
    if as_json:
        view.print_json({name: run.to_dict() for name, run in runs.items()})
        return
    title = f"Handwritten digits, {BASE.learners} learners on a ring, one of them {BASE.speeds.factor:g}× slower"
    columns = ["algorithm", "accuracy", "virtual time", "speed-up", "staleness", "ε"]
    view.table(title, columns, [_row(name, run, runs["SYNC"]) for name, run in runs.items()])
    print("Staleness: how many steps of all learners passed between reading a model and updating it (mean).")


def _run(name: str, config: Config) -> Run:
    with view.progress(config, label=name) as on_status:
        return simulate(config, on_status=on_status)


def _row(name: str, run: Run, baseline: Run) -> tuple[str, ...]:
    assert run.accuracy is not None
    steps = sum(each.steps for each in run.learners)
    staleness = sum(each.staleness_mean * each.steps for each in run.learners) / steps
    epsilon = "none" if run.guarantee == "none" else f"{run.guarantee['epsilon']:.2f}"
    return (
        name,
        f"{run.accuracy:.1%}",
        f"{run.seconds:,.0f} s",
        f"{baseline.seconds / run.seconds:.1f}×",
        f"{staleness:.1f}",
        epsilon,
    )
