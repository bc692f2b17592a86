"""The pytest plugin: its options, and the hooks that turn cells into tests.

``suites/conftest.py`` and ``plumbline run`` load it; other pytest runs do not get its options. Heavy modules are
imported when the first cell is collected.

Under xdist, the workers train and judge. They send their records with the test reports to the process that the user
started, which writes the run. If the options plan no cell at all, pytest creates a placeholder test, which is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.core.backend import BACKENDS
from plumbline.core.invocation import command
from plumbline.evidence.trace import STORE_ABOVE
from plumbline.pytest_plugin.progress import show_progress

if TYPE_CHECKING:
    from plumbline.pytest_plugin.cases import BenchmarkCase, ConformanceCase
    from plumbline.pytest_plugin.session import Session

SESSION: pytest.StashKey[Session] = pytest.StashKey()
CELL_FIXTURES = ("plumbline_cell", "plumbline_benchmark")
REFUSAL = "plumbline-refusal"
REFUSED: pytest.StashKey[pytest.UsageError] = pytest.StashKey()
PLANNING: pytest.StashKey[bool] = pytest.StashKey()  # set once there is a cell to plan
COMMAND: pytest.StashKey[list[str]] = pytest.StashKey()  # the user's command, if it was not pytest
SETTINGS: pytest.StashKey[dict[str, Any]] = pytest.StashKey()  # options from the project's file
LAST_WORDS: pytest.StashKey[set[str]] = pytest.StashKey()  # what the summary says if there is nothing to run
NOTHING_PLANNED = (
    "Nothing to run: no cell matches these options. Change --backends, --workloads or --precisions, or raise --gpus."
)
_NOTHING_PLANNED = "plumbline-nothing-planned"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("plumbline", "plumbline: conformance of distributed trainers")
    try:
        add_options(group.addoption)
    except ValueError as error:
        raise pytest.UsageError(
            f"a conftest.py or another plugin defines one of Plumbline's options: {error}. "
            f"Use `{command('plumbline', 'run')}`, which reads only the suites' own conftest.py, "
            "or disable the plugin with -p no:NAME"
        ) from error


def add_options(add: Callable[..., object]) -> None:
    """Add Plumbline's options by calling ``add`` like argparse's ``add_argument``."""
    several, flag = partial(add, action="append"), partial(add, action="store_true")
    gpus = "maximum number of devices; with --nodes, per node (default: all of this machine, or 4 simulated ones)"
    add("--gpus", type=int, metavar="N", help=gpus)
    add("--nodes", type=int, metavar="N", help="maximum number of nodes (default: split --gpus)")
    mesh = "plan only the backend with these dimensions and sizes, for example dp=2,tp=2 (repeatable)"
    several("--mesh", metavar="A=N,B=M", help=mesh)
    sampled = ", ".join(backend.name for backend in BACKENDS.values() if backend.sampled)
    backends = f"backends: {', '.join(BACKENDS)} (default: all, but only a few cells of {sampled})"
    add("--backends", metavar="A,B", help=backends)
    precisions = "precisions: 64, 32, 16, bf16, bf16-true, bf16-master (default: all; the last two if declared)"
    add("--precisions", metavar="A,B", help=precisions)
    add("--workloads", metavar="A,B", help="built-in workloads (default: all; with --workload, none)")
    several("--workload", metavar="WHAT", help="your own workload: file.py, file.py::name or module (repeatable)")
    subject = (
        "trainer under test: short name, file.py, file.py::name or module; append ';python=/path/to/python' "
        "to use another interpreter (repeatable; default: reference)"
    )
    several("--subject", metavar="WHAT", help=subject)
    several("--cell", metavar="ID", help="run only the cell with this id (repeatable; default: all)")
    add("--seed", type=int, metavar="N", help="seed of weights, data and order (default: each workload's own)")
    accelerator = "type of device: cuda, xpu, npu, …; cpu simulates devices, auto uses those of this machine, if any"
    add("--accelerator", default="auto", metavar="TYPE", help=f"{accelerator} (default: %(default)s)")
    launcher = "how ranks are started: local, torchrun, slurm (within this job), hosts, ray (default: %(default)s)"
    add("--launcher", default="local", metavar="NAME", help=launcher)
    place = "for --launcher torchrun: wait here for the nodes and print a command for each (default: start them)"
    add("--rendezvous", metavar="HOST:PORT", help=place)
    prefix = "for --launcher hosts: prefix that runs a command on node {node}, for example 'ip netns exec node{node}'"
    add("--node-command", metavar="COMMAND", help=prefix)
    address = "for --launcher hosts, slurm, ray: address where nodes reach this machine (default: its only address)"
    add("--listen", metavar="ADDRESS", help=address)
    flag("--oversubscribe", help="let several ranks share a device; CUDA's then communicate over gloo")
    above = "store tensors of more than N entries once for all ranks with the same values (default: %(default)s)"
    add("--store-above", type=int, default=STORE_ABOVE, metavar="N", help=above)
    add("--expectations", metavar="DIR", help="folder of expected failures (default: expectations/ beside the suite)")
    resume = "continue the interrupted run RUN, or the latest one (default: begin a new run)"
    add("--resume", nargs="?", const="latest", metavar="RUN", help=resume)
    add("--report-dir", metavar="DIR", help="folder for runs (default: reports/)")
    unsupported = "list every cell that the subject does not claim to support (default: print how many)"
    flag("--show-unsupported", help=unsupported)
    flag("--keep-traces", help="keep the traces of all cells (default: only of failures)")
    limit = "time limit for the launch of a cell (default: %(default)s)"
    add("--time-limit", type=float, default=120.0, metavar="SECONDS", help=limit)
    launches = "launches per measured cell; more launches narrow the intervals (default: %(default)s)"
    add("--launches", type=int, default=3, metavar="N", help=launches)
    profile = "launch each measured cell once more and keep a torch.profiler trace for Perfetto; on CUDA also a "
    flag("--profile", help=f"{profile}memory snapshot")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: a few cells that touch every backend, in seconds")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    fixture = next((name for name in CELL_FIXTURES if name in metafunc.fixturenames), None)
    if fixture is None:
        return
    try:
        with _usage_errors():
            session = _session(metafunc.config, metafunc.definition.path)
            planned = session.selected(session.planned if fixture == "plumbline_cell" else session.to_measure)
    except pytest.UsageError as error:
        # Raised here, it would look like a broken test file. pytest_collection_finish raises it.
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
    from plumbline.pytest_plugin.cases import ConformanceCase

    return ConformanceCase(_session(request.config, request.path), request.param, request.node)


@pytest.fixture
def plumbline_benchmark(request: pytest.FixtureRequest) -> BenchmarkCase:
    from plumbline.pytest_plugin.cases import BenchmarkCase

    return BenchmarkCase(_session(request.config, request.path), request.param, request.node)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SESSION not in config.stash or REFUSED in config.stash:
        return
    planned = [item for item in items if (cell := _cell_of(item)) is None or hasattr(cell, "cell")]
    if len(planned) < len(items) and not any(map(_cell_of, planned)):  # only placeholders
        if hasattr(config, "workeroutput"):
            config.workeroutput[_NOTHING_PLANNED] = True
        else:
            config.stash.setdefault(LAST_WORDS, set()).add(NOTHING_PLANNED)
    items[:] = planned
    if not config.option.show_unsupported:
        config.stash[SESSION].deselect_undeclared(config, items, _cell_of)


def _cell_of(item: pytest.Item, fixtures: Sequence[str] = CELL_FIXTURES) -> Any:
    """Return a test's planned cell, or pytest's placeholder for an empty plan; None if the test is not of a cell."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec else {}
    return next((parameters[name] for name in fixtures if name in parameters), None)


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if REFUSED in config.stash and not hasattr(config, "workerinput"):
        raise config.stash[REFUSED]
    if SESSION not in config.stash or hasattr(config, "workerinput") or config.option.collectonly:
        return
    functions = [item for item in session.items if isinstance(item, pytest.Function)]
    chosen = {item.callspec.id for item in functions if {*CELL_FIXTURES} & {*item.fixturenames}}
    _begin(config, config.stash[SESSION], chosen)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if SESSION not in item.config.stash:
        return
    from plumbline.engine.cells_in_flight import AHEAD

    following = item.session.items[item.session.items.index(item) + 1 :][:AHEAD]
    if hasattr(item.config, "workerinput"):  # a worker of xdist knows one test ahead
        following = [nextitem] if nextitem else []
    cells = (_cell_of(one, ("plumbline_cell",)) for one in following)
    item.config.stash[SESSION].upcoming = list(takewhile(lambda cell: cell is not None, cells))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    # xdist's controller does not collect tests itself.
    cells = [nodeid.rpartition("::test_cell[") for nodeid in ids if "::test_cell[" in nodeid]
    if cells:
        session = _session(node.config, node.config.rootpath / cells[0][0])
        _begin(node.config, session, {parameter[:-1] for _, _, parameter in cells})
        session.close()  # only the plan needed its pools


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    if refusal := output.get(REFUSAL):
        raise pytest.UsageError(refusal)
    if not output:
        return
    from plumbline.pytest_plugin.session import nothing_to_run, undeclared_in

    last_words = node.config.stash.setdefault(LAST_WORDS, set())
    if output.get(_NOTHING_PLANNED):
        last_words.add(NOTHING_PLANNED)
    undeclared = undeclared_in(output)
    if undeclared and SESSION in node.config.stash:
        node.config.stash[SESSION].run_on_disk.add_undeclared(undeclared)
    elif undeclared:  # without a test, the controller has no session
        last_words.add(nothing_to_run(undeclared))


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    begun = SESSION in config.stash and config.stash[SESSION].run_on_disk.path is not None
    if exitstatus == pytest.ExitCode.INTERRUPTED and PLANNING in config.stash and not begun:
        terminalreporter.write_line("interrupted before the first cell; start again with:")
        terminalreporter.write_line(f"  {command(*_command(config))}")
    for sentence in config.stash.get(LAST_WORDS, ()):
        terminalreporter.write_line(sentence)


