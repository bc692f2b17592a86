"""The page of ``plumbline check`` in a real browser: light and dark, wide and narrow, right and wrong.

Screenshots are in pytest's temporary folder, under ``screenshots``. Without Chromium, the tests are skipped.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "check")]
from checked_commands import BROKEN, FOLLOWS, NOT_JUDGED, RIGHT, WRONG, checked, training  # noqa: E402
from test_browser import CHROMIUM, CONTRASTS, PHONE, WIDE, Browser  # noqa: E402

from plumbline.check.report.files import write_files  # noqa: E402
from plumbline.check.verdict.verdict import verdict_of  # noqa: E402

del sys.path[:2]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to look at the page with")

LONG = "transformer." + ".".join(f"layers_{number}" for number in range(40)) + ".weight"
PAGES = {
    "right": checked(training(RIGHT), training(RIGHT, replayed=False)),
    "wrong": checked(
        training(
            replace(WRONG, parameter=LONG, parameters=((LONG, 3.9e6),), message=f"{WRONG.message} {LONG}"),
            FOLLOWS,
            NOT_JUDGED,
            BROKEN,
        ),
        code=1,
    ),
    "nothing": checked(code=3),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory):
    return tmp_path_factory.mktemp("screenshots")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of a right check, of a wrong one with an overlong name, and of one without a step."""
    folder = tmp_path_factory.mktemp("pages")
    for name, one in PAGES.items():
        long = replace(one, command=(*one.command, "--data", "/very/long/folder" * 12))
        write_files(long, verdict_of(long), html=folder / f"{name}.html", json=None)
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_it_fits_its_window_and_every_text_stands_out(browser, pages, screenshots, name, size, dark):
    """WCAG 2.2, success criterion 1.4.3: a contrast of at least 4.5."""
    browser.requested.clear()
    browser.open(pages[name], size, dark=dark)
    browser.look("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.picture(screenshots / f"{name}-{'phone' if size == PHONE else 'wide'}-{'dark' if dark else 'light'}.png")
    assert browser.look("document.documentElement.scrollWidth") <= size[0], "the page scrolls sideways"
    assert browser.look("document.querySelector('h1').getBoundingClientRect().bottom") < size[1] / 2, "verdict first"
    assert [pair for pair in browser.look(CONTRASTS) if pair[1] < 4.5] == []
    assert {url for url in browser.requested if not url.startswith(("about:", "data:"))} == {pages[name].as_uri()}
