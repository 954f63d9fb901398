"""What four hospitals gain by training together: each alone, all records in one place, and each at home by A(DP)²SGD.

    python experiments/hospitals.py [--seeds 5] [--epsilon 1 3] [--json]

One recipe for all rows, that of heart.toml. Prints a Markdown table of held-out accuracies in percent: a column for
each hospital's own held-out patients, then the mean of the four columns with its standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from adp2sgd.config import Config, Data, load_config
from adp2sgd.data.heart import HOSPITALS
from adp2sgd.engine import simulate
from adp2sgd.run_folder import Run

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Row:
    """Held-out accuracies (fractions), means over the seeds; `spread` is the deviation of `mean` over the seeds."""

    name: str
    hospitals: dict[str, float]
    mean: float
    spread: float
    epsilon: float | None  # the largest of the learners'


def settings(epsilons: list[float]) -> Iterator[tuple[str, Config]]:
    """The rows of the table."""
    together, private = load_config(HERE / "heart.toml"), load_config(HERE / "heart_private.toml")
    alone = together.replace(learners=1, data=Data(partition="iid"))
    for hospital in HOSPITALS:
        yield f"{hospital} alone", alone.replace(options={"only": hospital})
    yield "all records pooled", alone
    yield "four at home, ADPSGD", together
    for epsilon in epsilons:
        yield (
            f"four at home, A(DP)²SGD, ε = {epsilon:g}",
            private.replace(privacy=private.privacy.replace(epsilon=epsilon)),
        )


def measure(name: str, config: Config, seeds: int) -> Row:
    runs = [simulate(config.replace(seed=seed, evaluate_every=config.epochs)) for seed in range(seeds)]
    means = [mean_over_sites(run) for run in runs]
    spent = [learner.epsilon for run in runs for learner in run.learners if learner.epsilon is not None]
    return Row(
        name=name,
        hospitals={site: statistics.mean(run.sites[site]["accuracy"] for run in runs) for site in HOSPITALS},
        mean=statistics.mean(means),
        spread=statistics.stdev(means) if seeds > 1 else 0.0,
        epsilon=max(spent, default=None),
    )


def mean_over_sites(run: Run) -> float:
    """Every hospital counts alike, however many patients it has."""
    return float(statistics.mean(site["accuracy"] for site in run.sites.values()))


def markdown(rows: list[Row]) -> str:
    header = ["trained on", *HOSPITALS, "mean"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in rows:
        figures = [f"{100 * row.hospitals[site]:.1f}" for site in HOSPITALS]
        lines.append("| " + " | ".join([row.name, *figures, f"{100 * row.mean:.1f} ± {100 * row.spread:.1f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs per row (default 5)")
    parser.add_argument("--epsilon", type=float, nargs="*", default=[1.0, 3.0], help="private rows (default 1 3)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(name, config, arguments.seeds) for name, config in settings(arguments.epsilon)]
    print(json.dumps([vars(row) for row in rows], indent=1) if arguments.json else markdown(rows))


if __name__ == "__main__":
    main()
