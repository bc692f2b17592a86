"""A separate project with the suites, and trainers for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

from plumbline.launch import pool as launch_pool
from plumbline.launch.pool import Pool
from plumbline.results.run import results_schema

LINE = Draft202012Validator(results_schema())

SUITES = Path(__file__).parents[2] / "suites"

TRAINER = """
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


@subject(name={name!r}, backends={backends!r}, precisions=["32"])
def train(job):
    model = job.model()
    if job.world_size > 1:
        torch.distributed.init_process_group(job.comm)
        model = DistributedDataParallel(model)
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            (job.loss(model(batch), batch) * {factor}).backward()
            optimizer.step()
"""


class Project:
    """A directory with ``suites/``, in which pytest runs as users run it."""

    hangs_after = 1800
    """Seconds after which a pytest in its own process hangs, however busy the machine is."""

    def __init__(self, pytester):
        self.pytester = pytester
        self.root = Path(pytester.path)
        shutil.copytree(SUITES, self.root / "suites", ignore=shutil.ignore_patterns("__pycache__"))
        (self.root / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib --strict-markers\n")

    def trainer(self, file, name=None, *, factor="1", backends=("none", "ddp")):
        """Write a trainer; ``factor`` multiplies its loss."""
        source = TRAINER.format(name=name or Path(file).stem, backends=list(backends), factor=factor)
        (self.root / file).write_text(source)
        return file

    def pytest(self, *arguments, suites=("suites/",), fresh=False):
        """Run pytest here; ``fresh``: in its own process, which costs the imports."""
        if fresh:
            return self.pytester.runpytest_subprocess(*suites, *arguments, timeout=self.hangs_after)
        return self.pytester.runpytest_inprocess(*suites, *arguments)

    @property
    def run(self):
        """The records of the latest run."""
        return self.run_in("reports")

    def run_in(self, report_dir):
        """The records of the latest run in a report directory."""
        return Records((self.root / report_dir / "latest").resolve())


class Records:
    """What a run left on disk."""

    def __init__(self, path):
        self.path = path
        self.name = path.resolve().name
        self.lines = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
        for line in self.lines:
            LINE.validate(line)
        self.traces = sorted(folder.name for folder in path.glob("traces/*"))

    @property
    def table(self):
        return (self.path / "support.md").read_text()

    @property
    def results(self):
        return [line for line in self.lines if line["type"] == "result"]

    @property
    def outcomes(self):
        """The outcomes of each cell, by its coordinates and check."""
        where = ("subject", "workload", "backend", "num_nodes", "gpus", "precision", "check")
        return {tuple(result[key] for key in where): result["outcome"] for result in self.results}

    @property
    def footer(self):
        return next((line for line in self.lines if line["type"] == "footer"), None)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """A session computes in one thread; restore the setting afterwards."""


@pytest.fixture(scope="session", autouse=True)
def _whole_torch():
    """A pytest inside this one removes its imports, but parts of torch cannot be imported twice."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1).step()


class KeptPool(Pool):
    """A pool that the next pytest session in this process uses too."""

    def close(self):
        """Leave the server running for the next session."""

    def end(self):
        super().close()


@pytest.fixture(scope="session")
def _pools():
    pools = {}
    yield pools
    for pool in pools.values():
        pool.end()


@pytest.fixture
def kept_pools(_pools, monkeypatch):
    """Let sessions in this process with the same subject share a fork server, which takes seconds to start."""

    def pool(locator, python, notify):
        file = Path(locator)
        key = (file.read_text() if file.is_file() else locator, python)
        if key not in _pools or not _pools[key].alive:
            _pools[key] = KeptPool(locator, python, notify)
        return _pools[key]

    monkeypatch.setattr(launch_pool, "Pool", pool)


@pytest.fixture
def project(pytester):
    return Project(pytester)
