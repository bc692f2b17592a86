"""The pytest plugin: options, cells as tests, the run on disk, the table at the end.

Registered as an entry point, so that its options work from any invocation that reaches ``suites/``. Nothing heavy
is imported before a cell is really asked for: the plugin is loaded by every pytest in the environment.

The process that the user started writes the run; under xdist the workers train and judge, and their findings
travel to it with the test reports.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.core.sketch import SKETCH_ABOVE

if TYPE_CHECKING:
    from harness.cell_test import CellTest
    from harness.session import Session

SESSION: pytest.StashKey[Session] = pytest.StashKey()
REFUSAL = "plumbline-refusal"
REFUSED: pytest.StashKey[pytest.UsageError] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add Plumbline's options."""
    group = parser.getgroup("plumbline", "plumbline: conformance of distributed trainers")
    add = group.addoption
    add("--gpus", type=int, metavar="N", help="budget of devices; with --nodes, devices of each node")
    add("--nodes", type=int, metavar="N", help="nodes with so many gpus each")
    add("--backends", metavar="A,B", help="none, auto, dp, ddp, ddp2 (default: all)")
    add("--precisions", metavar="A,B", help="64, 32, 16, bf16 (default: all)")
    add("--workloads", metavar="A,B", help="workloads by name (default: all)")
    add(
        "--subject",
        action="append",
        metavar="WHAT",
        help="trainer under test: a short name, file.py, file.py::name or a module; "
        "'…;python=/path/to/python' runs it in another environment (repeatable, default: reference)",
    )
    add("--seed", type=int, metavar="N", help="other weights, data and order than the workloads' own")
    add("--accelerator", choices=("auto", "cuda", "cpu"), default="auto", help="cpu simulates every device")
    add("--oversubscribe", action="store_true", help="let several ranks share a CUDA device (gloo)")
    add(
        "--sketch-above",
        type=int,
        default=SKETCH_ABOVE,
        metavar="N",
        help="record weights and gradients of more than N entries as sketches (default: %(default)s)",
    )
    add("--expectations", metavar="DIR", help="what is known to fail (default: expectations/ beside the suite)")
    add(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="go on with a run that broke off, or was stopped (default: the latest)",
    )
    add("--report-dir", metavar="DIR", help="where runs are written (default: reports/ in the root directory)")
    add("--keep-traces", action="store_true", help="keep the evidence of every cell, not only of the bad ones")
    add(
        "--time-limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="for one cell (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that selects the few cells which touch everything."""
    config.addinivalue_line("markers", "smoke: a few cells that touch every backend, in seconds")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of every planned cell."""
    if "plumbline_cell" not in metafunc.fixturenames:
        return
    try:
        planned = _session(metafunc.config, metafunc.definition.path).planned
    except pytest.UsageError as error:
        # Raised here it would read like a broken test file; it is said when the collection is done.
        metafunc.config.stash[REFUSED] = error
        if hasattr(metafunc.config, "workeroutput"):
            metafunc.config.workeroutput[REFUSAL] = str(error)
        planned = []
    metafunc.parametrize(
        "plumbline_cell",
        [pytest.param(one, id=one.cell.id, marks=[pytest.mark.smoke] if one.is_smoke else []) for one in planned],
        indirect=True,
    )


@pytest.fixture
def plumbline_cell(request: pytest.FixtureRequest) -> CellTest:
    """One cell to examine."""
    return _session(request.config, request.path).test(request.param, request.node)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the run on disk once it is known which cells were selected."""
    config = session.config
    if REFUSED in config.stash and not hasattr(config, "workerinput"):
        raise config.stash[REFUSED]
    if SESSION not in config.stash or hasattr(config, "workerinput") or config.option.collectonly:
        return
    chosen = {item.callspec.id for item in session.items if "plumbline_cell" in getattr(item, "fixturenames", ())}
    with _usage_errors():
        config.stash[SESSION].begin(chosen, _command(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Begin the run in xdist's controller, which collects nothing itself."""
    cells = [nodeid.rpartition("::test_cell[") for nodeid in ids if "::test_cell[" in nodeid]
    if cells:
        with _usage_errors():
            session = _session(node.config, node.config.rootpath / cells[0][0])
            session.begin({parameter[:-1] for _, _, parameter in cells}, _command(node.config))
        session.close()  # its pools were asked what they hold; the workers' own do the training


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Say in xdist's controller why its workers found nothing to do."""
    refusal = getattr(node, "workeroutput", {}).get(REFUSAL)
    if refusal:
        raise pytest.UsageError(refusal)


def _session(config: pytest.Config, suite: Path) -> Session:
    """Return this process's session, made at the first cell, which is one of the file ``suite``."""
    if SESSION not in config.stash:
        with _usage_errors():
            from harness.session import Session

            session = Session(vars(config.option), config.rootpath, suite)
        config.stash[SESSION] = session
        config.pluginmanager.register(session, "plumbline-session")
    return config.stash[SESSION]


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn our errors into pytest's way of saying that an invocation makes no sense: a sentence, exit code 4."""
    from harness.core.errors import PlumblineError

    try:
        yield
    except PlumblineError as error:
        raise pytest.UsageError(str(error)) from None


def _command(config: pytest.Config) -> list[str]:
    return [sys.argv[0], *config.invocation_params.args]
