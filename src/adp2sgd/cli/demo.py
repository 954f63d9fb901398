"""The first result for a newcomer: what asynchrony buys when one machine is slow."""

from __future__ import annotations

from adp2sgd.cli import view
from adp2sgd.cli.liveview import watching
from adp2sgd.config import Config, Optimizer, Privacy, Speeds
from adp2sgd.engine import simulate
from adp2sgd.run_folder import Run

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
PRIVATE_DIGITS = BASE.replace(
    task="digits/cnn",
    learners=4,
    batch_size=180,
    optimizer=Optimizer(lr=1.0),
    privacy=Privacy(mode="private", epsilon=3.2, delta=1e-4, headroom=1.3),
)

# The same without privacy. Gradients that are not clipped are longer: of the rates 0.05 to 1 this one serves best.
PLAIN_DIGITS = PRIVATE_DIGITS.replace(privacy=Privacy(), optimizer=Optimizer(lr=0.3))


def play(*, as_json: bool = False) -> None:
    """Run the story and print its table. The private row stands below the same model without privacy. Both are compared
    with a SYNC of as many learners."""
    sync = _run("SYNC", BASE.replace(algorithm="sync"))
    few = PRIVATE_DIGITS.replace(algorithm="sync", task="digits/mlp", privacy=Privacy())
    slowest = _run("SYNC", few)
    rows = {
        "SYNC": (sync, sync),
        "ADPSGD": (_run("ADPSGD", BASE), sync),
        "ADPSGD, 4 learners": (_run("ADPSGD", PLAIN_DIGITS), slowest),
        "A(DP)²SGD, 4 learners": (_run("A(DP)²SGD", PRIVATE_DIGITS), slowest),
    }
    if as_json:
        view.print_json({name: run.to_dict() for name, (run, _) in rows.items()})
        return
    title = f"Handwritten digits, {BASE.learners} learners on a ring, one of them {BASE.speeds.factor:g}× slower"
    columns = ["algorithm", "accuracy", "virtual time", "speed-up", "staleness", "ε"]
    view.table(title, columns, [_row(name, *runs) for name, runs in rows.items()])
    private = rows["A(DP)²SGD, 4 learners"][0]
    view.say(
        "speed-up: over SYNC with as many learners. staleness: global steps between reading a model and updating it."
    )
    view.say("The rows with 4 learners train the same model (a CNN) on the same records, without and with privacy.")
    view.say(f"A(DP)²SGD {view.privacy_line(private)}")


def _run(name: str, config: Config) -> Run:
    with watching(view.named(config, name)) as on_status:
        return simulate(config, on_status=on_status)


def _row(name: str, run: Run, baseline: Run) -> tuple[str, ...]:
    assert run.accuracy is not None
    staleness = sum(each.staleness_mean * each.share for each in run.learners)
    epsilon = "none" if run.guarantee is None else f"{run.guarantee.epsilon:.2f}"
    speed_up = f"{baseline.seconds / run.seconds:.1f}×"
    return name, f"{run.accuracy:.1%}", f"{run.seconds:,.0f} s", speed_up, f"{staleness:.1f}", epsilon
