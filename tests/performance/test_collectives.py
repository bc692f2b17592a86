"""Overlapping spans are counted once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plumbline.worker.timing.profiler import union

moments = st.integers(0, 60)


@given(st.lists(st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))), max_size=12))
def test_a_union_is_the_moments_that_any_span_covers(spans):
    covered = {moment for begun, ended in spans for moment in range(begun, ended)}
    assert union(sorted(spans)) == len(covered)
