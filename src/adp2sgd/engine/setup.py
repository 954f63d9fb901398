"""Configuration → task, shards, graph and learners, alike for every engine."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adp2sgd import topology
from adp2sgd.config import Config, naming
from adp2sgd.data import shards
from adp2sgd.data.batches import Batches, PoissonBatches, ReshuffledBatches
from adp2sgd.device import AUTOCAST, compiled, tune
from adp2sgd.engine.evaluate import HeldOut
from adp2sgd.engine.fit import check_privacy
from adp2sgd.errors import WITHHELD, ConfigError, LedgerError, kind, tellable, telling_no_values
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import choose
from adp2sgd.gradient.engine import Engine
from adp2sgd.gradient.privatize import Adaptation, GradientStep, PlainStep, PrivateStep
from adp2sgd.gradient.proof import synthetic
from adp2sgd.learner import Learner
from adp2sgd.privacy.budget import Budget
from adp2sgd.privacy.fixed_work import rows_for
from adp2sgd.privacy.ledger import read as read_ledger
from adp2sgd.privacy.mechanism import TIMED_THREAT_MODEL, beside_count
from adp2sgd.privacy.streams import Streams
from adp2sgd.progress import Progress
from adp2sgd.record import Folder, LearnerResult, Point, Run, versions
from adp2sgd.task import Task, resolve

SEEDED_PIECE = 512  # most rows (a record has `copies` of them) whose gradients are taken at once in a seeded run
NO_GUARANTEE = {
    "none": "the gradients carry no noise",
    "paper": "the paper's noise is added to gradients that are not clipped, so one record's influence is unbounded",
}


@dataclass(frozen=True, eq=False, repr=False)
class Setup:
    """Everything that the engines share before the first step."""

    config: Config
    seed: int  # of what is public: partition, initial weights, partners, delays
    device: torch.device
    task: Task
    shards: tuple[Tensor, ...]
    graph: topology.Graph
    model: FlatModel
    steps_per_epoch: float
    target_steps: int  # all learners together; the same for SYNC and ADPSGD
    notes: tuple[str, ...] = ()

    @property
    def private(self) -> bool:
        return self.config.privacy.mode == "private"

    @cached_property
    def held_out(self) -> HeldOut:
        return HeldOut(self.model, self.task, private=self.private)

    @cached_property
    def plain_step(self) -> PlainStep:
        """One for all learners of the process: they share the model, and so the recorded step."""
        config = self.config
        loss, sigma, autocast = self.task.loss, config.privacy.sigma or 0.0, AUTOCAST[config.precision]
        if not config.compile or self.device.type != "cuda":
            return PlainStep(loss, sigma, autocast)
        return PlainStep(loss, sigma, autocast, network=partial(compiled, fixed=config.privacy.mode == "paper"))

    @cached_property
    def engine(self) -> Engine:
        """Takes the private gradients of all learners of the process. It is chosen here, at the initial weights: those
        of a neighbour could hide what the choice is about."""
        # A seeded run must not depend on the memory that happens to be free.
        copies = self.config.privacy.copies
        piece = None if self.config.seed is None else max(1, SEEDED_PIECE // copies)
        autocast, name = AUTOCAST[self.config.precision], self.config.privacy.engine
        made = choose.build(
            self.model, self.task.loss, engine=name, copies=copies, piece=piece, autocast=autocast,
            expected=min(self.config.batch_size, max(len(shard) for shard in self.shards)),
        )  # fmt: skip
        if isinstance(made, choose.Automatic):
            inputs, targets = (part[:0].to(self.device) for part in (self.task.train.inputs, self.task.train.targets))
            made.settle(self.task.prepare(inputs), targets)
        return made

    def save_model(self, theta: Tensor, folder: Folder) -> None:
        """θ as model.safetensors, with everything that the module's `load_state_dict` asks for."""
        self.model.load(theta)
        tensors = {name: tensor.detach().clone() for name, tensor in self.model.module.state_dict().items()}
        folder.save_tensors("model.safetensors", tensors, {"task": self.config.task, "options": self.config.options})

    def epoch(self, global_steps: int) -> float:
        return global_steps / self.steps_per_epoch

    def site(self, learner: int) -> str | None:
        """Whose records the learner has, where each has one site's."""
        train = self.task.train
        if self.config.data.partition != "site" or train.sites is None:
            return None
        number = int(train.sites[self.shards[learner][0]])
        return train.site_names[number] if train.site_names else str(number)


