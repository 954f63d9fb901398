"""Run a study's missing cells, then print and write what is finished."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from adp2sgd.cli import view
from adp2sgd.errors import ConfigError
from reproduction import render
from reproduction.cells import Choice, finished, run_all
from reproduction.studies import Study, check, find


def reproduce(
    name: str, choice: Choice, *, out: Path | None = None, jobs: int = 1, as_json: bool = False,
    quiet: bool = False, write_docs: bool = False,
) -> None:  # fmt: skip
    """Finished cells are only read. Tables go to standard output, progress to standard error."""
    check(name, choice)
    if jobs > 1 and (choice.processes or name == "sizes"):
        raise ConfigError(f"--jobs {jobs} would spoil times that are measured; leave it out")
    study, out = find(name), out or render.RESULTS
    _can_write(study, out, write_docs)
    finished(out, name)  # a damaged file shows before anything is measured
    cells = study.cells(choice)

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    before = sum(cell.path(out).exists() for cell in cells)
    if before:
        say(f"{before} of {len(cells)} cells were finished before, in {out}; another --out measures them anew")
    records = run_all(cells, out, jobs=jobs, quiet=quiet, say=say)
    if as_json:
        view.print_json([{key: value for key, value in r.items() if key != "curve"} for r in records])
    else:
        for table in study.tables(records):
            print(render.markdown(table), end="\n\n")
    if write_docs or before < len(cells):
        say(f"written: {render.write_page(name, out)}")
    for page in render.DOCUMENTS if write_docs else ():
        page.write_text(render.filled(page.read_text(encoding="utf-8"), out), encoding="utf-8")
        say(f"written: {page}")


def _can_write(study: Study, out: Path, write_docs: bool) -> None:
    """Refuse, before anything is measured, what could not be written afterwards."""
    if write_docs and out.resolve() != render.RESULTS.resolve():
        raise ConfigError(f"--write-docs is for the results in {render.RESULTS}; leave --out {out} out")
    if study.x and find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib, which is not installed; run: pip install 'adp2sgd[report]'")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be a folder ({error.strerror}); choose another") from None
