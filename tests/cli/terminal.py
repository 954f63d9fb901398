"""A real terminal of a given size: what a person sees of a command, from its first frame to its last."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte


class Terminal:
    """Runs commands in a pseudo-terminal; `frames` are the screens that differed, each as lines of text."""

    def __init__(self, columns: int, lines: int, cwd: Path) -> None:
        self.columns, self.lines, self.cwd = columns, lines, cwd
        self.frames: list[list[str]] = []
        self.code: int | None = None

    def run(self, *arguments: str, wanted: Callable[[str], bool] = lambda _: False, patience_s: float = 150) -> str:
        """The last screen; once a frame is `wanted`, and at the command's end. Fails where it takes too long."""
        screen = pyte.HistoryScreen(self.columns, self.lines, history=1000, ratio=1.0)
        stream, self.frames = pyte.ByteStream(screen), []
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self.lines, self.columns, 0, 0))
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        process = subprocess.Popen(
            [sys.executable, "-m", "adp2sgd", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=self.cwd, env={**environment, "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(theirs)
        end = time.monotonic() + patience_s
        try:
            while time.monotonic() < end and self._feed(ours, stream):
                shown = [line.rstrip() for line in screen.display]
                if not self.frames or shown != self.frames[-1]:
                    self.frames.append(shown)
                if wanted("\n".join(shown)):
                    break
        finally:
            process.terminate() if process.poll() is None else None
            self.code = process.wait(30)
            os.close(ours)
        above = ["".join(row[column].data for column in range(self.columns)).rstrip() for row in screen.history.top]
        return "\n".join([*above, *(line.rstrip() for line in screen.display)])

    @staticmethod
    def _feed(terminal: int, stream: pyte.ByteStream) -> bool:
        """False once the command has ended."""
        if not select.select([terminal], [], [], 1.0)[0]:
            return True
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the last program that writes to the terminal is gone
            return False
        stream.feed(part)
        return bool(part)