def prepare(config: Config, seed: int | None = None) -> Setup:
    """Load the task, split its records and build the model, all from the public seed (the configuration's if it has
    one, else the given one of a run that resumes, else a fresh one)."""
    if config.seed is not None:
        seed = config.seed
    elif seed is None:
        seed = secrets.randbits(32)
    device = pick_device(config.device)
    tune(device, config.precision, private=config.privacy.mode == "private", padded=config.speeds.pad)
    graph = topology.build(config.topology, config.learners, seed)
    task = resolve(config.task, config.options, private=config.privacy.mode == "private")
    rows = shards.split(task.train, config.data, config.learners, seed)
    model = _built(task, device, config, seed, private=config.privacy.mode == "private")
    steps_per_epoch = len(task.train) / config.batch_size
    rounds = math.ceil(config.epochs * steps_per_epoch / config.learners - 1e-9)
    target = max(1, rounds) * config.learners
    notes = tuple(check_privacy(config, task, model, rows) if config.privacy.mode == "private" else _cut(config, rows))
    return Setup(config, seed, device, task, rows, graph, model, steps_per_epoch, target, notes)


def _built(task: Task, device: torch.device, config: Config, seed: int, *, private: bool) -> FlatModel:
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            return FlatModel(task.model(), device)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise ConfigError(
                f'the model of task = "{config.task}" does not fit into memory; make it smaller'
            ) from None
        if private and not tellable(error):
            raise ConfigError(
                f'the model of task = "{config.task}" cannot be made ({kind(error)}); {WITHHELD}'
            ) from None
        raise


def _cut(config: Config, rows: Sequence[Tensor]) -> list[str]:
    smallest = min(len(shard) for shard in rows)
    if smallest >= config.batch_size:
        return []
    return [
        f"batch_size = {config.batch_size} exceeds the smallest shard ({smallest} records): its learner takes all of "
        "them at each step, which epochs count as a whole batch"
    ]


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'device = "{name}" is unknown; use auto, cpu, cuda or cuda:N') from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device = "{name}" is not supported; use auto, cpu, cuda or cuda:N')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device = "{name}" but this machine has no usable GPU; use device = "cpu"')
    return device


def make_learner(setup: Setup, number: int, folder: Path, *, start: int = 0) -> Learner:
    """Learner `number`, at the initial weights; its ledger lies in `folder`."""
    config = setup.config
    streams = Streams(config.seed, number + (start << 32))  # a restart repeats neither batches nor noise
    records = setup.task.train.take(setup.shards[number])
    budget = open_budget(setup, number, folder) if config.privacy.mode == "private" else None
    return Learner(
        number=number,
        task=setup.task,
        model=setup.model,
        records=records.with_blank() if config.privacy.fixed_work else records,
        batches=_batches(config, len(records), streams, budget),
        gradient_step=_gradient_step(setup, budget),
        optimizer=config.optimizer,
        progress=Progress(number, start, limit=setup.target_steps),
        steps_per_epoch=setup.steps_per_epoch,
        streams=streams,
        budget=budget,
        copies=config.privacy.copies,
    )


def _batches(config: Config, records: int, streams: Streams, budget: Budget | None) -> Batches:
    if config.privacy.mode == "paper":
        return ReshuffledBatches(records, config.batch_size, streams)
    rows = None
    if budget is not None and config.privacy.fixed_work:
        mechanism = budget.plan.mechanism
        rows = rows_for(records, mechanism.sample_rate, mechanism.overflow)
    return PoissonBatches(records, config.batch_size, streams, rows)


def _gradient_step(setup: Setup, budget: Budget | None) -> GradientStep:
    privacy = setup.config.privacy
    if budget is None:
        return setup.plain_step
    clip_norm, noise = privacy.clip_norm, budget.plan.mechanism.noise_multiplier
    count_noise = privacy.noise_on_count(setup.config.batch_size)
    if privacy.clip_quantile is None or count_noise is None:
        return PrivateStep(setup.engine, clip_norm=clip_norm, noise_multiplier=noise)
    adaptation = Adaptation(
        quantile=privacy.clip_quantile, rate=privacy.clip_rate, count_noise=count_noise, start=clip_norm
    )
    own = beside_count(noise, count_noise)
    return PrivateStep(setup.engine, clip_norm=clip_norm, noise_multiplier=own, adaptation=adaptation)


def open_budget(setup: Setup, number: int, folder: Path) -> Budget:
    """The budget of learner `number`, whose own folder `folder` is."""
    config = setup.config
    path, site = _ledger(setup, number, folder)
    if config.privacy.ledger is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f'privacy.ledger = "{path.parent}" cannot be a folder ({error.strerror}); use another'
            ) from None
    return Budget.open(
        path,
        config.privacy,
        dataset=_dataset(config),
        site=site,
        records=len(setup.shards[number]),
        batch_size=config.batch_size,
        planned_steps=math.ceil(setup.target_steps / config.learners),
        plan_path=folder / "plan.json",
        seeded=config.seed is not None,
    )


