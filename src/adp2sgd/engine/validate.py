"""Whether task, model and configuration fit together, and keep the guarantee: checked once, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.config import Config, Privacy, load_config
from adp2sgd.data.records import Records, RecordSet
from adp2sgd.engine.evaluate import HeldOut
from adp2sgd.engine.plan import Plan
from adp2sgd.errors import WITHHELD, ConfigError, reason
from adp2sgd.flat import FlatModel
from adp2sgd.losses import cross_entropy
from adp2sgd.metrics import OF_CLASSES
from adp2sgd.privacy import checks
from adp2sgd.privacy.budget_checks import check_budget
from adp2sgd.privacy.mechanism import RECORD
from adp2sgd.task import Task


def validate(plan: Plan, task: Task, model: FlatModel, shards: Sequence[int], *, resumed: bool = False) -> list[str]:
    """Refuse what cannot be trained, or would void the guarantee; returns warnings.

    `shards`: how many records, or units, each learner has that is made here; other sites check their own. A private run
    that is `resumed` has spent already and is not refused for its held-out records: what fails then is a note in its
    result.
    """
    if not plan.private:
        _check_finite(task.train)
    notes = _check_privacy(plan.config, task, model, shards) if plan.private else _cut(plan.config, shards)
    notes += _begins_with(plan)
    if not (plan.private and resumed):
        check_fit(task, model, private=plan.private)
    return notes


def _begins_with(plan: Plan) -> list[str]:
    """Refuse a private run whose first model tells of records that no shared ledger covers; returns warnings."""
    config = plan.config
    if not plan.private or config.init_from is None:
        return []
    if config.init_public:
        return [f'init_public = true: ε does not cover the records that init_from = "{config.init_from}" learned from']
    source = Path(config.init_from).expanduser()
    if not (source / "config.toml").is_file():
        why = "is no run's folder, so nothing tells what it was trained on"
    else:
        before = load_config(source / "config.toml").privacy
        if before.mode != "private":
            why = "is a run without privacy"
        elif _place(before.ledger) is None or _place(before.ledger) != _place(config.privacy.ledger):
            why = "does not share this run's privacy.ledger"
        else:
            return []
    raise ConfigError(
        f'init_from = "{config.init_from}" {why}; begin with a private run on the same privacy.ledger, or set '
        "init_public = true if its model was trained on public data only"
    )


def _place(ledger: str | None) -> Path | None:
    return None if ledger is None else Path(ledger).expanduser().resolve()


def _cut(config: Config, shards: Sequence[int]) -> list[str]:
    smallest = min(shards)
    if smallest >= config.batch_size:
        return []
    return [
        f"batch_size = {config.batch_size} exceeds the smallest shard ({smallest} records): its learner takes all of "
        "them at each step, which epochs count as a whole batch"
    ]


def check_fit(task: Task, model: FlatModel, *, private: bool) -> None:
    """Refuse a model that cannot read the task's records, a loss or labels of the wrong shape, and labels that the
    model has no output for. Private mode has checks of its own of what goes wrong in training, which look at no record;
    here it only tries whether all held-out records can be evaluated, before the first draw."""
    part = task.test if private else task.train
    first = torch.arange(min(2, len(part)))
    model.module.eval()
    with torch.no_grad(), _told(task, private):
        stored, targets = part.read(first)
        inputs = task.prepare(tree.each(lambda each: each.to(model.device), stored))
        outputs = tree.call(model.module, inputs)
    for metric in OF_CLASSES & task.metrics.keys():
        _check_shapes(metric, outputs, targets, part.labels())
    if not private and task.loss is cross_entropy:
        _check_labels(task, outputs.shape[-1])
    with torch.no_grad(), _told(task, private):
        losses = task.loss(outputs, targets.to(model.device))
    checks.refuse_shape(losses, len(first), ConfigError)
    if private:
        HeldOut(model, task, private=True).check()
    model.module.train()


def _check_shapes(metric: str, outputs: object, targets: Tensor, all_targets: Tensor | None) -> None:
    """Refuse outputs and targets that `metric`, one of classes, would make no sense of."""
    fix = f"leave {metric} out of the task's metrics"
    if not isinstance(outputs, Tensor):
        raise ConfigError(f"a {type(outputs).__name__} of outputs has no {metric}; {fix}")
    known = targets if all_targets is None else all_targets
    if known.is_floating_point() and bool((known != known.round()).any()):
        raise ConfigError(f"targets that are no whole numbers have no {metric}; {fix}, or give labels from 0")
    if outputs.dim() > 3 and targets.shape == (len(outputs), *outputs.shape[2:]):
        raise ConfigError(
            f"outputs of shape {tuple(outputs.shape)} hold classes of pixels, and {metric} reads classes last; {fix}, "
            'and give it a loss of one number per record: cross_entropy(…, reduction="none").flatten(1).mean(1)'
        )
    if targets.shape not in (outputs.shape, outputs.shape[:-1]):
        raise ConfigError(
            f"targets of shape {tuple(targets.shape)} are no labels for outputs of shape {tuple(outputs.shape)}; give "
            f"them shape {tuple(outputs.shape[:-1])}, or {fix}"
        )


def _check_finite(records: RecordSet) -> None:
    """Refuse NaN and infinity in training records in memory, by their place. No value is told.

    Not for private mode: whether a run begins must not depend on one record, which contributes zero there.
    """
    if isinstance(records, Records):
        inputs = records.inputs if isinstance(records.inputs, dict) else {"inputs": records.inputs}
        parts = {key: part for key, part in inputs.items() if isinstance(part, Tensor)}
        for key, part in {**parts, "targets": records.targets}.items():
            _refuse_infinite(f"training record {{}} (counted from 0): {key}", part)


def _refuse_infinite(where: str, values: Tensor) -> None:
    if not values.is_floating_point() or bool(values.isfinite().all()):
        return
    row, *place = (~values.isfinite()).nonzero()[0].tolist()
    column = f" at position {', '.join(map(str, place))}" if place else ""
    raise ConfigError(f"{where.format(row)}{column} is NaN or infinite; correct the value or remove the record")


def _check_labels(task: Task, classes: int) -> None:
    """In memory only: of a dataset that is read by index, no record is read before it is drawn."""
    found = [labels for part in (task.train, task.test) if (labels := part.labels()) is not None and len(labels)]
    largest = max((int(labels.max()) for labels in found), default=0)
    if largest >= classes:
        raise ConfigError(f"a record has the label {largest}, but the model has {classes} outputs; labels count from 0")


@contextmanager
def _told(task: Task, private: bool) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not private and not isinstance(error, RuntimeError | ValueError | IndexError | TypeError):
            raise  # a bug in the task's code
        part, why = task.part(error, "loss"), reason(error, private=private)
        fix = WITHHELD if private else "try them on one batch"
        raise ConfigError(
            f"model and loss do not fit the task's records: its {part} fails on the first two ({why}); {fix}"
        ) from None


def _check_units(config: Config, task: Task) -> list[str]:
    """A note on data whose records may belong to people who have several of them."""
    if task.train.units is not None:
        return []
    each = config.privacy.records_per_unit
    if each != Privacy.records_per_unit:
        raise ConfigError(
            f"privacy.records_per_unit = {each} means nothing for data without units; set options.unit, or remove it"
        )
    if task.identifier is None:
        return []
    return [
        f'"{task.identifier}" seems to tell whose a record is, and ε is per record: a person with several records is '
        f'protected less; set options.unit = "{task.identifier}" to protect each person as a whole'
    ]


def check_ledger(config: Config, where: str = "") -> list[str]:
    """Refuse a ledger that could not say whose records were drawn; returns warnings. `where`: the file to change."""
    privacy = config.privacy
    if privacy.ledger is None and config.seed is None:
        return ["the ledger covers this run alone; set privacy.ledger to a folder to compose over a site's runs"]
    if privacy.ledger is not None and (config.data.partition != "site" or config.seed is not None):
        raise ConfigError(
            f'privacy.ledger = "{privacy.ledger}" needs data.partition = "site" and no seed: only then do records stay '
            "with their site, and noise is spent for good; remove it or change those"
        )
    if (
        privacy.ledger is not None
        and privacy.dataset is None
        and (config.task.startswith("<") or ":" in config.task or config.task.partition("/")[0] in ("table", "images"))
    ):
        raise ConfigError(
            f'privacy.dataset is missing{where}; name the data of task = "{config.task}" for privacy.ledger'
        )
    return []


def _check_privacy(config: Config, task: Task, model: FlatModel, shards: Sequence[int]) -> list[str]:
    """Refuse what would void the guarantee; returns warnings."""
    privacy, smallest = config.privacy, min(shards)
    if config.batch_size > smallest:
        raise ConfigError(
            f"batch_size = {config.batch_size} exceeds the smallest shard ({smallest}); lower it or use fewer learners"
        )
    warnings = check_budget(
        records=max(shards),
        delta=privacy.delta,
        clip_norm=privacy.clip_norm,
        sample_rate=config.batch_size / smallest,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        fitted=task.fitted,
        unit=RECORD if task.train.units is None else task.train.units.name,
    )
    warnings += _check_units(config, task)
    warnings += check_ledger(config)
    warnings.append("loss and accuracy are of held-out records, which ε does not cover; publish them by choice only")
    if privacy.copies > 1 and task.augment is None:
        raise ConfigError(
            f'privacy.copies = {privacy.copies} needs augmentation, and task = "{config.task}" has none; set '
            "options.augment = true where the data are images, or leave copies out"
        )
    stored, targets = (tree.each(lambda each: each.to(model.device), part) for part in task.train.blank())
    warnings += checks.check_rows(task.prepare, task.augment, stored)
    inputs, expected = task.prepare(stored), config.batch_size
    return warnings + checks.check_model(model.module, task.loss, inputs, targets, expected=expected)
