"""`adp2sgd join`: one site of a run, from its own data alone. The same command again goes on where it ended."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from adp2sgd.config import Config, SiteFile, at_site, load_run, load_site, naming
from adp2sgd.data.units import population
from adp2sgd.device import keep_large_blocks
from adp2sgd.engine.compute import Compute, pick_device
from adp2sgd.engine.interrupt import Interrupt
from adp2sgd.engine.peers import session
from adp2sgd.engine.peers.introduction import model_facts
from adp2sgd.engine.peers.result import Stage, leave_result
from adp2sgd.engine.peers.worker import SiteWorker, Terms
from adp2sgd.engine.plan import make_plan
from adp2sgd.engine.setup import beginning, reading
from adp2sgd.engine.site import Site
from adp2sgd.engine.status import RunStatus, StatusFile
from adp2sgd.engine.threads import suited_threads
from adp2sgd.engine.validate import check_ledger, validate
from adp2sgd.errors import ConfigError, InterruptedRunError, callback, telling_no_values
from adp2sgd.flat import FlatModel
from adp2sgd.identity.credentials import Credentials, Paths
from adp2sgd.identity.roster import split_address
from adp2sgd.run_folder import Folder, Run
from adp2sgd.task import Task
from adp2sgd.tasks import resolve

SWITCH_S = 0.0005  # how long Python's training thread may keep the exchange thread from answering


def join(
    run_file: str | Path,
    site_file: str | Path,
    folder: str | Path | None = None,
    *,
    trust: str | None = None,
    alone: bool = False,
    on_status: Callable[[RunStatus], None] | None = None,
) -> Run:
    """Take part in the run of `run_file` as the site of `site_file`, until it ends. Returns this site's result.

    `folder` keeps the run (default: runs/RUN-SITE). Called again, the run goes on: with a neighbour's model where
    one answers, with its own ledger in any case. `trust` names the code that run.toml names as its task. A private run
    takes its first step when a first neighbour has been met; `alone`: at once.
    """
    run, site = naming(load_run(run_file), trust), load_site(site_file)
    home = Path("runs") / f"{Path(run_file).stem}-{site.name}" if folder is None else Path(folder)
    with telling_no_values(run.privacy.mode == "private"):
        return _join(run, Path(run_file).parent, site, home, callback(on_status or (lambda _: None)), alone=alone)


def _join(
    run: Config, beside: Path, site: SiteFile, home: Path, on_status: Callable[[RunStatus], None], *, alone: bool
) -> Run:
    if (home / "result.json").exists():
        raise ConfigError(f"{home} holds a finished run; its result is in result.json; choose another --out")
    own = at_site(run, site)
    credentials = Credentials(site.name, Paths(**{name: Path(getattr(site, name)) for name in Paths.__annotations__}))
    names = credentials.roster.names
    if len(names) != run.learners:
        raise ConfigError(f"learners = {run.learners} in run.toml, but the roster names {len(names)} sites; change one")
    resumed = (home / "config.toml").exists()
    stage, facts = _prepare(own, site, beside, names, resumed=resumed)
    listen = tuple(split_address(each, "listen") for each in site.listen)
    terms = Terms(run=run, credentials=credentials, model=facts, listen=listen, alone=alone)
    folder = Folder.reopen(home, own) if resumed else Folder.create(home, own)
    number = credentials.roster.number_of(site.name)
    with folder.held(), Interrupt() as interrupt:
        member = Site(stage.plan, number, site.name, stage.task, declared=site.records)
        with beginning(folder, fresh=not resumed):
            began = session.begin(folder, number)
            tell = StatusFile(folder, on_status)
            worker = SiteWorker(member, stage.compute, folder, terms, began, interrupt=interrupt, on_status=tell)
        keep_large_blocks()
        sys.setswitchinterval(SWITCH_S)
        with closing(worker.carrier):
            worker.live()
        if worker.control.failure is not None:
            raise worker.control.failure
        if interrupt.requested and not worker.reached.is_set():
            raise InterruptedRunError("interrupted; nothing is lost: the same command goes on")
        return leave_result(stage, worker, folder)


def _prepare(
    own: Config, site: SiteFile, beside: Path, names: tuple[str, ...], *, resumed: bool
) -> tuple[Stage, dict[str, str]]:
    """Load the site's records and build the model at the run's initial weights; refuse what does not fit."""
    private = own.privacy.mode == "private"
    if private and site.records is None:
        raise ConfigError(
            "records is missing in site.toml; declare the number of training records, rounded: it gives the sample rate"
        )
    check_ledger(own, where=" in site.toml")
    task = reading(resolve(own.task, own.options, private=private), workers=0, private=private)
    total = own.consortium.total_samples
    assert total is not None  # `load_run` asks for it
    plan = make_plan(own, total_samples=total, seed=own.consortium.init_seed or 0)
    compute = Compute(plan, task, pick_device(own.device), largest_shard=population(task.train, private=private).count)
    if own.consortium.weights is not None:
        _load_weights(compute.model, beside / own.consortium.weights, own.consortium.weights_sha256)
    facts = model_facts(compute.model)
    with suited_threads(len(compute.model.weights), own.batch_size):
        notes = validate(plan, task, compute.model, _sizes(task, site), resumed=resumed)
    return Stage(plan, task, compute, names, tuple(notes)), facts


def _sizes(task: Task, site: SiteFile) -> list[int]:
    own = population(task.train, private=site.records is not None).count
    return [own, *([] if site.records is None else [site.records])]


def _load_weights(model: FlatModel, path: Path, digest: str | None) -> None:
    """The run's initial weights, from the file that run.toml names by its SHA-256."""
    from safetensors.torch import load

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read consortium.weights = {path}: {error.strerror}") from None
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ConfigError(f"{path} has the SHA-256 {found}, not consortium.weights_sha256; take the consortium's file")
    try:
        model.module.load_state_dict(load(data))
    except RuntimeError:
        raise ConfigError(f"{path} does not fit the model of the run's task; take the consortium's file") from None
