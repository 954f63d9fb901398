"""The report and the live page in a real Chromium: drawn, silent, readable, reachable by keyboard and screen reader."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adp2sgd import simulate
from adp2sgd.config import Speeds
from adp2sgd.report.browser import find_browser
from adp2sgd.report.colours import THEMES
from adp2sgd.report.page import figures
from adp2sgd.report.read import read_run
from adp2sgd.report.write import write
from folders import PRIVATE, SMALL, make, make_large
from test_live import serving, wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[dev]'")
pytestmark = pytest.mark.integration

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


class Visit:
    """An open page, and what it said and asked for."""

    def __init__(self, browser: Any, address: str, width: int = 1440, theme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-drawn=all]", timeout=30_000)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=find_browser(), args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    return [make(home / "open"), make(home / "private", PRIVATE), make_large(home / "large", events=20_000)]


@pytest.fixture(scope="module")
def report(folders: list[Path]) -> str:
    return write(folders, folders[0].parent / "report.html").resolve().as_uri()


@pytest.mark.parametrize(("width", "theme"), [(375, "light"), (375, "dark"), (1440, "light"), (1440, "dark")])
def test_the_report_is_drawn_in_silence(browser: Any, report: str, folders: list[Path], width: int, theme: str) -> None:
    with Visit(browser, report, width, theme) as visit:
        page = visit.page
        assert visit.said == []
        assert [each for each in visit.asked if not each.startswith(("data:", "blob:"))] == [report]
        drawn = page.evaluate(
            "[...document.querySelectorAll('.plot')].map(e => [e.id, e.querySelectorAll('.trace, .bars').length])"
        )
        wanted = [f"plot-{each.id}" for each in figures([read_run(folder) for folder in folders])]
        assert [name for name, _ in drawn] == wanted
        assert all(traces > 0 for _, traces in drawn)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        overflowing = page.evaluate(
            "[...document.querySelectorAll('.plot')].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.id)"
        )
        assert overflowing == []
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('.plot text')]"
            ".map(each => parseFloat(getComputedStyle(each).fontSize)))"
        )
        assert smallest >= 10
        red, green, blue = (int(THEMES[theme]["page"][k : k + 2], 16) for k in (1, 3, 5))
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb({red}, {green}, {blue})"


@pytest.mark.parametrize(("width", "theme"), [(375, "dark"), (1440, "light")])
def test_axe_finds_nothing_serious(browser: Any, folders: list[Path], tmp_path: Path, width: int, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    report = write(folders[1:2], tmp_path / "report.html").as_uri()
    with Visit(browser, report, width, theme) as visit:
        visit.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        found = axe.run(visit.page).response
    serious = [
        (each["id"], [node["target"] for node in each["nodes"]][:3])
        for each in found["violations"]
        if each["impact"] in {"serious", "critical"}
    ]
    assert serious == []
    assert any(each["id"] == "color-contrast" for each in found["passes"])


def test_every_figure_has_a_name_and_can_be_used_by_keyboard(browser: Any, report: str) -> None:
    with Visit(browser, report) as visit:
        page = visit.page
        for plot in page.query_selector_all(".plot"):
            assert plot.get_attribute("role") == "group"
            assert plot.query_selector(".main-svg:not([aria-hidden=true])") is None
            assert len(plot.get_attribute("aria-label")) > 20
        names = []
        for _ in range(6):
            page.keyboard.press("Tab")
            names.append(
                page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.textContent")
            )
        assert names[:3] == ["Skip to the content", "Dark theme", "Final figures of each run"]
        assert names[3:5] == ["Download SVG: Loss against epochs", "Download CSV: Loss against epochs"]
        page.focus("#theme")
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_figures_can_be_downloaded_hovered_and_zoomed(browser: Any, report: str, folders: list[Path]) -> None:
    with Visit(browser, report) as visit:
        page = visit.page
        for kind in ("csv", "svg"):
            with page.expect_download() as waiting:
                page.click(f"[data-save={kind}][data-figure=steps-1]")
            text = Path(waiting.value.path()).read_text(encoding="utf-8")
            if kind == "csv":
                steps = [each.steps for each in read_run(folders[1]).learners]
                assert text == "learner,steps\n" + "".join(f"{k},{n}\n" for k, n in enumerate(steps))
            else:
                assert text.startswith("<svg")
                assert "steps" in text
        before = ranges(page, "loss-epoch")
        page.locator("#figure-loss-epoch").scroll_into_view_if_needed()
        box = page.locator("#plot-loss-epoch .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.4)
        page.wait_for_selector("#plot-loss-epoch .hoverlayer .legend, #plot-loss-epoch .hoverlayer .hovertext")
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.4, steps=4)
        page.mouse.up()
        after = ranges(page, "loss-epoch")
        assert before[0] < after[0] < after[1] < before[1]
        page.click("#theme")  # a redraw keeps what the reader has zoomed into
        page.wait_for_timeout(300)
        assert ranges(page, "loss-epoch") == pytest.approx(after)
        page.click("#figure-steps-1 summary")
        assert page.locator("#figure-steps-1 tbody tr").count() == 4
        assert visit.said == []


def test_nothing_can_be_sent_to_the_maker_of_the_charts(browser: Any, report: str, tmp_path: Path) -> None:
    """plotly.js has a button that uploads a figure; neither the page nor a notebook's figure shows it."""
    with Visit(browser, report) as visit:
        visit.page.hover("#plot-loss-epoch")
        names = visit.page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(e => e.dataset.title)")
        assert set(names) == {"Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}
        refused = visit.page.evaluate("""new Promise(answer => {
            document.addEventListener('securitypolicyviolation', event => answer(event.violatedDirective));
            fetch('https://example.org/').catch(() => setTimeout(() => answer('nobody'), 1000));
        })""")
        assert refused == "connect-src"
    figure = simulate(SMALL.replace(epochs=1)).plot()["Steps per learner"]
    figure.write_html(tmp_path / "figure.html")  # as a notebook shows it, with plotly's own settings
    page = browser.new_page()
    page.goto((tmp_path / "figure.html").as_uri())
    page.wait_for_selector(".modebar-btn", state="attached")
    names = page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(e => e.dataset.title)")
    page.close()
    assert "Zoom" in names
    assert not [name for name in names if "share" in name.lower()]


def ranges(page: Any, figure: str) -> list[float]:
    found: list[float] = page.evaluate(f"document.getElementById('plot-{figure}')._fullLayout.xaxis.range")
    return found


def test_the_live_page_renews_itself_without_a_reload(browser: Any, tmp_path: Path) -> None:
    config = SMALL.replace(epochs=15, speeds=Speeds(kind="constant", step_s=0.02, pad=True))
    (tmp_path / "run.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "adp2sgd", "train", "run.toml", "--out", "run", "--quiet"]
    training = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, env=os.environ)
    try:
        wait_for(tmp_path / "run/status.json")
        with serving(tmp_path / "run") as (_, address), Visit(browser, address) as visit:
            page = visit.page
            page.evaluate("window.same = true")
            seen = []
            deadline = time.monotonic() + 90
            while "ended" not in page.text_content("#connection") and time.monotonic() < deadline:
                bar = page.query_selector("[role=progressbar]")
                seen.append(int(bar.get_attribute("aria-valuenow")) if bar else 100)
                page.wait_for_timeout(300)
            assert page.text_content("#connection") == "the run has ended; this page is complete"
            assert page.evaluate("window.same") is True
            assert seen == sorted(seen)
            assert len(set(seen)) > 2
            assert "trained a model" in page.text_content(".summary")
            points = page.evaluate("document.getElementById('plot-loss-epoch').data[0].x.length")
            assert points == len(read_run(tmp_path / "run").curve)
            assert {each.split("/")[2] for each in visit.asked if each.startswith("http")} == {address.split("/")[2]}
            assert visit.said == []
    finally:
        training.wait(60)


def test_it_prints_as_pdf_and_png(folders: list[Path], tmp_path: Path) -> None:
    paper = write(folders[1:2], tmp_path / "r.pdf").read_bytes()
    assert paper.startswith(b"%PDF-")
    assert paper.count(b"/Type /Page\n") + paper.count(b"/Type /Page ") + paper.count(b"/Type/Page") >= 2
    picture = Image.open(io.BytesIO(write(folders[1:2], tmp_path / "r.png").read_bytes()))
    assert picture.width == 1440
    assert picture.height > 2000
    bottom = picture.convert("L").crop((0, picture.height - 200, 1440, picture.height))
    assert bottom.getextrema()[0] < 128  # the page's end is on it
