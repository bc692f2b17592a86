"""Fixtures for all folders: a pytest inside pytest, and ranks from warm pools."""

# ruff: noqa: E402 - pytest is told first what it need not rewrite.
from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

for _hook in sys.meta_path:
    if isinstance(_hook, AssertionRewritingHook):
        # pytest treats packages with plugins as tests, and would rewrite all their modules in each process.
        _hook._must_rewrite -= {"hypothesis", "plumbline"}
        _hook._marked_for_rewrite_cache.clear()

import hypothesis
import torch

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.launch.pool import Pool
from plumbline.workloads import WORKLOADS

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
NIGHTLY = HERE / "nightly.txt"
"""Tests that run only at night: a folder, file, test or case per line; after ``!``, a case that runs by day too."""

WARM = "warm ranks"
TOGETHER = {
    "slurm": "a cluster",
    "hosts": "hosts",
    "ray_launcher": "a Ray cluster",
    "comparison": WARM,
    "extending": WARM,
    "hunt/test_right_trainers.py": WARM,
    "hunt/test_search.py": WARM,
    "performance": WARM,
    "cli/test_cli.py": WARM,
    "cli/test_smoke.py": WARM,
    "judge/test_checkpoint.py": WARM,
    "judge/test_drawn_problems.py": WARM,
    "judge/test_divergence.py": WARM,
    "judge/test_large_tensors.py": WARM,
    "judge/test_meshes.py": WARM,
    "judge/test_metrics.py": WARM,
    "judge/test_right_trainers.py": WARM,
    "judge/test_stages.py": WARM,
    "judge/test_windows.py": WARM,
    "judge/test_wrong_trainers.py": WARM,
    "launch/test_ends.py": WARM,
    "own_workloads/test_fork_servers.py": WARM,
    "subjects/test_declare.py": WARM,
    "subjects/test_torch.py": WARM,
    "worker/test_fused.py": WARM,
    "worker/test_sharded.py": WARM,
    "plugin/test_cells_in_flight.py": "runs of a project",
    "plugin/test_expectations.py": "runs of a project",
    "plugin/test_run.py": "runs of a project",
    "plugin/test_subject_code.py": "runs of a project",
    "plugin/test_undeclared.py": "runs of a project",
}
"""Folders and files that share an expensive resource, by its name; all other files run independently."""

ONE_POOL = (
    "torch",
    "torch-schedules",
    "reference",
    "train-loop",
    *(str(HERE / "extending" / "outside" / f"{name}.py") for name in ("backend", "mistake", "precision", "subject")),
    str(HERE / "extending" / "outside" / "workload.py"),
    *(str(HERE / "cli" / name) for name in ("adapters.py", "trainers.py")),
    *(str(HERE / "judge" / "subjects" / name) for name in ("wrong_meshes.py", "wrong_stages.py")),
    *(str(HERE / "worker" / "subjects" / name) for name in ("fused.py", "sharded.py")),
)
"""Locators that share one fork server, because each takes three seconds to start. Names are unique among them."""

COLLECTION = """
from plumbline.subjects.load import load

for number, locator in enumerate({locators}):
    for place, one in enumerate(load(locator)):  # of one name for several backends, too
        globals()[f"{{number}}_{{place}}"] = one.train
"""

# Tests and their imports stay until the end. Keep the garbage collector from visiting them: in this process while it
# collects tests, and in ranks forked from it, which would have to copy the pages of a million objects.
gc.disable()

# Tests have small tensors: a second thread would only use CPU time waiting for the first.
torch.set_num_threads(1)

