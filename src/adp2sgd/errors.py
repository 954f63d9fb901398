"""The exceptions that users meet, and what is told of others. A message is one line that names the value and the fix.

Adp2sgdError
├── ConfigError       a setting is unknown, of the wrong type or impossible
├── IdentityError     a certificate, a roster or a list of revoked certificates is missing, damaged, foreign or expired
├── DataError         a data file or folder is missing, damaged or of the wrong shape
├── PrivacyError      the run asks for a guarantee that it cannot have
│   └── LedgerError   the record of spent privacy is damaged, foreign or in use
├── RefusedError      one site does not accept another: certificate, roster, run or model
└── RunError          a run that had begun cannot go on; what was recorded is kept
    ├── DivergedError a learner's model is no longer finite
    └── InterruptedRunError   the user asked it to stop; it can be resumed

The rule of private mode: the texts of this package quote no record; any other error or warning may, so its text is
withheld, and its type and the line of code that raised it are told instead. `reason` applies the rule to an error at
hand, `withholding` to whatever Python prints by itself, `telling_no_values` to a whole run.
"""

from __future__ import annotations

import difflib
import errno
import functools
import os
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar

WITHHELD = (
    'its text may hold values of records and is withheld; to see it, run the task with privacy.mode = "none" where the '
    "data lie"
)

DEBUG = "ADP2SGD_DEBUG"
_private_runs: list[bool] = []  # not empty once a private run has begun in this process


class Adp2sgdError(Exception):
    """Anything that a user can act on. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class ConfigError(Adp2sgdError, ValueError):
    """A setting is unknown, of the wrong type or impossible."""


class IdentityError(Adp2sgdError):
    """A certificate, a roster or a list of revoked certificates is missing, damaged, foreign or expired."""


class DataError(Adp2sgdError):
    """A data file or folder is missing, damaged or of the wrong shape."""


class PrivacyError(Adp2sgdError):
    """The run asks for a guarantee that it cannot have."""


class LedgerError(PrivacyError):
    """The record of spent privacy is damaged, belongs to other data, or is in use by another process."""


class RefusedError(Adp2sgdError):
    """One site does not accept another, its certificate, its run or its model. Both ends log the text."""


class RunError(Adp2sgdError):
    """A run that had begun cannot go on. What was recorded until then is kept."""

    exit_code = 1


class DivergedError(RunError):
    """A learner's model holds NaN or infinity."""


class InterruptedRunError(RunError):
    """The user asked the run to stop. It ended cleanly and can be resumed."""

    exit_code = 130


class Adp2sgdWarning(UserWarning):
    """A warning of this package. Its text holds no value of a record, so private mode shows it."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean "…"?)` for a misspelt word; nothing where no known one is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f' (did you mean "{close[0]}"?)' if close else ""


class OtherProcessError(Exception):
    """Stands for an error of a worker process, whose traceback stays there."""

    def __init__(self, kind: str, text: str) -> None:
        """`kind`: what the function of that name says of the error; it holds no part of `text`."""
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def tellable(error: BaseException) -> bool:
    """Whether the text of the error is known to quote no record: one of ours, raised by our own code."""
    return isinstance(error, Adp2sgdError) and _modules(error)[-1:] == ["adp2sgd"]


def reason(error: BaseException, *, private: bool) -> str:
    """Why something failed, in one line: the error's text, and the line of the user's code that it passed; in private
    mode what `kind` says of it."""
    if private and not tellable(error):
        return kind(error)
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    users = [] if isinstance(error, Adp2sgdError) else users_frames(error)
    return text + "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in users[-1:])


def kind(error: BaseException) -> str:
    """The error's type, and the innermost line of the user's code that it passed: "ValueError at own.py, line 7". Where
    it passed none, the innermost line of ours.

    Guarantee: holds no part of the error's text.
    """
    if isinstance(error, OtherProcessError):
        return error.kind
    libraries = {"torch", "numpy", *sys.stdlib_module_names}
    passed = list(zip(traceback.extract_tb(error.__traceback__), _modules(error), strict=True))
    ours = [frame for frame, module in passed if module == "adp2sgd"]
    users = [frame for frame, module in passed if module not in {"adp2sgd", *libraries}]
    parts = [type(error).__name__]
    parts += [f" at {Path(frame.filename).name}, line {frame.lineno}" for frame in (users or ours)[-1:]]
    if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
        parts.append(f": {os.strerror(error.errno)}")  # the system's words, such as "No space left on device"
    return "".join(parts)


def _modules(error: BaseException) -> list[str]:
    """The top-level module of each frame that the error passed, the innermost last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]


def debugging() -> bool:
    """Whether every error shows its whole traceback: --debug, or ADP2SGD_DEBUG=1."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines of the user's own code that the error passed after it had entered this package."""
    return [traceback.extract_tb(entry, limit=1)[0] for entry in _users_entries(error)]


