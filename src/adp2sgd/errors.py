"""The exceptions that users meet. Each message is one line that names the value and the fix.

Adp2sgdError
├── ConfigError       a setting is unknown, of the wrong type or impossible
├── DataError         a data file or folder is missing, damaged or of the wrong shape
├── PrivacyError      the run asks for a guarantee that it cannot have
│   └── LedgerError   the record of spent privacy is damaged, foreign or in use
└── RunError          a run that had begun cannot go on; what was recorded is kept
    ├── DivergedError a learner's model is no longer finite
    └── InterruptedRunError   the user asked it to stop; it can be resumed
"""

from __future__ import annotations


class Adp2sgdError(Exception):
    """Anything that a user can act on. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class ConfigError(Adp2sgdError, ValueError):
    """A setting is unknown, of the wrong type or impossible."""


class DataError(Adp2sgdError):
    """A data file or folder is missing, damaged or of the wrong shape."""


class PrivacyError(Adp2sgdError):
    """The run asks for a guarantee that it cannot have."""


class LedgerError(PrivacyError):
    """The record of spent privacy is damaged, belongs to other data, or is in use by another process."""


class RunError(Adp2sgdError):
    """A run that had begun cannot go on. What was recorded until then is kept."""

    exit_code = 1


class DivergedError(RunError):
    """A learner's model holds NaN or infinity."""


class InterruptedRunError(RunError):
    """The user asked the run to stop. It ended cleanly and can be resumed."""

    exit_code = 130
