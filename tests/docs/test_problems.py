"""The documentation's problems are suitable for judging trainers, and the page about them is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import use_workloads
from plumbline.workloads import WORKLOADS, Workload

PAGE = (Path(__file__).parents[2] / "docs" / "define-a-workload.md").read_text()
pytestmark = pytest.mark.usefixtures("workloads_as_before", "one_thread")
PROBLEMS = dict(re.findall(r"```python\n# problem: (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))


def test_no_block_of_code_is_left_out():
    assert len(PROBLEMS) == PAGE.count("```python")


@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_fit(name, tmp_path):
    file = tmp_path / f"{name}.py"
    file.write_text(PROBLEMS[name])
    for own in use_workloads([str(file)]):
        refuse_unfit(WORKLOADS[own.name], (1, 2, 3, 4, 8))


def test_the_defaults_in_the_table_are_those_of_the_class():
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `batch_size`")]
    names = ("batch_size", "steps_per_epoch", "epochs")
    assert row.endswith(f"| {', '.join(str(getattr(Workload, name)) for name in names)} |")
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `accumulate`")]
    names = ("accumulate", "clip_norm", "validate_every", "shuffle", "seed")
    assert row.endswith(f"| {', '.join(str(getattr(Workload, name)) for name in names)} |")
