"""Whatever was measured, drawings stay on the chart, and text is legible."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.report.html.charts import STYLES, Axis, curve_charts, distribution_chart, memory_chart, positions
from plumbline.report.tables.measured import Conformance, MeasuredCell
from plumbline.report.text import between, digits, in_words
from plumbline.results.records import Measurement, PlannedCell

Measure = Callable[..., Measurement]
RIGHT = Conformance("Y", False, "passed")

finite = st.floats(allow_nan=False, allow_infinity=False)
units = st.sampled_from(["s", "bytes", "share", "ratio", "count", "samples/s", ""])


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.0123, "s", "12.3 ms"),
        (1.5, "s", "1.50 s"),
        (0.0, "s", "0 s"),
        (2.5e-5, "s", "25.0 µs"),
        (1.5 * 2**30, "bytes", "1.50 GiB"),
        (12.0, "bytes", "12.0 B"),
        (0.0, "bytes", "0 B"),
        (0.871, "share", "87.1 %"),
        (1.42, "ratio", "× 1.42"),
        (12345.6, "samples/s", "12,300 samples/s"),
        (3.0, "count", "3.00"),
        (1e300, "samples/s", "1.0e300 samples/s"),
        (999.7, "", "1,000"),
    ],
)
def test_a_figure_in_words(value: float, unit: str, words: str) -> None:
    assert in_words(value, unit) == words


def test_bounds_share_their_unit() -> None:
    assert between(0.00995, 0.0105, "s") == "9.95–10.5 ms"


@given(finite, units)
def test_every_figure_has_short_words(value: float, unit: str) -> None:
    assert 0 < len(in_words(value, unit)) <= 30


@given(st.floats(1e-3, 1e14))
def test_digits_are_within_half_a_hundredth(value: float) -> None:
    assert math.isclose(float(digits(value).replace(",", "")), value, rel_tol=0.0051)


@given(st.lists(finite, min_size=1, max_size=5), units)
def test_an_axis_holds_its_values(values: list[float], unit: str) -> None:
    scale = Axis.over(values, unit)
    assert all(0 <= scale.at(value) <= 100 for value in values)
    assert scale.at(0.0) == 0
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 7
    assert ticks[0].at == 0
    assert all(0 <= tick.at <= 100 for tick in ticks)
    assert [tick.at for tick in ticks] == sorted(tick.at for tick in ticks)


@given(st.lists(st.integers(1, 2**106), min_size=1, max_size=8))
def test_devices_stand_in_order(numbers: list[int]) -> None:
    places = positions(numbers)
    assert list(places) == sorted(set(numbers))
    assert list(places.values()) == sorted(places.values())
    assert all(0 <= place <= 100 for place in places.values())


def test_doublings_are_equal_steps() -> None:
    assert positions([8, 1, 2, 4]) == {1: 0.0, 2: 33.33, 4: 66.67, 8: 100.0}


def cell_of(
    figures: dict[str, Measurement], backend: str = "ddp", gpus: int = 2, precision: str = "32"
) -> MeasuredCell:
    cell = Cell("reference", "perf-mlp", backend, Topology(1, gpus), precision, "cpu")
    return MeasuredCell(cell.id, PlannedCell.of(cell).coordinates, figures, RIGHT)


ANY = Cell("reference", "perf-mlp", "ddp", Topology(1, 2), "32", "cpu")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), finite, finite, finite), min_size=1, max_size=8))
def test_curves_stay_on_their_chart(measured: Measure, found: list[tuple[int, float, float, float]]) -> None:
    cells = [
        cell_of({"throughput": measured(ANY, "throughput", value, low=low, high=high)}, gpus=gpus)
        for gpus, value, low, high in found
    ]
    charts = list(curve_charts("Throughput", "throughput", cells, ideal=1.0))
    assert len(charts) == (len({gpus for gpus, *_ in found}) > 1)
    for chart in charts:
        points = [point for curve in chart.curves for point in curve.points]
        assert len(points) == len(found)
        assert all(0 <= place <= 100 for point in points for place in (point.x, point.y, point.low, point.high))


def test_curves_that_cannot_be_told_apart_have_charts_of_their_own(measured: Measure) -> None:
    cells = [
        cell_of({"throughput": measured(ANY, "throughput", 1.0)}, backend, gpus, precision)
        for backend in ("a", "b", "c", "d", "e")
        for gpus in (2, 4)
        for precision in ("32", "16")
    ]
    charts = list(curve_charts("Throughput", "throughput", cells))
    assert [chart.title for chart in charts] == ["Throughput, in 32", "Throughput, in 16"]
    assert all(len(chart.curves) == 5 <= STYLES for chart in charts)


def test_one_device_is_where_curves_begin(measured: Measure) -> None:
    def figure(value: float) -> dict[str, Measurement]:
        return {"throughput": measured(ANY, "throughput", value)}

    cells = [cell_of(figure(10.0), "none", 1), cell_of(figure(18.0), "ddp", 2), cell_of(figure(15.0), "dp", 2)]
    (chart,) = curve_charts("Throughput", "throughput", cells)
    assert [curve.label for curve in chart.curves] == ["ddp 32", "dp 32"]
    assert all(len(curve.points) == 2 for curve in chart.curves)


@given(st.lists(st.lists(finite, min_size=3, max_size=41), min_size=1, max_size=4))
def test_distributions_stay_on_their_chart(measured: Measure, found: list[list[float]]) -> None:
    cells = [cell_of({"step_p50": measured(ANY, "step_p50", 1.0, quantiles=tuple(sorted(one)))}) for one in found]
    chart = distribution_chart(cells)
    assert chart is not None
    assert len(chart.bars) == len(found)
    for bar in chart.bars:
        assert bar.mark is not None
        assert 0 <= bar.mark <= 100
        assert all(0 <= part.at <= 100 and 0 <= part.width <= 100 for part in bar.parts)


def test_a_distribution_is_its_quantiles(measured: Measure) -> None:
    steps = (*(index / 40 for index in range(40)), 9.0)
    chart = distribution_chart([cell_of({"step_p50": measured(ANY, "step_p50", 0.5, quantiles=steps)})])
    assert chart is not None
    (bar,) = chart.bars
    assert bar.text == "500 ms"
    assert bar.beyond == "9.00 s", "the slowest step is far beyond the axis"
    assert [part.title for part in bar.parts] == [
        "90 % of the steps: 50.0 ms to 950 ms",
        "50 % of the steps: 250 ms to 750 ms",
    ]


def test_memory_is_stacked_up_to_the_peak(measured: Measure) -> None:
    figures = {
        name: measured(ANY, name, size) for name, size in (("tensors_parameters", 25.0), ("tensors_gradients", 50.0))
    }
    chart = memory_chart([cell_of({**figures, "memory_allocated_peak": measured(ANY, "memory_allocated_peak", 100.0)})])
    assert chart is not None
    (bar,) = chart.bars
    assert [(part.at, part.width) for part in bar.parts] == [(0.0, 25.0), (25.0, 50.0)]
    assert bar.mark == 100.0


def test_without_figures_there_is_no_chart(measured: Measure) -> None:
    nothing = cell_of({"throughput": measured(ANY, "throughput", None, refusal="why")})
    assert list(curve_charts("", "throughput", [nothing])) == []
    assert memory_chart([nothing]) is None
    assert distribution_chart([nothing]) is None
