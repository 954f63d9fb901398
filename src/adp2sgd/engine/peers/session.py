"""The starts of one site's process in one run: each has a number of its own, whatever ended the one before."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from adp2sgd.engine.status import Counters, read_status
from adp2sgd.errors import RunError
from adp2sgd.files import to_json
from adp2sgd.run_folder import Folder

SESSION = "session.json"


@dataclass(frozen=True, kw_only=True)
class Session:
    """`past` and `seconds` are of earlier starts, as far as status.json had them when they ended."""

    start: int = 0
    seconds: float = 0.0
    past: Counters = field(default_factory=Counters)


def begin(folder: Folder, number: int) -> Session:
    """The next start, on disk before anything is done under its number."""
    path = folder.path / SESSION
    session = Session()
    if path.exists():
        session = _next(folder, number)
    with folder.replacing(SESSION, private=True) as part:
        part.write_text(to_json(asdict(session)), encoding="utf-8")
    return session


def _next(folder: Folder, number: int) -> Session:
    path = folder.path / SESSION
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        before = Session(start=raw["start"], seconds=raw["seconds"], past=Counters(**raw["past"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path} is damaged; restore it, or start a new run with another --out") from None
    status = read_status(folder)
    own = status.learners[number] if status is not None else None
    if status is None or own is None or own.start != before.start:
        return Session(start=before.start + 1, seconds=before.seconds, past=before.past)
    return Session(start=before.start + 1, seconds=status.seconds, past=own.counters)
