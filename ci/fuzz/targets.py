"""Everything that parses, as functions of bytes: each answers, or raises the error that it promises.

A target's ``seeds`` are inputs that are right; from them the fuzzer sets out.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from harness.core.cell import Cell
from harness.core.errors import PlumblineError
from harness.core.finding import Finding
from harness.core.outcome import Outcome, worst
from harness.core.topology import Topology
from harness.core.trace import RankTrace, Step, Tensors, Trace
from harness.expectations import read_expectations
from harness.judge.judge import judge
from harness.launch.local import launch
from harness.launch.pool import Pool
from harness.launch.settings import Settings
from harness.plan import Matrix, plan
from harness.report.markdown import support_page
from harness.report.support import support_table
from harness.report.terminal import support_for_terminal
from harness.store.fingerprint import Fingerprint
from harness.store.records import Footer, Header, Result, line_of
from harness.store.run import RESULTS, read_run
from harness.store.traces import read_rank
from harness.subjects.locator import parse_subject
from harness.trainer.environments.slurm import expand_hosts
from harness.trainer.errors import MisconfigurationError
from harness.trainer.gpus import parse_gpus
from harness.workloads import WORKLOADS

CELL = Cell("torch", "linear-exact", "ddp", Topology(1, 2), "32", "cpu")


@dataclass(frozen=True)
class Target:
    """``parse`` is given the fuzzer's bytes; ``refusals`` are the errors that it may raise."""

    parse: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    refusals: tuple[type[Exception], ...] = (PlumblineError,)

    def answer(self, data: bytes) -> None:
        """Parse ``data``; any error but a refusal with a sentence goes through."""
        try:
            self.parse(data)
        except self.refusals as error:
            if not str(error).strip():
                raise AssertionError("a refusal without a sentence") from error


def text(data: bytes) -> str:
    """Return the bytes as what a command line would hand over."""
    return data.decode(errors="surrogateescape")


@cache
def folder() -> Path:
    """Return a folder of this process's own."""
    path = Path(tempfile.mkdtemp(prefix="plumbline-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def names(data: bytes) -> None:
    """Plan a matrix of whatever names."""
    backends, _, rest = text(data).partition(";")
    precisions, _, workloads = rest.partition(";")
    plan(Matrix(2, None, *(tuple(part.split(",")) for part in (backends, precisions, workloads))), [])


def results(data: bytes) -> None:
    """Read a run and show it. Nothing in it may act on a terminal or a page."""
    (folder() / RESULTS).write_bytes(data)
    run = read_run(folder())
    shown = support_page(run, support_table(run)) + support_for_terminal(run)
    assert "\x1b" not in shown, "a control sequence reached the terminal"
    assert "<script" not in shown.lower(), "a tag reached the page"


def a_run() -> bytes:
    """Return a small run, without the lines' checksums."""
    header = Header.of([CELL], command=["pytest"], options={"gpus": 2}, fingerprint=Fingerprint(), simulated=True)
    finding = Finding("gradients", Outcome.FAILED, "<script>\x1b[31m", "no-sync", "sync", 3e7, 1, "a.weight", 0)
    found = [Result.of(CELL, finding, "pytest -k it", 0.5)]
    lines = b"".join(map(line_of, (header, *found, Footer.of(found, 1))))
    return re.sub(rb',"crc32":"[0-9a-f]{8}"', b"", lines)


@cache
def a_trace() -> tuple[bytes, ...]:
    """Return the evidence of two real ranks, without the checksums, which would refuse whatever was changed."""
    pool = Pool(CELL.subject)
    try:
        assert launch(pool, CELL, folder() / "right", Settings(60)).is_whole
    finally:
        pool.close()
    files = [folder() / "right" / f"rank-{rank}.safetensors" for rank in range(2)]
    return tuple(file.read_bytes().replace(b'"crc32"', b'"sum32"', 1) for file in files)


def trace(data: bytes) -> None:
    """Read a rank's evidence and judge it beside that of the other rank, in a problem where every sum is exact.

    There, evidence that says something else than the right trainer's is never found right.
    """
    both = (folder() / "rank-0.safetensors", folder() / "rank-1.safetensors")
    for file, content in zip(both, (data, a_trace()[1]), strict=True):
        file.write_bytes(content)
    ranks = tuple(map(read_rank, both))
    findings = judge(Trace(ranks), WORKLOADS[CELL.workload], CELL)
    right = read_rank(folder() / "right" / both[0].name)
    if not says_the_same(ranks[0], right):
        assert worst(finding.outcome for finding in findings).is_bad, "changed evidence was found right"


def says_the_same(one: RankTrace, other: RankTrace) -> bool:
    """Say whether two ranks consumed the same samples, were handed the same gradients and left the same weights."""
    if len(one.steps) != len(other.steps):
        return False
    return all(
        _samples(mine) == _samples(theirs)
        and all(_equal(getattr(mine, part), getattr(theirs, part)) for part in ("before", "gradients", "after"))
        for mine, theirs in zip(one.steps, other.steps, strict=True)
    )


def _samples(step: Step) -> list[list[int]]:
    return [sorted(micro.samples) for micro in step.micro_batches]


def _equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        isinstance(one[name], Tensor) and one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
        for name in one
    )


def expectations(data: bytes) -> None:
    """Read a file of expectations."""
    (folder() / "expectations").mkdir(exist_ok=True)
    (folder() / "expectations" / "torch.toml").write_bytes(data)
    read_expectations(folder() / "expectations")


ENTRY = b"""measured = "torch 2.13.0"
[[expected]]
check = ["gradients", "update"]
cell = { workload = "mlp*", backend = ["ddp"], topology = "1x3", precision = "32" }
outcome = "failed"
reason = "because"
"""

TARGETS = {
    "gpus": Target(lambda data: parse_gpus(text(data), 8), lambda: [b"0, 1", b"-1", b"3,"], (MisconfigurationError,)),
    "hosts": Target(
        lambda data: expand_hosts(text(data)), lambda: [b"node[1-3,07],b4", b"a[1-2]b[3]"], (MisconfigurationError,)
    ),
    "subject": Target(lambda data: parse_subject(text(data)), lambda: [b"my.py::a;python=/bin/sh", b"torch"]),
    "names": Target(names, lambda: [b"ddp,dp;32,16;mlp,uneven"]),
    "results": Target(results, lambda: [a_run()]),
    "trace": Target(trace, lambda: list(a_trace())),
    "expectations": Target(expectations, lambda: [ENTRY]),
}
