"""Room for as many open files as a simulation has private learners."""

from __future__ import annotations

from adp2sgd.errors import ConfigError

FEW_FILES, OTHER_FILES = 64, 256  # that a run may have open beside its learners' ledgers: at least, at ease


def allow_open_files(learners: int) -> None:
    """Room for as many ledgers: the usual limit on open files is far below what the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = learners + OTHER_FILES
    most = wanted if hard == resource.RLIM_INFINITY else hard
    if learners + FEW_FILES > most:
        raise ConfigError(
            f"learners = {learners}: each private learner holds its ledger open, and the system allows {hard} open "
            "files; use fewer learners, or raise that limit"
        )
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, most), hard))
