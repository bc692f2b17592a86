"""What is shown with measured figures: timelines, shares, profiles, formulas, and metrics that do not apply."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.report.html.charts import STEP_SHARES, share_chart
from plumbline.report.html.page import report_page
from plumbline.report.html.pictures import pipeline_timelines
from plumbline.report.markdown import one_screen
from plumbline.report.one_cell import one_cell
from plumbline.report.tables.measured import measured_cells
from plumbline.results.records import PERFORMANCE, Measurement, Profile, Result, TimelineChunk
from plumbline.results.run import Run

CELL = Cell("reference", "perf-gpt", "pp", Topology(1, 2), "32", "cpu")
PLACE = f"profiles/{CELL.id}"
FILES = (f"{PLACE}/rank-0.trace.json.gz", f"{PLACE}/rank-1.memory.pickle")
HOSTILE_FILES = (
    "../../etc/passwd",
    "javascript:alert(1)",
    f"{PLACE}/../rank-0.trace.json.gz",
    "profiles/../rank-0.trace.json.gz",
)
SHARES = dict(zip(STEP_SHARES, (0.5, 0.25, 0.0, 0.25), strict=True))
SVG = "{http://www.w3.org/2000/svg}"


def chunks() -> tuple[TimelineChunk, ...]:
    """Return a step of two stages and two micro-batches; the last stage differentiates its weights separately."""
    order = [
        (0, "forward", 0), (0, "forward", 1), (1, "forward", 0), (1, "backward", 0), (1, "weights", 0),
        (1, "forward", 1), (1, "backward", 1), (0, "backward", 0), (0, "backward", 1),
    ]  # fmt: skip
    return tuple(
        TimelineChunk(rank=rank, stage=rank, micro_batch=number, kind=kind, begin=index * 1e-3, end=(index + 1) * 1e-3)
        for index, (rank, kind, number) in enumerate(order)
    )


@pytest.fixture
def run(build_measured_run: Callable[..., Run], measured: Callable[..., Measurement]) -> Run:
    """A run with a pipeline that was measured and profiled."""
    return with_pipeline(build_measured_run(), measured)


def with_pipeline(whole: Run, measured: Callable[..., Measurement]) -> Run:
    """Return the run with a pipeline that was measured and profiled."""
    figures = [
        measured(CELL, "throughput", 100.0),
        measured(CELL, "pipeline_bubble", 0.4, unit="share", timeline=chunks(), formula="1 - busy / <all>"),
        *(measured(CELL, name, share, unit="share") for name, share in SHARES.items()),
    ]
    result = Result.of(CELL, Finding(PERFORMANCE, Outcome.PASSED, "100 samples/s"), "pytest", 1.0)
    reasons = {"mfu": "a CPU has <no> peak", "hfu": "a CPU has <no> peak"}
    profile = Profile(files=(*FILES, *HOSTILE_FILES), problems=("rank 1, trace: <b>no room</b>",))
    result = result.model_copy(update={"profile": profile, "not_applicable": reasons})
    return dataclasses.replace(whole, results=(*whole.results, result), measurements=(*whole.measurements, *figures))


def test_a_timeline_shows_each_chunk_once_and_can_be_read_without_colours(run: Run) -> None:
    (one,) = pipeline_timelines(measured_cells(run))
    root = ElementTree.fromstring(str(one.picture))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == len(chunks())
    assert len({box.get("y") for box in boxes}) == 2
    kinds = [box.find(f"{SVG}title").text.split()[0] for box in boxes]
    fills = {kind: {box.get("fill") for box, own in zip(boxes, kinds, strict=True) if own == kind} for kind in kinds}
    assert fills["forward"] == {None}
    assert len(fills["backward"] | fills["weights"]) == 2, "hatched in two ways"
    patterns = {pattern.get("id") for pattern in root.iter(f"{SVG}pattern")}
    assert all(fill[5:-1] in patterns for fill in (*fills["backward"], *fills["weights"]))
    labels = [text.text for text in root.iter(f"{SVG}text") if "micro" in text.get("class", "")]
    assert labels == [str(chunk.micro_batch) for chunk in chunks()]
    assert one.sentence == (
        "2 stages, 2 micro-batches, 9.00 ms; computing: rank 0 44.4 %, rank 1 55.6 %. The bubble is 40.0 % of the "
        "ranks’ time, over all launches."
    )


def test_timelines_of_one_page_have_patterns_of_their_own(run: Run) -> None:
    other = dataclasses.replace(CELL, precision="16")
    figure = next(one for one in run.measurements if one.timeline)
    further = figure.model_copy(update={"cell": other.id, "precision": "16"})
    page = report_page(dataclasses.replace(run, measurements=(*run.measurements, further)))
    ids = re.findall(r'<pattern id="([^"]+)"', page)
    assert len(ids) == len(set(ids)) == 4


def test_shares_of_a_step_are_one_bar(run: Run) -> None:
    chart = share_chart(measured_cells(run))
    assert chart is not None
    (bar,) = chart.bars
    assert [(part.at, part.width) for part in bar.parts] == [(0, 50), (50, 25), (75, 25)]
    assert bar.text == "50.0 % computing"


def test_the_page_links_profiles_and_nothing_else(run: Run) -> None:
    page = report_page(run)
    links = re.findall(r'<a href="([^"#]+)" download>([^<]+)</a>', page)
    assert links == [(FILES[0], "trace of rank 0"), (FILES[1], "memory snapshot of rank 1")]
    assert "&lt;b&gt;no room&lt;/b&gt;" in page


def test_what_does_not_apply_and_formulas_stand_on_every_report(run: Run) -> None:
    page, screen, shown = report_page(run), one_screen(run), one_cell(run, CELL.id, width=200)
    assert "Not applicable: mfu, hfu, because a CPU has &lt;no&gt; peak." in page
    assert "pipeline bubble = 1 - busy / &lt;all&gt;" in page
    assert "- not applicable: mfu, hfu, because a CPU has &lt;no&gt; peak; profiles of 1 cell: 2 files in" in screen
    assert "in `profiles/`; 1 problem with these" in screen
    assert "mfu: not applicable, because a CPU has <no> peak" in shown
    assert FILES[0] in shown
    assert "passwd" not in shown
