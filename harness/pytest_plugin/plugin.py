"""The pytest plugin: options, cells as tests, the run on disk, the table at the end.

``suites/conftest.py`` loads it, and ``plumbline run`` by ``-p``; no other pytest of the environment knows its options.
Nothing heavy is imported before a cell is really asked for.

The process that the user started writes the run; under xdist the workers train and judge, and their findings
travel to it with the test reports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.core.backend import BACKENDS
from harness.core.invocation import command
from harness.evidence.trace import SKETCH_ABOVE
from harness.pytest_plugin.progress import follow

if TYPE_CHECKING:
    from harness.pytest_plugin.benchmark_case import BenchmarkCase
    from harness.pytest_plugin.conformance_case import ConformanceCase
    from harness.pytest_plugin.session import Session

SESSION: pytest.StashKey[Session] = pytest.StashKey()
CELL_FIXTURES = ("plumbline_cell", "plumbline_benchmark")
REFUSAL = "plumbline-refusal"
REFUSED: pytest.StashKey[pytest.UsageError] = pytest.StashKey()
COMMAND: pytest.StashKey[list[str]] = pytest.StashKey()
"""What the user typed, where it was another program than pytest."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add Plumbline's options."""
    group = parser.getgroup("plumbline", "plumbline: conformance of distributed trainers")
    try:
        add_options(group.addoption)
    except ValueError as error:
        raise pytest.UsageError(
            f"a conftest.py or another plugin has an option of Plumbline's: {error}. "
            f"`{command('plumbline', 'run')}` runs the suites and reads no conftest.py but theirs; "
            "a plugin is left out by -p no:NAME"
        ) from error