def read_budget(setup: Setup, number: int, folder: Path) -> Budget:
    """What learner `number` has spent, for a report: also while another run has the ledger, or the disk is full."""
    path, _ = _ledger(setup, number, folder)
    seeded = setup.config.seed is not None
    return Budget.read(path, setup.config.privacy, plan_path=folder / "plan.json", seeded=seeded)


@contextmanager
def beginning(folder: Folder, *, fresh: bool) -> Iterator[None]:
    """While the learners of a run are made: if they cannot be, a `fresh` folder is free again for another try."""
    try:
        yield
    except BaseException:
        if fresh:
            _discard(folder)
        raise


def _discard(folder: Folder) -> None:
    """Remove what the begin of a run has written, and nothing else. A ledger with spent steps stays."""
    for own in folder.path.glob("learner-*"):
        ledger = own / "ledger.jsonl"
        with suppress(LedgerError, OSError):
            (own / "plan.json").unlink(missing_ok=True)
            if ledger.exists() and not read_ledger(ledger).spent().parts:
                ledger.unlink()
            own.rmdir()
    with suppress(OSError):
        (folder.path / "config.toml").unlink(missing_ok=True)
        folder.path.rmdir()


def _ledger(setup: Setup, number: int, folder: Path) -> tuple[Path, str]:
    """Where learner `number` keeps its ledger, and its site's name: in its `folder`, or with the site's in
    `privacy.ledger`."""
    config = setup.config
    if config.privacy.ledger is None:
        return folder / "ledger.jsonl", str(number)
    site = setup.site(number)
    assert site is not None  # the partition is by site
    return Path(config.privacy.ledger).expanduser() / f"{_slug(_dataset(config))}-{_slug(site)}.jsonl", site


def _dataset(config: Config) -> str:
    """The data's name in a ledger: the same for every model that is trained on them."""
    return config.privacy.dataset or config.task.partition("/")[0]


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text)


def load_model(folder: str | Path, task: str | Task | None = None) -> nn.Module:
    """The average model θ of a finished run, in evaluation mode. It reads what the task's `prepare` gives.

    Guarantee: imports no code that the folder names. For a run whose task is a function of your own, `task` is its
    name, "package.module:function", or the Task that it makes.
    """
    home = Folder.open(folder)
    if not (home.path / "model.safetensors").exists():
        raise ConfigError(f"{folder} holds no model.safetensors; give the folder of a finished run")
    if not isinstance(task, Task):
        settings = naming(home.settings, task)
        task = resolve(settings.task, settings.options, private=settings.privacy.mode == "private")
    model = task.model()
    try:
        model.load_state_dict(home.load_tensors("model.safetensors")[0])
    except RuntimeError:
        raise ConfigError(
            f"the model in {folder} is not that of the task; give the task that it was trained with"
        ) from None
    return model.eval()


def explain_gradients(config: Config) -> list[choose.Row]:
    """How private mode would take the gradients of each layer of the configured model. Looks at no record's values."""
    with telling_no_values(private=True):
        task, device = resolve(config.task, config.options, private=True), pick_device(config.device)
        model = _built(task, device, config, config.seed or 0, private=True)
        copies, rows = config.privacy.copies, min(len(task.train), config.batch_size)
        stored, targets = (
            synthetic(part[:0].to(device), rows * copies) for part in (task.train.inputs, task.train.targets)
        )
        inputs, autocast = task.prepare(stored), AUTOCAST[config.precision]
        return choose.explain(model, task.loss, inputs, targets, copies=copies, autocast=autocast)


class Accounted(Protocol):
    """What a result needs of a learner beside its figures."""

    @property
    def budget(self) -> Budget | None: ...
    @property
    def noise_source(self) -> str: ...


