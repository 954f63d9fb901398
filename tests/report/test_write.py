"""`adp2sgd report`: formats, the page, its size in time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from adp2sgd.errors import ConfigError
from adp2sgd.report import colours
from adp2sgd.report.browser import find_browser
from adp2sgd.report.page import page
from adp2sgd.report.read import read_run
from adp2sgd.report.write import write
from conftest import ROOT, adp2sgd
from folders import PRIVATE, make, make_large

LIMIT_S = 5.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    make(home / "open")
    make(home / "private", PRIVATE)
    return home


class Outline(HTMLParser):
    """What a page asks for, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.wanted: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.wanted += [value for key, value in given.items() if key in {"src", "href", "srcset", "action"} and value]
        self.ids += [given["id"]] if given.get("id") else []
        if tag not in {"meta", "link", "br", "img", "input"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_holds_everything_and_asks_for_nothing(home: Path) -> None:
    text = page([read_run(home / "open"), read_run(home / "private")])
    outline = Outline(text)
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert all(each.startswith(("#", "data:")) for each in outline.wanted)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy
    assert "default-src &#39;none&#39;" in policy[1]
    assert "connect-src &#39;none&#39;" in policy[1]
    facts = re.search(r'<script type="application/json" id="facts">(.*?)</script>', text, re.DOTALL)
    assert facts
    assert {each["id"] for each in json.loads(facts[1])["figures"]} >= {"loss-epoch", "graph-1", "epsilon-1"}


def test_what_a_run_says_cannot_become_a_script(home: Path, tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    raw = json.loads((home / "open/result.json").read_text())
    raw |= {"task": attack, "notes": [attack], "versions": {attack: attack}}
    raw["learners"][0]["site"] = attack
    (tmp_path / "config.toml").write_bytes((home / "open/config.toml").read_bytes())
    (tmp_path / "result.json").write_text(json.dumps(raw))
    text = page([read_run(tmp_path)])
    assert text.count("<script") == page([read_run(home / "open")]).count("<script")
    assert "<img src=x" not in text
    Outline(text)


@pytest.mark.parametrize("kind", ["html", "markdown", "json"])
def test_every_format_names_what_matters(home: Path, tmp_path: Path, kind: str) -> None:
    target = write([home / "open", home / "private"], tmp_path / "out", kind)
    text = target.read_text(encoding="utf-8")
    for wanted in ("2 runs" if kind != "json" else '"open"', "No single record", "speeds.factor", "adpsgd"):
        assert wanted in text
    assert target.stat().st_mode & 0o777 == 0o600  # it holds what events hold
    if kind == "json":
        rows = json.loads(text, parse_constant=pytest.fail)["figures"]["steps-1"]["rows"]
        assert [row[1] for row in rows] == [each.steps for each in read_run(home / "private").learners]


def test_the_command_line_writes_and_refuses_in_one_line(home: Path, tmp_path: Path) -> None:
    done = adp2sgd("report", str(home / "open"), cwd=tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(home / "open/report.html"), "")
    by_name = adp2sgd("report", str(home / "open"), "-o", "r.md", cwd=tmp_path)
    assert (by_name.returncode, (tmp_path / "r.md").read_text()[:6]) == (0, "# open")
    for arguments, words in (
        (["nowhere"], "nowhere holds no run (no config.toml); give a run's folder"),
        ([str(home / "open"), "--format", "docx"], '"docx" is unknown; use one of: html, markdown, json, png, pdf'),
        ([str(home / "open"), "-o", "/proc/none/r.html"], "choose another -o"),
    ):
        failed = adp2sgd("report", *arguments, cwd=tmp_path)
        assert failed.returncode == 2
        assert words in failed.stderr
        assert failed.stderr.count("\n") == 1


def test_without_a_browser_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADP2SGD_BROWSER", "/nowhere/chromium")
    with pytest.raises(ConfigError, match=r"no Chromium or Chrome was found .* --format html"):
        find_browser()


def test_sixteen_learners_and_100_000_events_take_less_than_five_seconds(tmp_path: Path) -> None:
    """CPU time of the work itself: reading, figures, page. The command's start is measured by the benchmark."""
    folder = make_large(tmp_path / "large")
    began = time.process_time()
    target = write([folder])
    assert time.process_time() - began < LIMIT_S
    assert target.stat().st_size < 6_000_000
    assert sum(len(each.log) for each in read_run(folder).learners) == 100_000


def test_a_report_does_not_wait_for_torch(home: Path, tmp_path: Path) -> None:
    program = f"""import sys
from adp2sgd.report.write import write
write([{str(home / "open")!r}], None)
assert "torch" not in sys.modules"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_styles_have_the_colours_of_the_figures() -> None:
    style = (ROOT / "src/adp2sgd/report/assets/page.css").read_text()
    light, dark = re.findall(r"--page: .*", style)
    for line, theme in ((light, colours.LIGHT), (dark, colours.DARK)):
        assert dict(re.findall(r"--(\w+): (#\w+);", line)) == {
            name: theme[name] for name in ("page", "panel", "text", "muted", "line", "link")
        }
