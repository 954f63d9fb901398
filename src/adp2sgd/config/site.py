"""site.toml: what belongs to one site and never leaves it. And what becomes of run.toml at that site.

run.toml belongs to the consortium and is the same everywhere. A site adds where its data lie and how it keeps its
budget; it may tighten what run.toml allows, and never loosen it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from adp2sgd.config.privacy import Privacy
from adp2sgd.config.run import Config, load_config
from adp2sgd.config.sections import Data
from adp2sgd.errors import ConfigError
from adp2sgd.settings import Section, require, section

PATHS = ("certificate", "key", "authority", "roster", "revoked")
DATA_PATHS = ("data_dir", "path", "folder")  # of [options]: where the data lie
AT_THE_SITE = ("ledger", "dataset", "runs")  # of [privacy]


@dataclass(frozen=True, kw_only=True)
class SitePrivacy(Section):
    """The site's own budget. Unset: what run.toml says."""

    WHERE: ClassVar[str] = "privacy."

    epsilon: float | None = None  # at most run.toml's
    delta: float | None = None  # at most run.toml's
    ledger: str = "ledger"  # a folder: what these records have spent, over all runs
    dataset: str | None = None  # the data's name in the ledger; unset: the task's family
    runs: int | None = None  # runs that share the ledger's ε


@dataclass(frozen=True, kw_only=True)
class SiteFile(Section):
    """One site's file. Paths are relative to it until `load_site` has resolved them."""

    name: str
    listen: tuple[str, ...] = ()  # "host:port"; empty where only outgoing connections are allowed
    records: int | None = None  # declared, rounded number of training records: the sample rate is batch_size / records
    task: str | None = None  # "package.module:function": the site's own code for run.toml's task
    device: str = "auto"
    certificate: str = "site.crt"
    key: str = "site.key"
    authority: str = "authority.crt"  # the consortium's
    roster: str = "roster.toml"
    revoked: str = "revoked.crl"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task, for this site alone: where its data lie
    privacy: SitePrivacy = field(default_factory=SitePrivacy)

    def _check(self) -> None:
        require(self.records is None or self.records >= 1, "records", self.records, "use at least 1")
        fix = 'write "package.module:function"; built-in tasks belong in run.toml'
        require(self.task is None or ":" in self.task, "task", self.task, fix)


def load_site(path: str | Path) -> SiteFile:
    """The file, with every path made absolute."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the site's own TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    if "name" not in raw:
        raise ConfigError(f'{path} has no name; write name = "…", as in the roster')
    site, home = section(SiteFile, raw), path.parent.absolute()
    options = dict(site.options)
    options |= {key: str(home / Path(value).expanduser()) for key, value in options.items() if key in DATA_PATHS}
    ledger = str(home / Path(site.privacy.ledger).expanduser())
    paths = {name: str(home / Path(getattr(site, name)).expanduser()) for name in PATHS}
    return site.replace(**paths, options=options, privacy=site.privacy.replace(ledger=ledger))


def load_run(path: str | Path) -> Config:
    """run.toml, for sites: what cannot hold between sites is refused."""
    config = load_config(path)
    if config.seed is not None:
        raise ConfigError(
            f"seed = {config.seed} in {path} would publish the noise of every site, and with it their records; remove "
            "it, and set consortium.init_seed, which makes the initial weights and nothing else"
        )
    if config.consortium.total_samples is None:
        raise ConfigError(
            f"consortium.total_samples is missing in {path}; set it to the training records of all sites together, "
            "rounded: no site knows the others' numbers"
        )
    if config.consortium.init_seed is None and config.consortium.weights is None:
        raise ConfigError(
            f"{path} gives no initial weights; set consortium.init_seed = 0, or consortium.weights with its SHA-256"
        )
    if config.algorithm != "adpsgd":
        raise ConfigError(f'algorithm = "{config.algorithm}" is not offered between sites; use "adpsgd"')
    for name in AT_THE_SITE:
        if getattr(config.privacy, name) is not None:
            raise ConfigError(f"privacy.{name} belongs to a site; set it in site.toml, not in {path}")
    largest, asked = config.consortium.epsilon, config.privacy.epsilon
    if largest is not None and asked is not None and asked > largest:
        raise ConfigError(f"privacy.epsilon = {asked:g} exceeds consortium.epsilon = {largest:g}; lower it")
    return config


def at_site(config: Config, site: SiteFile) -> Config:
    """The run as this site trains it: with its own data, device and budget. This never leaves the site."""
    given = {key: value for key, value in site.options.items() if key in config.options}
    if given:
        key = next(iter(given))
        raise ConfigError(f"options.{key} is the consortium's in run.toml; remove it from site.toml")
    task = config.task if site.task is None else site.task
    options = {**config.options, **site.options}
    privacy = _tightened(config.privacy, site.privacy)
    return config.replace(task=task, options=options, device=site.device, data=Data(partition="site"), privacy=privacy)


def _tightened(run: Privacy, site: SitePrivacy) -> Privacy:
    if run.mode != "private":
        for name in ("epsilon", "delta"):
            if getattr(site, name) is not None:
                raise ConfigError(
                    f'site.toml sets privacy.{name}, but run.toml has privacy.mode = "{run.mode}", which gives no '
                    "guarantee; do not join, or remove it"
                )
        return run
    for name in ("epsilon", "delta"):
        allowed, own = getattr(run, name), getattr(site, name)
        if allowed is not None and own is not None and own > allowed:
            raise ConfigError(
                f"privacy.{name} = {own:g} in site.toml is looser than run.toml's {allowed:g}; sites only tighten it"
            )
    own = {name: getattr(site, name) for name in ("epsilon", "delta") if getattr(site, name) is not None}
    return run.replace(ledger=site.ledger, dataset=site.dataset, runs=site.runs, **own)
