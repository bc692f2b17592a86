"""pytest-timeout's limit applies to ranks: it shows their stacks, not that of pytest's process."""

from __future__ import annotations

import pytest

pytest.importorskip("pytest_timeout")

HANGS = """
import threading
import pytest

@pytest.fixture
def goes():
    yield
    print("torn down here")

@pytest.mark.timeout(1, method={method!r})
@pytest.mark.ranks(2)
def test_hangs(rank, goes):
    if rank == 1:
        waits_for_ever()

def waits_for_ever():
    threading.Event().wait()

@pytest.mark.timeout(100, method={method!r})
@pytest.mark.ranks(2, timeout=1)
def test_has_less_time_by_its_marker(rank):
    waits_for_ever()

@pytest.mark.timeout(100, method={method!r})
@pytest.mark.ranks(2)
def test_ends(rank):
    pass
"""


@pytest.mark.parametrize("method", ["signal", pytest.param("thread", marks=pytest.mark.nightly)])
def test_it_shows_the_stacks_of_the_ranks(method, users):
    run = users(HANGS.format(method=method))
    shown = run["test_hangs"]
    assert shown.message == "rank 1 of 2 had not ended after 1 s, the limit of pytest-timeout"
    assert "in waits_for_ever" in shown.text
    assert "rank 0 passed" in shown.text
    assert "torn down here" in run.stdout
    assert run["test_has_less_time_by_its_marker"].message == "ranks 0, 1 of 2 had not ended after 1 s"
    assert run["test_ends"].outcome == "passed"
    assert "harness/plumbline" not in run.stdout
    assert "Stack of" not in run.stdout
