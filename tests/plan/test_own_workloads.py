"""How ``--workload`` and ``--workloads`` combine, and how the command that repeats a cell includes them."""

from __future__ import annotations

import pytest

from plumbline.core.errors import PlanError
from plumbline.own_workloads.load import OwnWorkload
from plumbline.planning.options import selected_workloads

OWN = (OwnWorkload("first", "mine.py", "0"), OwnWorkload("second", "mine.py", "0"))


@pytest.mark.parametrize(
    ("own", "named", "selected"),
    [
        ((), None, None),
        ((), ("mlp",), ("mlp",)),
        (OWN, None, ("first", "second")),
        (OWN, ("mlp", "adam"), ("first", "second", "mlp", "adam")),
    ],
)
def test_those_of_files_are_trained_and_built_in_ones_where_they_are_named(own, named, selected):
    assert selected_workloads(own, named) == selected


def test_a_name_that_could_mean_it_alone_or_nothing_is_refused():
    with pytest.raises(PlanError, match=r"to select one of your own, use --workload mine\.py::second"):
        selected_workloads(OWN, ("second",))
