from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from plumbline.report.tables.failures import MOST_ROWS, parameter_table

names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5).map(".".join)
errors = st.floats(min_value=0) | st.just(math.nan)


def test_a_line_for_each_parameter_and_a_mark_where_it_is_wrong():
    table = parameter_table([("first.weight", 0.8), ("last.weight", 2e6), ("last.bias", math.nan)], 9.5)
    assert table == [
        "  parameter     × noise (at most 9.5 allowed)",
        "  first.weight     0.80",
        "  last.weight     2.0e6  wrong",
        "  last.bias         inf  wrong",
    ]


def test_nothing_where_there_is_nothing():
    assert parameter_table([], 9.5) == []


def test_many_parameters_are_told_by_module_with_the_worst_of_each():
    many = [(f"layers.{layer}.{part}.weight", float(layer)) for layer in range(40) for part in ("a", "b")]
    (_, row) = parameter_table([*many, ("layers.3.a.bias", math.nan)], 9.5)
    assert row.split() == ["layers", "inf", "wrong"]
    fewer = parameter_table([(f"layers.{layer}.{part}", 1.0) for layer in range(10) for part in "ab"], 9.5)
    assert [row.split()[0] for row in fewer[1:]] == [f"layers.{layer}" for layer in range(10)]


@given(st.dictionaries(names, errors, min_size=1), st.none() | st.floats(min_value=0, allow_infinity=False))
def test_it_stays_small_and_keeps_the_worst(parameters, limit):
    table = parameter_table(list(parameters.items()), limit)
    assert 2 <= len(table) <= 1 + MOST_ROWS
    if limit is not None and any(not error <= limit for error in parameters.values()):
        assert any(row.endswith("wrong") for row in table[1:])
