"""The page in a real browser: light and dark, wide and narrow, after a good run and after one with failures.

Screenshots are in pytest's temporary folder, under ``screenshots``. Without Chromium, the tests are skipped.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plumbline.core.cell import Cell
from plumbline.report.formats import write_report
from plumbline.results.header_footer import Footer
from plumbline.results.run import Run
from plumbline.results.run_writer import RunWriter

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to look at the page with")

WIDE, PHONE = (1280, 900), (390, 844)
ANSWER_LIMIT = 60.0


class Browser:
    """A Chromium that is controlled over pipes, with the DevTools protocol."""

    def __init__(self, profile: Path) -> None:
        to_browser, write = os.pipe()
        read, from_browser = os.pipe()
        self._write, self._read, self._rest = write, read, b""
        self._numbers = itertools.count(1)
        self.requested: list[str] = []
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        # The browser reads from descriptor 3 and writes to 4; a shell can provide exactly these.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "DOM"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def open(
        self, page: Path, size: tuple[int, int] = WIDE, *, dark: bool = False, at: str = "", scripts: bool = False
    ) -> None:
        """Show a page in a window of this size, by default without its scripts."""
        scheme = "dark" if dark else "light"
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        width, height = size
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=size == PHONE
        )
        self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=page.as_uri() + at)
        deadline = time.monotonic() + ANSWER_LIMIT
        while self.look("document.readyState") != "complete" or self.look("location.protocol") != "file:":
            assert time.monotonic() < deadline, "the page did not load"

    def look(self, expression: str) -> Any:
        """Return an expression's value in the page, or a promise's result."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path) -> None:
        """Write a screenshot of the whole page."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Stop the browser and its processes."""
        os.close(self._write)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], ANSWER_LIMIT)
            chunk = os.read(self._read, 1 << 20) if ready else b""
            assert chunk, "the browser does not answer"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        return message


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("screenshots", numbered=False)


def on_disk(run: Run, folder: Path) -> Path:
    """Write a run, and return its page."""
    assert run.footer is not None
    with RunWriter(folder, run.header) as writer:
        writer.write(*run.results, *run.measurements)
        writer.close(run.footer)
    write_report(writer.path)
    return writer.path / "report.html"


@pytest.fixture(scope="module")
def pages(
    realistic_run: Run,
    cells: list[Cell],
    build_measured_run: Callable[..., Run],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """The pages of a good run with figures, and of a run with failures of every kind."""
    folder = tmp_path_factory.mktemp("runs")
    good, failing = build_measured_run(), build_measured_run(wrong=("dp",))
    results = (*failing.results, *realistic_run.results)
    both = Run(
        realistic_run.header.model_copy(update={"planned": (*failing.header.planned, *realistic_run.header.planned)}),
        results,
        Footer.of(results, 1),
        failing.path,
        False,
        failing.measurements,
    )
    return {"good": on_disk(good, folder), "failing": on_disk(both, folder)}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("kind", ["good", "failing"])
def test_a_page_fits_its_window(
    browser: Browser, pages: dict[str, Path], screenshots: Path, kind: str, size: tuple[int, int], dark: bool
) -> None:
    browser.open(pages[kind], size, dark=dark)
    name = f"{kind}-{'phone' if size == PHONE else 'wide'}-{'dark' if dark else 'light'}.png"
    browser.picture(screenshots / name)
    assert (screenshots / name).read_bytes().startswith(b"\x89PNG")
    assert browser.look("document.documentElement.scrollWidth") <= size[0], "the page scrolls sideways"
    assert browser.look("document.querySelector('h1').getBoundingClientRect().bottom") < size[1] / 2, "verdict first"
    assert browser.look("parseInt(getComputedStyle(document.querySelector('.lead')).fontSize)") >= 14
    red, green, blue = map(
        int, browser.look("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(",")
    )
    assert (red + green + blue < 200) is dark


def test_nothing_is_fetched(browser: Browser, pages: dict[str, Path]) -> None:
    browser.requested.clear()
    browser.open(pages["failing"])
    asked = {url for url in browser.requested if not url.startswith(("about:", "data:"))}
    assert asked == {pages["failing"].as_uri()}


SQUARE = "document.querySelector('.square.bad > summary')"
BOX = "(element => { const box = element.getBoundingClientRect(); return [box.left, box.top, box.width, box.height] })"


def middle(box: list[float]) -> tuple[float, float]:
    left, top, width, height = box
    return left + width / 2, top + height / 2


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_a_square_opens_to_its_cells_without_a_script(
    browser: Browser, pages: dict[str, Path], screenshots: Path, size: tuple[int, int]
) -> None:
    browser.open(pages["failing"], size)
    browser.look(f"{SQUARE}.scrollIntoView({{block: 'center', inline: 'center'}})")
    browser.click(*middle(browser.look(f"{BOX}({SQUARE})")))
    sheet = f"{SQUARE}.parentElement.querySelector('.sheet')"
    left, top, width, height = browser.look(f"{BOX}({sheet})")
    assert width > 300
    assert height > size[1] / 2
    assert left >= 0
    assert top >= 0
    assert left + width <= size[0]
    assert top + height <= size[1]
    said = browser.look(f"{sheet}.innerText")
    assert "pytest" in said
    assert "Seed:" in said
    browser.picture(screenshots / f"opened-{'phone' if size == PHONE else 'wide'}.png")
    # The square itself draws the cross, in the sheet's corner.
    browser.click(size[0] - 1.4 * 16 - 10, top + 0.9 * 16 + 10)
    assert browser.look(f"{SQUARE}.parentElement.open") is False


def test_an_address_with_a_cell_opens_it(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["failing"])
    anchor = browser.look("document.querySelector('#wrong a').getAttribute('href')")
    browser.open(pages["failing"], at=anchor)
    _, top, width, _ = browser.look(f"{BOX}(document.querySelector('{anchor}'))")
    assert width > 0
    assert 0 <= top < WIDE[1]


def test_a_table_is_copied_as_a_table(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["failing"])
    copied = browser.look(
        "(table => { getSelection().selectAllChildren(table); return getSelection().toString() })"
        "(document.querySelector('table.figures'))"
    )
    lines = [line.split("\t") for line in copied.splitlines() if "\t" in line]
    assert lines[0][:3] == ["configuration", "conformance", "throughput"]
    assert any(line[0] == "dp 32, 1×2" for line in lines)


CONTRASTS = """
(() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const over = (top, below) => {
    const alpha = top.length > 3 ? top[3] : 1;
    return [0, 1, 2].map(part => alpha * top[part] + (1 - alpha) * below[part]);
  };
  const behind = element => {
    const layers = [];
    for (; element; element = element.parentElement) layers.push(numbers(getComputedStyle(element).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = colour => {
    const [red, green, blue] = colour.map(part => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const told = ".sign, .square > summary, p, h1, h2, h3, td, th, a, figcaption, .badge, .family, .muted, code, pre";
  return [...document.querySelectorAll(told)].map(element => {
    const below = behind(element);
    const text = over(numbers(getComputedStyle(element).color), below);
    const [low, high] = [light(below), light(text)].sort((a, b) => a - b);
    return [element.className + ": " + element.textContent.slice(0, 30), (high + 0.05) / (low + 0.05)];
  });
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_stands_out(browser: Browser, pages: dict[str, Path], dark: bool) -> None:
    """WCAG 2.2, success criterion 1.4.3: a contrast of at least 4.5."""
    browser.open(pages["failing"], dark=dark)
    contrasts = browser.look(CONTRASTS)
    assert len(contrasts) > 100
    assert [pair for pair in contrasts if pair[1] < 4.5] == []