hypothesis.settings.register_profile("ci", max_examples=15, deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", max_examples=300, deadline=None)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of tests that need CUDA devices (``pytest -m cuda`` selects them), and handle Ctrl-C."""
    config.addinivalue_line("markers", "cuda(devices=1): skipped where there are fewer CUDA devices")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Background jobs of a shell ignore SIGINT, and the commands that tests interrupt would inherit this.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def group_of(file: str) -> str:
    """Return the shared resource of a test file, from its path below this folder."""
    return TOGETHER.get(file) or TOGETHER.get(file.partition("/")[0]) or file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run tests of one group in one process, one after another, with ``--dist loadgroup``.

    xdist 3.8 writes groups into ``Item._nodeid``, which pytest 9.2 does not read: each test would stand alone.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = config.rootpath / nodeid.partition("::")[0]
            return group_of(file.relative_to(HERE).as_posix()) if file.is_relative_to(HERE) else str(file)

    return ByGroup(config, log)


def pytest_collection_finish() -> None:
    """Let the garbage collector visit objects that are created from now on."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need missing devices, and tests that run only at night."""
    present = torch.cuda.device_count()
    lines = [line for line in NIGHTLY.read_text().splitlines() if line and not line.startswith("#")]
    nightly, by_default = set(lines), {line[1:] for line in lines if line.startswith("!")}
    for item in items:
        marker = item.get_closest_marker("cuda")
        needed = marker.kwargs.get("devices", 1) if marker else 0
        if needed > present:
            item.add_marker(pytest.mark.skip(reason=f"CUDA devices: needs {needed}, {present} are here"))
        if item.path.is_relative_to(HERE):
            file = item.path.relative_to(HERE).as_posix()
            test = f"{file}::{item.name}"
            if nightly & {file.partition("/")[0], file, test.partition("[")[0], test} and test not in by_default:
                item.add_marker(pytest.mark.nightly)
    if not any("::" in argument for argument in config.args):
        own = [item for item in items if item.path.is_relative_to(HERE)]
        names = {f"{item.path.relative_to(HERE).as_posix()}::{item.name}" for item in own}
        names |= {name.partition("[")[0] for name in names}
        files = {name.partition("::")[0] for name in names}
        named = [line for line in lines if "::" in line and line.lstrip("!").partition("::")[0] in files]
        if lost := [line for line in named if line.lstrip("!") not in names]:
            raise pytest.UsageError(f"{NIGHTLY} has lines without a test: {'; '.join(lost)}")


@pytest.fixture(scope="session", autouse=True)
def _no_worker_to_those_it_starts():
    """Hide xdist from the processes that a test starts."""
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
            environment.delenv(name)
        yield


@pytest.fixture(scope="session")
def warm_pool(tmp_path_factory):
    """Return the session's pool for a locator; it is warmed up once and closed at the end."""
    pools: dict[str, Pool] = {}
    collection = tmp_path_factory.mktemp("subjects") / "collected_subjects.py"
    collection.write_text(COLLECTION.format(locators=ONE_POOL))

    def pool(locator: str | Path) -> Pool:
        place = str(collection if str(locator) in ONE_POOL else locator)
        if place not in pools:
            pools[place] = Pool(place)
        return pools[place]

    yield pool
    for opened in pools.values():
        opened.close()


@pytest.fixture(scope="session")
def cell_of():
    """Return a cell from words: ``cell_of("mlp", "ddp", "2x2", "32", subject="torch")``."""

    def cell(workload: str, backend: str, topology: str, precision: str = "32", subject: str = "simulated") -> Cell:
        return Cell(subject, workload, backend, Topology.parse(topology), precision, "cpu")

    return cell


@pytest.fixture(scope="session")
def thorough(pytestconfig) -> bool:
    """Whether loops over seeds and places are complete: with ``--hypothesis-profile nightly``."""
    return pytestconfig.getoption("--hypothesis-profile") == "nightly"


@pytest.fixture(scope="module")
def program():
    """Import a program of ``ci/`` or ``suites/`` by its file; remove it and its imports from there afterwards."""
    path, modules = list(sys.path), set(sys.modules)

    def imported(file: Path) -> ModuleType:
        name = f"program_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield imported
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        place = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if place.is_relative_to(HERE.parent / "ci") or place.is_relative_to(HERE.parent / "suites"):
            del sys.modules[name]


@pytest.fixture
def workloads_as_before():
    """Remove the workloads that a test registers."""
    before = dict(WORKLOADS)
    yield
    WORKLOADS.clear()
    WORKLOADS.update(before)


@pytest.fixture
def one_thread():
    """Let torch compute in one thread, like the harness; restore the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
