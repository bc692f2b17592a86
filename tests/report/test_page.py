"""The page has a run's contents, most important first, and nothing in a run acts as markup."""

from __future__ import annotations

import dataclasses
import math
import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plumbline.report.html
from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.machine.fingerprint import ComparabilityKey, Fingerprint
from plumbline.report.formats import write_report
from plumbline.report.html.page import MOST_FACETS, MOST_FAILURES, MOST_GROUPS, report_page
from plumbline.results.files import LONGEST_LINE, MOST_LINES
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import ErrorGrid, Expected, Measurement, RankShares, Result
from plumbline.results.run import Run
from plumbline.results.run_writer import RunWriter

BuildRun = Callable[..., Run]

HOSTILE = "evil\"'><img src=x onerror=alert(1)><script>alert(1)</script>{{ 7*7 }}{% raw %}\x1b[31m\u202e\x00\x9b31m"
SCRIPT = Path(plumbline.report.html.__path__[0]) / "templates" / "find.js"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A browser's view of a page: its elements, and its text by the enclosing class."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(source)
        assert self._open == [], "elements are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and self._open and self.get_starttag_text() is not None:
            assert self._open.pop() == tag, f"{tag} ends what it did not begin"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.texts.append((self._open[-1], data))

    @property
    def text(self) -> str:
        """All readable text."""
        return " ".join(" ".join(text for _, text in self.texts).split())

    def inside(self, tag: str) -> list[str]:
        """The texts directly inside such elements."""
        return [text for place, text in self.texts if place == tag]

    def attributes(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [value for _, attributes in self.elements if (value := attributes.get(name)) is not None]


def harmless(source: str) -> Page:
    """Return the page, after checking that it runs only its own script, fetches nothing, and hides nothing."""
    page = Page(source)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == source.count("<script") == 1
    script = source.partition("<script>")[2].partition("</script>")[0]
    assert script == SCRIPT.read_text().rstrip("\n")
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.attributes("content")[0]
    assert not set(tags) & {"img", "iframe", "object", "embed", "base", "form", "audio", "video"}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    for link in page.attributes("href"):
        assert link.startswith(("#", "https://", "http://")) or link == "data:,", link
    assert "src" not in {name for _, attributes in page.elements for name in attributes}
    assert "default-src 'none'" in page.attributes("content")[0]
    assert "url(" not in source
    assert "@import" not in source
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", source)
    return page


def test_the_verdict_stands_first(realistic_run: Run) -> None:
    page = Page(report_page(realistic_run))
    (verdict,) = page.inside("h1")
    assert verdict == "1 mistake in reference: sum instead of mean."
    assert page.text.index(verdict) < page.text.index("Each square is")
    assert page.inside("h2") == ["What went wrong", "Support", "Environment", "Method and limits"]


def test_a_page_says_what_ran_and_on_what(realistic_run: Run) -> None:
    text = Page(report_page(realistic_run)).text
    for word in (
        realistic_run.header.run_id,
        "torch 2.13.0+cpu",
        "2 cores of A CPU",
        "Simulated devices",
        "pytest suites/",
    ):
        assert word in text
    assert realistic_run.header.fingerprint.commit in text


def test_every_cell_has_a_place_of_its_own(realistic_run: Run, cells: list[Cell]) -> None:
    page = harmless(report_page(realistic_run))
    names = page.attributes("id")
    assert len(names) == len(set(names))
    unsupported = {one.cell for one in realistic_run.results if one.outcome is Outcome.UNSUPPORTED}
    places = {name.removeprefix("cell-") for name in names if name.startswith("cell-")}
    assert places == {cell.id for cell in cells} - unsupported
    assert "5 cells skipped: my-ddp does not claim to support them (precision 16: 5)" in page.text
    targets = [link[1:] for link in page.attributes("href") if link.startswith("#")]
    assert set(targets) <= set(names)


def test_a_failing_cell_opens_to_all_that_is_known_of_it(recorded_run: Path) -> None:
    cell = "reference-contrastive-ddp2-2x2-16"
    folder = recorded_run / "traces" / cell
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text("\n".join(f"line {number}" for number in range(100)))
    (folder / "rank-1.log").write_text("x" * 10_000)
    write_report(recorded_run)
    page = harmless((recorded_run / "report.html").read_text())
    text = page.text
    begin = text.index(f" {cell} ")
    shown = text[begin : text.index("Log of rank 1", begin) + 20_000]
    for word in (
        "gradients",
        "sum-instead-of-mean",
        "averaging",
        "step 0",
        "rank 1",
        "tower.0.weight",
        "4.1e6 × noise",
    ):
        assert word in shown, word
    assert "2.0 × too large" in shown
    assert "Seed: the workload's own" in shown
    assert f"pytest suites/ -k {cell}" in shown
    assert f"line {100 - MOST_LINES} " in shown
    assert f"line {100 - MOST_LINES - 1} " not in shown
    assert "x" * LONGEST_LINE in shown
    assert "x" * (LONGEST_LINE + 1) not in shown


def test_what_passed_is_said_in_a_line(realistic_run: Run) -> None:
    text = Page(report_page(realistic_run)).text
    assert "Passed: coverage, gradients, updates, synchrony. Largest error: 0.80 × noise" in text


def test_the_seed_is_that_of_the_run(build_measured_run: BuildRun) -> None:
    assert "Seed: 5" in Page(report_page(build_measured_run())).text


def test_causes_stand_together_the_commonest_first(build_run: BuildRun) -> None:
    cells = [Cell("reference", f"w{index}", "ddp", Topology(1, 2), "32", "cpu") for index in range(5)]
    run = build_run({cell: [Outcome.FAILED, Outcome.FAILED] for cell in cells})
    causes = {0: "rare", 1: "common", 2: "common", 3: "common"}
    results = tuple(
        result.model_copy(update={"cause": causes.get(int(result.workload[1:])), "family": "sync"})
        if result.check == "check1"
        else result
        for result in run.results
    )
    page = Page(report_page(dataclasses.replace(run, results=results)))
    heads = [head.strip() for head in page.inside("h3") if head.strip()]
    assert heads[:3] == ["Common", "Rare", "Check0 failed, cause unknown"]
    assert "3 cells: w1, w2, w3 · ddp · 1×2 · 32" in page.text


def test_links_and_the_search_stand_above_the_mistakes_and_what_has_no_button_is_counted(build_run: BuildRun) -> None:
    cells = [Cell(f"trainer{index}", "mlp", "ddp", Topology(1, 2), "32", "cpu") for index in range(MOST_FACETS + 3)]
    page = report_page(build_run({cell: [Outcome.FAILED] for cell in cells}))
    places = [page.index(one) for one in ("<h1>", "<nav ", 'role="search"', "… and 3 more", 'id="cause-1"')]
    assert places == sorted(places)
    assert page.count('aria-pressed="false">') == MOST_FACETS


def test_what_is_known_is_told_apart_from_what_went_wrong(build_run: BuildRun) -> None:
    said = Expected(
        outcome=Outcome.FAILED, reason="a known thing", link="https://example.org/1", entry="x.toml, entry 1"
    )
    bad = said.model_copy(update={"reason": "another", "link": "javascript:alert(1)"})
    cells = [Cell("reference", f"w{index}", "ddp", Topology(1, 2), "32", "cpu") for index in range(3)]
    run = build_run({cell: [Outcome.FAILED] for cell in cells[:2]} | {cells[2]: [Outcome.PASSED]})
    expected = {"w0": said, "w1": bad, "w2": said}
    results = tuple(result.model_copy(update={"expected": expected[result.workload]}) for result in run.results)
    page = harmless(report_page(dataclasses.replace(run, results=results, footer=Footer.of(results, 1))))
    assert page.inside("h1") == ["1 of 3 cells should have failed and did not."]
    wrong, _, known = page.text.partition("Expected failures")
    assert "x.toml, entry 1 expects failed: a known thing" in wrong
    assert "another" in known
    assert "https://example.org/1" in page.attributes("href")
    assert "javascript:alert(1)" in known


def test_an_incomplete_run_says_so_at_the_top(realistic_run: Run) -> None:
    run = dataclasses.replace(realistic_run, footer=None, results=realistic_run.results[:40], torn=True)
    page = Page(report_page(run))
    assert "INCOMPLETE" in page.text[: page.text.index("Each square is")]
    assert "No result: the run ended before this cell did." in page.text


def test_the_speed_of_what_is_wrong_is_struck_through(build_measured_run: BuildRun) -> None:
    page = harmless(report_page(build_measured_run(wrong=("dp",))))
    struck = set(page.inside("s"))
    assert {"1,260", "50.8 ms", "dp 32, 1×2"} <= struck, "the speed of dp on two devices, and its name in the charts"
    assert "1,800" not in struck, "that of ddp"
    assert "1,800" in page.text
    assert "1,890" not in struck, "dp in 16 bits was not examined, which is not wrong"
    titles = " ".join(page.attributes("title"))
    assert "1 of 1 cell of this configuration went wrong, so its speed does not count" in titles
    assert "not examined" in page.text


def test_nothing_is_struck_through_where_nothing_is_wrong(build_measured_run: BuildRun) -> None:
    assert set(Page(report_page(build_measured_run())).inside("s")) == {"struck through"}


def test_a_figure_that_was_refused_says_why(build_measured_run: BuildRun) -> None:
    text = Page(report_page(build_measured_run())).text
    assert "no figure" in text
    assert "data wait: unstable: more launches tell" in text


def test_claims_about_gpus_need_one(build_measured_run: BuildRun) -> None:
    page = Page(report_page(build_measured_run()))
    answers = page.inside("span").count("needs a GPU")
    assert answers == 4
    capable = Fingerprint(key=ComparabilityKey(accelerator="cuda", device="GPU"), compute_capability="9.0")
    real = Page(report_page(build_measured_run(accelerator="cuda", machine=capable)))
    assert "needs a GPU" not in real.text
    assert "× 1.43" in real.text, "ddp over dp, with its conditions"
    assert "perf-mlp, ddp over dp, 1×2, 32" in real.text


def test_a_run_of_measurements_alone_is_a_page(build_measured_run: BuildRun) -> None:
    run = build_measured_run()
    alone = dataclasses.replace(run, results=(), header=run.header.model_copy(update={"planned": ()}))
    page = harmless(report_page(alone))
    assert page.inside("h1") == ["36 cells measured, none examined."]
    assert "What went wrong" not in page.text


def test_a_run_of_nothing_is_a_page(build_run: BuildRun) -> None:
    assert harmless(report_page(build_run({}))).inside("h1") == ["Nothing was examined."]


texts = st.one_of(st.just(HOSTILE), st.text(max_size=30))
numbers = st.one_of(st.floats(allow_nan=False), st.sampled_from([0.0, 1e308, -1e308, 5e-324, math.inf]))
figures = st.floats(allow_nan=False, allow_infinity=False)
rows_of = st.lists(st.lists(st.none() | numbers, max_size=3).map(tuple), max_size=3).map(tuple)
error_grids = st.builds(
    ErrorGrid, parameters=st.lists(texts, max_size=3).map(tuple), steps=st.tuples(st.just(2**53)), errors=rows_of
)
weights = st.lists(figures, max_size=3).map(tuple)
shares = st.builds(RankShares, step=st.just(1), right=weights, received=st.lists(weights, max_size=3).map(tuple))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_a_run_says_never_acts(
    data: st.DataObject, build_run: BuildRun, measured: Callable[..., Measurement]
) -> None:
    """With any names, messages and figures, the page stays well formed and harmless."""
    draw = data.draw
    places = st.builds(Topology, st.sampled_from([1, 3, 2**20]), st.sampled_from([1, 2, 2**30]))
    cells = draw(st.lists(st.builds(Cell, texts, texts, texts, places, texts, st.just("cpu")), min_size=1, max_size=3))
    run = build_run({cell: draw(st.lists(st.sampled_from(Outcome), max_size=2)) for cell in cells})
    results = tuple(
        result.model_copy(
            update={
                **{name: draw(texts) for name in ("message", "reproduce", "check", "parameter", "cause", "family")},
                "error_x_noise": draw(st.none() | numbers),
                "limit_x_noise": draw(st.none() | numbers),
                "parameters": draw(st.dictionaries(texts, numbers, max_size=3)),
                "step": 2**53,
                "hint": draw(st.none() | texts),
                "error_grid": draw(st.none() | error_grids),
                "rank_shares": draw(st.none() | shares),
                "expected": draw(
                    st.none()
                    | st.builds(Expected, outcome=st.sampled_from(Outcome), reason=texts, link=texts, entry=texts)
                ),
            }
        )
        for result in run.results
    )
    found = tuple(
        measured(
            cell,
            draw(
                st.sampled_from(
                    ["throughput", "scaling_weak", "step_p50", "memory_allocated_peak", "tensors_gradients"]
                )
            ),
            draw(figures),
            low=draw(figures),
            high=draw(figures),
            quantiles=tuple(sorted(draw(st.lists(figures, max_size=5)))),
            refusal=draw(texts),
            unit=draw(st.sampled_from(["s", "bytes", "share", "ratio", HOSTILE])),
        )
        for cell in cells
    )
    header = run.header.model_copy(update={"command": (draw(texts),), "options": {draw(texts): draw(texts)}})
    harmless(report_page(dataclasses.replace(run, header=header, results=results, measurements=found)))


def big_run(folder: Path, *, failing: bool) -> Path:
    """Write a run of 500 cells with ten findings each, and with logs; all cells fail, or none."""
    cells = [
        Cell("reference", f"w{number}", "ddp", Topology(1, gpus), precision, "cpu")
        for number in range(25)
        for gpus in (1, 2, 3, 4, 8)
        for precision in ("64", "32", "16", "bf16")
    ]
    parameters = tuple((f"layers.{number}.weight", 1e6) for number in range(8))
    outcome = Outcome.FAILED if failing else Outcome.PASSED
    found = [Finding(f"check{index}", outcome, "m" * 300, error_x_noise=3.0, step=0, rank=1) for index in range(10)]
    if failing:
        found = [dataclasses.replace(finding, parameters=parameters) for finding in found]
        found[0] = dataclasses.replace(found[0], cause="sum-instead-of-mean", family="averaging")
    header = Header.of(cells, command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
    results = [Result.of(cell, finding, f"pytest -k {cell.id}" * 3, 0.4) for cell in cells for finding in found]
    with RunWriter(folder, header) as writer:
        writer.write(*results)
        writer.close(Footer.of(results, int(failing)))
    for cell in cells if failing else ():
        place = writer.path / "traces" / cell.id
        place.mkdir(parents=True)
        for rank in range(8):
            (place / f"rank-{rank}.log").write_text(f"rank {rank}\n" + "a line of a log that is long enough\n" * 1000)
    return writer.path


PAGE_LIMIT = 3_000_000


@pytest.mark.parametrize("failing", [False, True], ids=["good", "failing"])
def test_500_cells_are_a_small_page(tmp_path: Path, failing: bool) -> None:
    run = big_run(tmp_path, failing=failing)
    write_report(run)
    page = (run / "report.html").read_text()
    assert len(page.encode()) < PAGE_LIMIT
    harmless(page)
    if failing:
        assert f"and {500 - MOST_FAILURES} more" in page


def test_many_causes_are_cut_off_with_their_number(build_run: BuildRun) -> None:
    cell = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    cells = [dataclasses.replace(cell, workload=f"w{index}") for index in range(MOST_GROUPS + 7)]
    run = build_run({each: [Outcome.FAILED] for each in cells})
    results = tuple(result.model_copy(update={"cause": result.workload, "family": "sync"}) for result in run.results)
    assert "… and 7 more causes" in report_page(dataclasses.replace(run, results=results))


def test_a_measurement_that_went_wrong_is_said_first(build_measured_run: BuildRun) -> None:
    run = build_measured_run()
    cell = Cell("reference", "perf-mlp", "ddp", Topology(1, 2), "32", "cpu")
    crashed = Result.of(cell, Finding("performance", Outcome.CRASHED, "rank 1 ended with signal 9"), "pytest it", None)
    passed = Result.of(dataclasses.replace(cell, backend="dp"), Finding("performance", Outcome.PASSED, ""), "", None)
    page = harmless(report_page(dataclasses.replace(run, results=(*run.results, crashed, passed))))
    assert page.inside("h1") == ["1 of 36 measurements failed."]
    assert "rank 1 ended with signal 9" in page.text