def _users_entries(error: BaseException) -> list[types.TracebackType]:
    found: list[types.TracebackType] = []
    entry, entered = error.__traceback__, False
    while entry is not None:
        name = str(entry.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        file = Path(entry.tb_frame.f_code.co_filename)
        library = name in sys.stdlib_module_names - {"__main__"} or {"site-packages", "dist-packages"} & set(file.parts)
        if name == "adp2sgd":
            entered = True
        elif entered and not library and not file.name.startswith("<frozen"):
            found.append(entry)
        entry = entry.tb_next
    return found


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def showing_users_code(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """An error of the user's own code keeps the user's lines in its traceback, and loses this package's. With `DEBUG`
    it keeps all."""

    @functools.wraps(function)
    def called(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **named)
        except Exception as error:
            entries = [] if debugging() or isinstance(error, Adp2sgdError) else _users_entries(error)
            if not entries:
                raise
            kept: types.TracebackType | None = None
            for entry in reversed(entries):
                kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
            raise error.with_traceback(kept)  # noqa: B904

    return called


def print_users_error(error: BaseException, program: str) -> bool:
    """Print an error of the user's own code with the user's lines alone. False: it is none, and nothing is printed."""
    frames = users_frames(error)
    if not frames and not isinstance(error, SyntaxError):  # whose text names the user's file and line
        return False
    text = "".join(traceback.format_exception_only(error)).strip()
    print("".join(traceback.format_list(frames)) + f"{program}: error in your code: {text}", file=sys.stderr)
    return True


def print_debug(error: BaseException) -> None:
    """The whole traceback on standard error, with what caused the error. Once a private run has begun in this process,
    the texts of errors that may quote records stay withheld."""
    if _private_runs:
        print("Traceback (most recent call last):", file=sys.stderr)
        traceback.print_tb(error.__traceback__)
        print(error if isinstance(error, Adp2sgdError) else f"{kind(error)}: {WITHHELD}", file=sys.stderr)
        return
    error.__suppress_context__ = False
    traceback.print_exception(error)


def print_trace(error: BaseException, *, private: bool) -> None:
    """Print the traceback on standard error: of an error of the user's own code the user's lines alone. In private mode
    without the texts of the error and its causes."""
    if not private:
        if debugging() or not print_users_error(error, "adp2sgd"):
            traceback.print_exception(error)
        return
    print("Traceback (most recent call last):", file=sys.stderr)
    traceback.print_tb(error.__traceback__)
    print(f"{kind(error)}: {WITHHELD}", file=sys.stderr)


@contextmanager
def withholding(private: bool) -> Iterator[None]:
    """In private mode: what Python prints by itself meanwhile (warnings, errors of threads and of destructors) holds no
    text that could quote a record."""
    if not private:
        yield
        return
    _private_runs.append(True)
    hooks: list[tuple[Any, str, Any]] = [
        (warnings, "showwarning", _shown_by(warnings.showwarning)),
        (threading, "excepthook", lambda told: print_trace(told.exc_value or told.exc_type(), private=True)),
        (sys, "unraisablehook", lambda told: print_trace(told.exc_value or told.exc_type(), private=True)),
    ]
    before = [getattr(owner, name) for owner, name, _ in hooks]
    for owner, name, hook in hooks:
        setattr(owner, name, hook)
    try:
        yield
    finally:
        for (owner, name, _), hook in zip(hooks, before, strict=True):
            setattr(owner, name, hook)


def _shown_by(show: Any) -> Any:
    """As `show`, with the text of a warning withheld that is not ours."""

    def shown(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        ours = issubclass(category, Adp2sgdWarning)
        show(message if ours else UserWarning(WITHHELD), category, filename, lineno, file, line)

    return shown


class StopRun(Exception):  # noqa: N818
    """Raised by a callback: the run ends properly, with model, result and guarantee. The text says why."""


class _CarriedError(Exception):
    """Carries an error of the caller's own through a run."""


def callback(given: Callable[[Any], None] | Iterable[Callable[[Any], None]] | None) -> Callable[[Any], None]:
    """The caller's functions as one. They see no record, so `telling_no_values` lets their errors pass unchanged.

    StopRun of one of them is raised when all have been called.
    """
    functions = [given] if callable(given) else list(given or ())

    def called(status: Any) -> None:
        stop: StopRun | None = None
        for function in functions:
            try:
                function(status)
            except StopRun as error:
                stop = error
            except Exception as error:
                raise _CarriedError from error
        if stop is not None:
            raise stop

    return called


@contextmanager
def telling_no_values(private: bool) -> Iterator[None]:
    """Around a whole run: `withholding`, and an error that nothing else caught becomes a RunError without its text."""
    carried: BaseException | None = None
    try:
        with withholding(private):
            yield
    except _CarriedError as error:
        carried = error.__cause__
    except Exception as error:
        if not private or isinstance(error, Adp2sgdError):
            raise
        fix = "lower batch_size" if "OutOfMemory" in type(error).__name__ else WITHHELD
        raise RunError(f"the run failed ({kind(error)}); {fix}") from None
    if carried is not None:
        raise carried
