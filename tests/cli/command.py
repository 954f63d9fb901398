"""The command line, called in this process: a real process takes seconds to load PyTorch."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from adp2sgd.cli import main as cli


class Command:
    """Calls the command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self._monkeypatch.setattr(sys, "argv", ["adp2sgd", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = self._capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    def json(self, *arguments: str) -> Any:
        code, out, complaint = self(*arguments, "--json")
        assert (code, complaint) == (0, "")
        return json.loads(out)
