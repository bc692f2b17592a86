"""The page with a keyboard, a screen reader and the search, with its script, in a real browser.

Install axe-core with `npm install --no-save axe-core@4.14.1` in the checkout, or set AXE_CORE to its path. Without
Chromium, the tests are skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_beside_figures import with_pipeline
from test_browser import CHROMIUM, WIDE, Browser, on_disk
from test_diagnosis import RIGHT, SUMMED, cell

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.machine.fingerprint import Fingerprint
from plumbline.report.history.site import write_site
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Result
from plumbline.results.run import Run, read_run
from plumbline.results.run_writer import RunWriter

del sys.path[0]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to look at the page with")

AXE = Path(os.environ.get("AXE_CORE") or Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js")
WIDTHS = (400, 900, 1600)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, build_measured_run, measured) -> Path:
    """The page of a run with two causes, pictures, figures, a profiled pipeline, and a trainer that is right."""
    timed_out = Finding("launch", Outcome.TIMED_OUT, "rank 1 never came")
    found = {
        cell(): SUMMED,
        cell(gpus=4): SUMMED,
        cell("cnn"): timed_out,
        cell(subject="right"): RIGHT,
        cell("cnn", subject="right"): RIGHT,
    }
    timed = with_pipeline(build_measured_run(), measured)
    header = Header.of(found, command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
    results = tuple(Result.of(one, finding, f"pytest -k {one.id}", 0.1) for one, finding in found.items())
    results += tuple(result for result in timed.results if result.profile)
    run = Run(header, results, Footer.of(results, 1), timed.path, False, timed.measurements)
    return on_disk(run, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def history(page: Path) -> Path:
    """The page over that run and one of the day before, in which everything was right."""
    runs = page.parent.parent
    now = read_run(page.parent)
    header = now.header.model_copy(update={"run_id": "before", "started": now.header.started - timedelta(days=1)})
    results = [Result.of(one, RIGHT, "pytest", 0.1) for one in (cell(), cell(gpus=4), cell("cnn"))]
    with RunWriter(runs, header) as writer:
        writer.write(*results)
        writer.close(Footer.of(results, 0))
    write_site(runs, runs / "history")
    return runs / "history" / "index.html"


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not here: npm install --no-save axe-core@4.14.1")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("of", ["run", "history"])
def test_axe_finds_nothing(browser: Browser, page: Path, history: Path, of: str, width: int, dark: bool) -> None:
    browser.open(page if of == "run" else history, (width, 1000), dark=dark, scripts=True)
    browser.look("document.querySelectorAll('details:not(.square)').forEach(one => one.open = true)")
    browser.look(AXE.read_text() + "; undefined")
    violations = browser.look(
        "axe.run().then(found => found.violations.map(one => "
        "[one.impact, one.id, one.nodes.map(node => node.target.join(' ') + ' ' + node.failureSummary).slice(0, 3)]))"
    )
    assert violations == []
    assert browser.look("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"


FOUND = "[...document.querySelectorAll('article.group')].filter(one => one.offsetParent).map(one => one.id)"


def typed(browser: Browser, text: str) -> None:
    browser.look(
        f"(box => {{ box.value = {text!r}; box.dispatchEvent(new Event('input')) }})(document.getElementById('find'))"
    )


def test_a_search_shows_what_has_all_its_words(browser: Browser, page: Path) -> None:
    browser.open(page, WIDE, scripts=True)
    assert browser.look(FOUND) == ["cause-1", "cause-2"]
    typed(browser, "never  CAME")
    assert browser.look(FOUND) == ["cause-2"]
    assert "1 of 2 causes" in browser.look("document.querySelector('[role=status]').textContent")
    typed(browser, "<b>")
    assert browser.look(FOUND) == []
    typed(browser, "")
    assert browser.look(FOUND) == ["cause-1", "cause-2"]


def test_escape_closes_a_sheet_and_gives_the_focus_back(browser: Browser, page: Path) -> None:
    browser.open(page, WIDE, scripts=True)
    browser.look("document.querySelector('.square > summary').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    assert browser.look("document.querySelectorAll('.square[open]').length") == 1
    for kind in ("keyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape", windowsVirtualKeyCode=27)
    assert browser.look("document.querySelectorAll('.square[open]').length") == 0
    assert browser.look("document.activeElement.matches('.square > summary')")


PAPER = 720
"""The width of an A4 page without margins, in CSS pixels."""


def test_a_printed_page_is_light_unfolded_and_whole(browser: Browser, page: Path) -> None:
    browser.open(page, (PAPER, 1000), dark=True)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.ask("Emulation.setEmulatedMedia", media="print", features=features)
    assert browser.look("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.look("document.documentElement.scrollWidth") <= PAPER
    assert browser.look(
        "[...document.querySelectorAll('.told .scroll, .drawn .scroll')].every(one => one.scrollHeight)"
    )
    cut = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth + 1)"
    assert browser.look(f"{cut}.map(one => one.getAttribute('aria-label'))") == []
    browser.ask("Emulation.setEmulatedMedia", media="", features=features)


def test_the_page_is_walked_through_by_keyboard(browser: Browser, page: Path) -> None:
    """Tab reaches every link, field and fold in the page's order; the focus is visible."""
    browser.open(page, WIDE, scripts=True)
    reached = []
    for _ in range(40):
        for kind in ("keyDown", "keyUp"):
            browser.ask("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(
            browser.look("[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]")
        )
    assert reached[0][0] == "A", "the parts of the page come first"
    assert ["INPUT", "solid"] in [[name, style] for name, style in reached]
    assert all(style != "none" for _, style in reached)
    positions = browser.look(
        "[...document.querySelectorAll('a, button, input, summary, .scroll')].map(one => one.tabIndex)"
    )
    assert set(positions) == {0}, "no element jumps the queue or is left out"


def test_without_the_script_there_is_no_search_and_all_else(browser: Browser, page: Path) -> None:
    browser.open(page, WIDE)
    assert browser.look("document.querySelector('[role=search]').offsetParent === null")
    assert browser.look(FOUND) == ["cause-1", "cause-2"]
    assert browser.look("document.querySelector('#cause-1').getBoundingClientRect().top") < WIDE[1] / 2
