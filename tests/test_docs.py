"""The documentation as a site: it builds without a warning, asks nobody for anything, and its Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, fields
from html.parser import HTMLParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import adp2sgd
from adp2sgd.run_folder import Run
from conftest import ROOT

RUN = ("report.md",)  # pages whose Python is short enough to run here


@dataclass
class Example:
    """One."""

    plain: int
    named: str = "a|b"  # a comment | with a bar
    made: tuple[int, ...] = ()


def test_a_table_of_fields_says_what_the_source_says() -> None:
    pytest.importorskip("mkdocs")
    found = spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    assert found is not None
    assert found.loader is not None
    site = module_from_spec(found)
    found.loader.exec_module(site)
    assert site.fields_of(Example) == [
        ("plain", "int", "", ""),
        ("named", "str", "`'a|b'`", "a comment \\| with a bar"),
        ("made", "tuple[int, ...]", "`()`", ""),
    ]
    assert [row[0] for row in site.fields_of(Run)] == [each.name for each in fields(Run)]


@pytest.mark.parametrize("name", RUN)
def test_the_docs_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {})


class Wanted(HTMLParser):
    """Addresses that a browser fetches without being asked."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in {"script", "img", "iframe", "source"} and given.get("src"):
            self.found.append(str(given["src"]))
        if tag == "link" and given.get("rel") in {"stylesheet", "preload", "icon", "preconnect"}:
            self.found.append(str(given.get("href")))


@pytest.mark.integration
def test_the_site_builds_strictly_and_asks_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        asked = [each for each in Wanted(page.read_text(encoding="utf-8")).found if "//" in each]
        assert asked == [], f"{page.name} asks for {asked}"
    names = (tmp_path / "site/reference/python.html").read_text(encoding="utf-8")
    assert [name for name in adp2sgd.__all__ if f"{name}" not in names] == []
    settings = (tmp_path / "site/reference/settings.html").read_text(encoding="utf-8")
    for key in ("evaluate_every", "noise_multiplier", "partner"):
        assert key in settings
