"""The page as a picture or a PDF, by an installed Chromium or Chrome: what draws the page is what prints it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from adp2sgd.errors import ConfigError, RunError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
FLAGS = (
    "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--no-default-browser-check",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--virtual-time-budget=20000",
)  # fmt: skip
WIDTH = 1440  # pixels of a picture
PRINT_WIDTH = 690  # between the margins of A4
TALLEST = 16_000  # pixels of a picture: what Chromium can draw in one
LIMIT_S = 120


def pdf(page: str) -> bytes:
    return _browse(
        page, "out.pdf", "--print-to-pdf={out}", "--no-pdf-header-footer", f"--window-size={PRINT_WIDTH},1000"
    )


def png(page: str) -> bytes:
    """The whole page: the browser is asked for its height first."""
    found = re.search(rb'data-height="(\d+)"', _browse(page, None, "--dump-dom", f"--window-size={WIDTH},1000"))
    height = min(int(found[1]), TALLEST) if found else 4000
    return _browse(page, "out.png", "--screenshot={out}", f"--window-size={WIDTH},{height}")


def find_browser() -> str:
    """The command of an installed browser; $ADP2SGD_BROWSER comes first."""
    wanted = os.environ.get("ADP2SGD_BROWSER")
    for name in (wanted,) if wanted else BROWSERS:
        if found := shutil.which(name):
            return found
    raise ConfigError(
        f"no Chromium or Chrome was found ({wanted or 'not on PATH'}); install one, set ADP2SGD_BROWSER to its path, "
        "or write --format html and print that page"
    )


def _browse(page: str, out: str | None, *flags: str) -> bytes:
    """What the browser writes to the file `out`, or prints. Its profile is new and goes with it."""
    with tempfile.TemporaryDirectory(prefix="adp2sgd-", ignore_cleanup_errors=True) as scratch:
        source, target = Path(scratch) / "page.html", Path(scratch) / (out or "none")
        source.write_text(page, encoding="utf-8")
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to run as root
        command = [find_browser(), *FLAGS, *root, f"--user-data-dir={scratch}/profile"]
        command += [*(flag.format(out=target) for flag in flags), source.as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise RunError(f"{command[0]} did not finish within {LIMIT_S} s; write --format html instead") from None
        if done.returncode != 0 or (out is not None and not target.exists()):
            why = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise RunError(f"{command[0]} failed ({why[0]}); write --format html instead")
        return done.stdout if out is None else target.read_bytes()