def _begin(config: pytest.Config, session: Session, chosen: Set[str]) -> None:
    with _usage_errors():
        session.begin(chosen, _command(config), config.stash.get(SETTINGS, {}))
    cells = [one.cell for one in session.planned if one.cell.id in chosen]
    if chosen - {cell.id for cell in cells}:  # to_measure raises if nothing can be measured
        cells += [one.cell for one in session.to_measure if one.cell.id in chosen]
    show_progress(config, {cell.id: cell.processes for cell in cells})


def _session(config: pytest.Config, suite: Path) -> Session:
    config.stash[PLANNING] = True
    if SESSION not in config.stash:
        from plumbline.pytest_plugin.session import Session

        with _usage_errors():
            # The workers of xdist share the cores already.
            forks_judges = not hasattr(config, "workerinput")
            notify = partial(_notify, config)
            session = Session(vars(config.option), config.rootpath, suite, notify, forks_judges=forks_judges)
        config.stash[SESSION] = session
        config.pluginmanager.register(session.run_on_disk, "plumbline-run-on-disk")
        config.pluginmanager.register(session, "plumbline-session")
    return config.stash[SESSION]


@contextmanager
def _usage_errors() -> Iterator[None]:
    from plumbline.core.errors import PlumblineError

    try:
        yield
    except PlumblineError as error:
        from plumbline.report.text import printable_lines

        raise pytest.UsageError(printable_lines(str(error))) from None  # it may quote a run that is resumed


def _notify(config: pytest.Config, message: str) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        print(f"\nplumbline: {message}", file=sys.stderr, flush=True)


def _command(config: pytest.Config) -> list[str]:
    return config.stash.get(COMMAND, ["pytest", *map(str, config.invocation_params.args)])
