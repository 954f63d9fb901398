"""SIGINT and SIGTERM: the first one asks for a clean end, the second one ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from adp2sgd.errors import InterruptedRunError


class Interrupt:
    """While entered, the first SIGINT or SIGTERM only sets `requested`; the second acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._catch) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self._before[number])


@contextmanager
def telling_that_nothing_is_kept() -> Iterator[None]:
    """For a run without a folder: its interruption says that it cannot be resumed."""
    try:
        yield
    except InterruptedRunError:
        raise InterruptedRunError("interrupted; the run had no folder, so nothing of it is kept") from None