def finish(
    setup: Setup,
    learners: Sequence[Accounted],
    results: tuple[LearnerResult, ...],
    curve: tuple[Point, ...],
    *,
    theta: Tensor,
    clock: str,
    folder: str,
) -> Run:
    """What a run reports, from what its learners did."""
    config, last = setup.config, curve[-1]
    return Run(
        task=config.task,
        algorithm=config.algorithm,
        accuracy=last.accuracy,
        loss=last.loss,
        seconds=last.seconds,
        clock=clock,
        global_steps=last.global_steps,
        overshoot=max(0, last.global_steps - setup.target_steps),
        epochs=last.epoch,
        consensus=last.consensus,
        seeded=config.seed is not None,
        guarantee=_guarantee(learners),
        guarantee_why=_why_none(config, learners),
        noise_source=learners[0].noise_source,
        learners=tuple(replace(each, site=setup.site(each.learner)) for each in results),
        sites=_by_site(setup, theta),
        curve=curve,
        notes=(
            *setup.notes,
            *setup.held_out.notes,
            *_capped(learners, whole=last.global_steps >= setup.target_steps),
            *_new(config, learners),
        ),
        versions=versions(),
        folder=folder,
    )


def _capped(learners: Sequence[Accounted], *, whole: bool) -> list[str]:
    """Who trained no more from some step on: with uneven speeds the fast learners, to the surprise of many. In a
    `whole` run where all have taken the last step that they may, they have simply finished."""
    at = [
        k
        for k, each in enumerate(learners)
        if each.budget is not None and each.budget.steps >= each.budget.plan.max_steps
    ]
    if not at or (whole and len(at) == len(learners)):
        return []
    who = f"learner{'s' if len(at) > 1 else ''} {', '.join(map(str, at[:8]))}{' and more' if len(at) > 8 else ''}"
    return [
        f"{who} reached the cap on private steps and only averaged from then on; a larger privacy.headroom (more "
        "noise) or privacy.epsilon allows more steps"
    ]


def _new(config: Config, learners: Sequence[Accounted]) -> list[str]:
    """Which of the sites' ledgers began with this run: one in a wrong folder or of a wrong name would."""
    budgets = [each.budget for each in learners if config.privacy.ledger is not None and each.budget is not None]
    new = [budget.ledger for budget in budgets if not budget.plan.before.parts]
    if not new:
        return []
    notes = [f"these ledgers began with this run and know of nothing that was spent before: {', '.join(map(str, new))}"]
    own = {budget.ledger for budget in budgets}
    near = [each for each in sorted(new[0].parent.glob(f"{_slug(_dataset(config))}-*.jsonl")) if each not in own]
    others = [each for each in near if _charged(each, _dataset(config))]
    if others:
        notes.append(
            f"the same data set has been charged to other sites too: {', '.join(map(str, others))}; a record that is "
            "theirs as well has spent in both, which no ledger adds up: keep the records of a site together"
        )
    return notes


def _charged(ledger: Path, dataset: str) -> bool:
    try:
        account = read_ledger(ledger)
    except LedgerError:
        return True  # nobody can say what was
    return account.dataset == dataset and bool(account.spent().parts)


def _guarantee(learners: Sequence[Accounted]) -> Any:
    """What holds for every learner, and so for the run where no record lies at two of them: the largest ε that may be
    spent, and the largest that was."""
    found = [learner.budget.guarantee() for learner in learners if learner.budget is not None]
    if len(found) < len(learners):  # not private; or a ledger cannot be read, and nobody can say what was spent there
        return "none"
    most = max(found, key=lambda each: each.epsilon_spent)
    weakest = max(found, key=lambda each: each.epsilon)
    told = {name: getattr(most, name) for name in ("epsilon_spent", "epsilon_others", "steps", "max_steps")}
    alone = max(each.epsilon_alone or 0.0 for each in found)
    threat = min((each.threat_model for each in found), key=_covers_time)
    weakest = replace(weakest, **told, epsilon_alone=alone, threat_model=threat)
    valid_if = "no record lies at two learners"
    return {**asdict(weakest), "valid_if": valid_if, "text": f"{weakest}; valid where {valid_if}"}


def _covers_time(threat_model: str) -> bool:
    return threat_model == TIMED_THREAT_MODEL


def _why_none(config: Config, learners: Sequence[Accounted]) -> str | None:
    if config.privacy.mode != "private":
        return NO_GUARANTEE[config.privacy.mode]
    unknown = any(learner.budget is None for learner in learners)
    return "a learner's ledger cannot be read, so what it spent is unknown; see the notes" if unknown else None


def _by_site(setup: Setup, theta: Tensor) -> dict[str, dict[str, float | int | None]]:
    sites, names = setup.task.test.sites, setup.task.test.site_names
    if sites is None:
        return {}
    figures = {}
    for number, name in enumerate(names):
        rows = torch.nonzero(sites == number).flatten()
        if len(rows):
            metrics = setup.held_out.figures(theta, rows)
            figures[name] = {"accuracy": metrics.accuracy, "loss": metrics.loss, "records": len(rows)}
    return figures
