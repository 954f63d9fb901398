"""The studies by name: which cells each one has, and which tables and curves it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from adp2sgd import config
from adp2sgd.engine.compute import pick_device
from adp2sgd.errors import ConfigError
from reproduction import accounting, computed, convergence, paper, sizes, tables, training
from reproduction.cells import Cell, Choice, Record
from reproduction.tables import Table
from reproduction.training import cell

TRAINING = frozenset(each.name for each in fields(Choice))
ALWAYS = frozenset({"quick", "device"})
OPTIONS = {"models": "model", "algorithms": "algorithm", "seeds": "seed"}  # where the command line says it otherwise


@dataclass(frozen=True, kw_only=True)
class Study:
    """`x` is what the figures plot quality against; None where a study has none. `takes`: what of a `Choice` has a
    meaning here, and `families` whose models."""

    title: str
    cells: Callable[[Choice], list[Cell]]
    tables: Callable[[Sequence[Record]], list[Table]]
    x: str | None = None
    takes: frozenset[str] = TRAINING
    families: tuple[str, ...] = ("cifar10", "speech")


def _grid(study: str, models: Sequence[str], noise: Mapping[str, Sequence[float]], choice: Choice) -> list[Cell]:
    """Every combination of model, noise, algorithm and seed; in the quick form one model stands for all of a family."""
    models = _small_set(choice.models or models, choice)
    return [
        cell(study, model, algorithm, sigma, seed, choice)
        for model in models
        for sigma in choice.noise or noise[paper.family(model)]
        for algorithm in choice.algorithms or paper.ALGORITHMS
        for seed in choice.seeds
    ]


def _small_set(models: Sequence[str], choice: Choice) -> Sequence[str]:
    return list({paper.family(m): m for m in models}.values()) if choice.quick else models


def _table1(choice: Choice) -> list[Cell]:
    """The paper's grid; under `--private` ResNet-18 and a small CNN with the same noise, and the recipe for ε = 8."""
    if not choice.private or choice.quick:
        return _grid("table1", paper.CNNS, paper.NOISE, choice)
    names = choice.models or ("resnet18", "cnn", paper.RECIPE)
    beside = [name for name in names if name != paper.RECIPE]
    found = _grid("table1", beside, paper.NOISE, replace(choice, models=tuple(beside))) if beside else []
    algorithms = choice.algorithms or paper.ALGORITHMS
    if paper.RECIPE in names:
        found += [training.private_recipe(algorithm, seed, choice) for algorithm in algorithms for seed in choice.seeds]
    return found


def _speech(choice: Choice) -> list[Cell]:
    noise = {"speech": paper.NOISE["speech"][::2] if choice.quick else paper.NOISE["speech"]}
    return _grid("speech", ("lstm",), noise, choice)


def _slow(study: str, choice: Choice) -> list[Cell]:
    """Cases I and II, medium noise: the slow learner, and beside it the same run with equal learners."""
    slow = config.load_config(training.EXPERIMENTS / f"paper_{study}.toml").speeds
    found = []
    for model in _small_set(choice.models or ("resnet18",), choice):
        for sigma in choice.noise or (paper.NOISE[paper.family(model)][2],):
            for algorithm in choice.algorithms or paper.ALGORITHMS:
                for seed in choice.seeds:
                    for variant, speeds in (("even", config.Speeds()), ("slow", slow)):
                        found.append(cell(study, model, algorithm, sigma, seed, choice, variant=variant, speeds=speeds))
    return found


def _case3(choice: Choice) -> list[Cell]:
    """Case III, small noise: batch and learning rate doubled, and beside it the usual ones."""
    return [
        cell("case3", model, algorithm, sigma, seed, choice, variant=variant, large_batch=large)
        for model in _small_set(choice.models or ("efficientnet_b0", "lstm")[: 1 if choice.quick else 2], choice)
        for sigma in choice.noise or (paper.NOISE[paper.family(model)][1],)
        for variant, large in (("usual", False), ("doubled", True))
        for algorithm in choice.algorithms or paper.ALGORITHMS
        for seed in choice.seeds
    ]


STUDIES: dict[str, Study] = {
    "table1": Study(
        title="Table 1: accuracy",
        cells=_table1,
        tables=partial(tables.accuracy_table, "Accuracy in % of the averaged model θ (the paper's: after 300 epochs)"),
        x="epoch",
        families=("cifar10",),
    ),
    "sizes": Study(
        title="Model sizes and times",
        cells=sizes.cells,
        tables=computed.size_table,
        takes=ALWAYS | {"models"},
    ),
    "case1": Study(
        title="Case I: a random learner is slow", cells=partial(_slow, "case1"), tables=tables.slow_table, x="seconds"
    ),
    "case2": Study(
        title="Case II: one learner is always slow",
        cells=partial(_slow, "case2"),
        tables=tables.slow_table,
        x="seconds",
    ),
    "case3": Study(title="Case III: large batches", cells=_case3, tables=tables.case3_table, x="epoch"),
    "speech": Study(
        title="Speech: held-out loss of the LSTM",
        cells=_speech,
        tables=partial(tables.accuracy_table, "Held-out loss of the averaged model θ (the paper's: on other data)"),
        x="epoch",
        families=("speech",),
    ),
    "theory": Study(title="Convergence theory", cells=convergence.cells, tables=computed.theory_tables, takes=ALWAYS),
    "privacy": Study(title="Privacy", cells=accounting.cells, tables=computed.privacy_tables, takes=ALWAYS),
}


def find(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise ConfigError(f"study {name!r} is unknown; use one of: {', '.join(STUDIES)}")
    return STUDIES[name]


def check(name: str, choice: Choice) -> None:
    """Refuse what the study has no place for, before anything is measured."""
    study, usual = find(name), Choice()
    for each in fields(Choice):
        if each.name not in study.takes and getattr(choice, each.name) != getattr(usual, each.name):
            raise ConfigError(f"{name} has no --{OPTIONS.get(each.name, each.name)}; leave it out")
    known = [model for model in (*paper.MODELS, *paper.BESIDE) if paper.family(model) in study.families]
    if name == "sizes":
        known = list(paper.MODELS)
    for model in choice.models:
        if model not in known:
            raise ConfigError(f"--model {model} is unknown to {name}; use one of: {', '.join(known)}")
    for algorithm in choice.algorithms:
        if algorithm not in paper.ALGORITHMS:
            raise ConfigError(f"--algorithm {algorithm} is unknown; use one of: {', '.join(paper.ALGORITHMS)}")
    pick_device(choice.device)