def add_options(add: Callable[..., object]) -> None:
    """Add Plumbline's options by ``add``, which takes what argparse's ``add_argument`` takes."""
    add("--gpus", type=int, metavar="N", help="budget of devices; with --nodes, devices of each node")
    add("--nodes", type=int, metavar="N", help="nodes with so many gpus each")
    add("--backends", metavar="A,B", help=f"{', '.join(BACKENDS)} (default: all)")
    add("--precisions", metavar="A,B", help="64, 32, 16, bf16 (default: all)")
    add("--workloads", metavar="A,B", help="workloads by name (default: all)")
    add(
        "--subject",
        action="append",
        metavar="WHAT",
        help="trainer under test: a short name, file.py, file.py::name or a module; "
        "'…;python=/path/to/python' runs it in another environment (repeatable, default: reference)",
    )
    add("--cell", action="append", metavar="ID", help="this cell only, of those that the options plan (repeatable)")
    add("--seed", type=int, metavar="N", help="other weights, data and order than the workloads' own")
    add("--accelerator", choices=("auto", "cuda", "cpu"), default="auto", help="cpu simulates every device")
    add(
        "--launcher",
        default="local",
        metavar="NAME",
        help="where ranks live: local, torchrun, slurm (the nodes of this job), hosts (see --node-command)",
    )
    add(
        "--rendezvous",
        metavar="HOST:PORT",
        help="with --launcher torchrun: listen there, and say what is to be run on each node",
    )
    add(
        "--node-command",
        metavar="COMMAND",
        help="with --launcher hosts: what leads to node {node}, as in 'ip netns exec plumbline-{node}'",
    )
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
    add("--report-dir", metavar="DIR", help="where runs are written, made if need be (default: reports/)")
    add(
        "--show-unsupported",
        action="store_true",
        help="make a test of each cell that its subject does not declare, too; by default they are counted in one line",
    )
    add("--keep-traces", action="store_true", help="keep the evidence of every cell, not only of the bad ones")
    add(
        "--time-limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="for one cell (default: %(default)s)",
    )
    add(
        "--launches",
        type=int,
        default=3,
        metavar="N",
        help="launches of each cell that is measured: more of them, narrower intervals (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that selects the few cells which touch everything."""
    config.addinivalue_line("markers", "smoke: a few cells that touch every backend, in seconds")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of every planned cell."""
    fixture = next((name for name in CELL_FIXTURES if name in metafunc.fixturenames), None)
    if fixture is None:
        return
    try:
        with _usage_errors():
            session = _session(metafunc.config, metafunc.definition.path)
            planned = session.selected(session.planned if fixture == "plumbline_cell" else session.to_measure)
    except pytest.UsageError as error:
        # Raised here it would read like a broken test file; it is said when the collection is done.
        metafunc.config.stash[REFUSED] = error
        if hasattr(metafunc.config, "workeroutput"):
            metafunc.config.workeroutput[REFUSAL] = str(error)
        planned = []
    metafunc.parametrize(
        fixture,
        [pytest.param(one, id=one.cell.id, marks=[pytest.mark.smoke] if one.is_smoke else []) for one in planned],
        indirect=True,
    )


@pytest.fixture
def plumbline_cell(request: pytest.FixtureRequest) -> ConformanceCase:
    """One cell to examine."""
    from harness.pytest_plugin.conformance_case import ConformanceCase

    return ConformanceCase(_session(request.config, request.path), request.param, request.node)


@pytest.fixture
def plumbline_benchmark(request: pytest.FixtureRequest) -> BenchmarkCase:
    """One cell to measure."""
    from harness.pytest_plugin.benchmark_case import BenchmarkCase

    return BenchmarkCase(_session(request.config, request.path), request.param, request.node)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cells that their subjects do not declare, of those that were selected."""
    if SESSION in config.stash and not config.option.show_unsupported:
        from harness.pytest_plugin.undeclared_cells import leave_out

        leave_out(config, config.stash[SESSION], items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the run on disk once it is known which cells were selected."""
    config = session.config
    if REFUSED in config.stash and not hasattr(config, "workerinput"):
        raise config.stash[REFUSED]
    if SESSION not in config.stash or hasattr(config, "workerinput") or config.option.collectonly:
        return
    chosen = {item.callspec.id for item in session.items if {*CELL_FIXTURES} & {*getattr(item, "fixturenames", ())}}
    _begin(config, config.stash[SESSION], chosen)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Begin the run in xdist's controller, which collects nothing itself."""
    cells = [nodeid.rpartition("::test_cell[") for nodeid in ids if "::test_cell[" in nodeid]
    if cells:
        session = _session(node.config, node.config.rootpath / cells[0][0])
        _begin(node.config, session, {parameter[:-1] for _, _, parameter in cells})
        session.close()  # its pools were asked what they hold; the workers' own do the training


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Say in xdist's controller why its workers found nothing to do."""
    told = getattr(node, "workeroutput", {})
    if refusal := told.get(REFUSAL):
        raise pytest.UsageError(refusal)
    if told:
        from harness.pytest_plugin.undeclared_cells import take_over

        take_over(node.config, node.config.stash.get(SESSION, None), told)


def _begin(config: pytest.Config, session: Session, chosen: Set[str]) -> None:
    """Begin the run on disk for the cells that were ``chosen``, and show on a terminal how far it is."""
    with _usage_errors():
        session.begin(chosen, _command(config))
    cells = [one.cell for one in session.planned if one.cell.id in chosen]
    if chosen - {cell.id for cell in cells}:  # elsewhere than on one machine nothing can be measured
        cells += [one.cell for one in session.to_measure if one.cell.id in chosen]
    follow(config, {cell.id: cell.processes for cell in cells})


def _session(config: pytest.Config, suite: Path) -> Session:
    """Return this process's session, made at the first cell, which is one of the file ``suite``."""
    if SESSION not in config.stash:
        with _usage_errors():
            from harness.pytest_plugin.session import Session

            session = Session(vars(config.option), config.rootpath, suite, partial(_say, config))
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


def _say(config: pytest.Config, text: str) -> None:
    """Tell the user something at once, whatever is captured at the moment."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        print(f"\nplumbline: {text}", file=sys.stderr, flush=True)


def _command(config: pytest.Config) -> list[str]:
    return config.stash.get(COMMAND, ["pytest", *map(str, config.invocation_params.args)])
