"""``plumbline doctor``: all probes run on this machine, and problems come with advice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import plumbline.machine.doctor.probes
from plumbline.cli.main import main
from plumbline.machine.doctor import installations as gpu_probes
from plumbline.machine.doctor import probes as limits
from plumbline.machine.doctor.installations import ProbeResult, ranks
from plumbline.machine.doctor.probes import probes, run_probes

SPINNING = """
import time
while time.process_time() < {seconds}:
    pass
"""

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces doctor's probes: ``asked(name=lines)``."""

    def ask(**lines: list[ProbeResult]) -> None:
        answers = {name: (lambda found=found: iter(found)) for name, found in lines.items()}
        monkeypatch.setattr(plumbline.machine.doctor.probes, "probes", lambda report_dir: answers)

    return ask


def test_this_machine_is_asked_everything(tmp_path: Path) -> None:
    """Every probe answers here, except the one that trains, which the next test runs without a limit."""
    asked = probes(tmp_path)
    del asked["ranks"]
    answered = list(run_probes(asked))
    assert {name for name, _ in answered} == set(asked)
    assert not [line.found for _, line in answered if "the probe failed" in line.found]


def test_two_ranks_train_together(one_thread: None) -> None:
    first, gloo, *_ = list(ranks())
    assert first.found.startswith("the fork server started in ")
    assert first.advice is None
    assert gloo.advice is None
    assert gloo.found.startswith("two ranks trained together over gloo in ")


def test_all_is_well(asked: Callable[..., None], capsys: pytest.CaptureFixture) -> None:
    asked(python=[ProbeResult("3.11")], links=[ProbeResult("none"), ProbeResult("at all")])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok python: 3.11\nok links: none\nok links: at all\nThis machine is ready.\n"


def test_trouble_comes_with_what_to_do(asked: Callable[..., None], capsys: pytest.CaptureFixture) -> None:
    asked(python=[ProbeResult("3.11")], disk=[ProbeResult("full\x1b[31m\nto the brim", "make room")])
    assert main(["doctor"]) == 1
    assert (
        capsys.readouterr().out
        == "ok python: 3.11\n!! disk: full to the brim; make room\nFix 1 problem first (lines marked !!).\n"
    )


def test_answers_are_printed_for_programs(asked: Callable[..., None], capsys: pytest.CaptureFixture) -> None:
    asked(a=[ProbeResult("well")], b=[ProbeResult("busy", "wait", is_note=True)])
    assert main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ready"]
    answers = [(one["probe"], one["state"], one["advice"]) for one in printed["answers"]]
    assert answers == [("a", "ok", None), ("b", "note", "wait")]
    asked(disk=[ProbeResult("full", "make room")])
    assert main(["doctor", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ready"]


def test_a_question_that_raises_hides_no_other() -> None:
    def broken() -> Iterator[ProbeResult]:
        yield ProbeResult("so far so good")
        raise RuntimeError("gone")

    answered = list(run_probes({"broken": broken, "sound": lambda: iter([ProbeResult("well")])}))
    assert answered[0] == ("broken", ProbeResult("so far so good"))
    assert "RuntimeError: gone" in answered[1][1].found
    assert answered[1][1].advice is not None
    assert answered[2] == ("sound", ProbeResult("well"))


def test_a_question_that_hangs_is_not_waited_for() -> None:
    forever = threading.Event()

    def hanging() -> Iterator[ProbeResult]:
        yield ProbeResult("begun")
        forever.wait()

    try:
        answered = list(run_probes({"hanging": hanging, "sound": lambda: iter([ProbeResult("well")])}, quiet=0.5))
    finally:
        forever.set()
    assert answered[0] == ("hanging", ProbeResult("begun"))
    assert "no CPU time used" in answered[1][1].found
    assert "hangs" in (answered[1][1].advice or "")
    assert ("sound", ProbeResult("well")) in answered


def test_a_question_that_computes_is_waited_for() -> None:
    """However slow it is, because a busy machine may leave little CPU time to a rank or an import."""

    def slow() -> Iterator[ProbeResult]:
        subprocess.run([sys.executable, "-I", "-S", "-c", SPINNING.format(seconds=5)], check=True)
        yield ProbeResult("done")

    assert list(run_probes({"slow": slow}, quiet=3)) == [("slow", ProbeResult("done"))]


def test_nothing_is_waited_for_for_ever() -> None:
    def spinning() -> Iterator[ProbeResult]:
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", SPINNING.format(seconds=1000)]) as child:
            try:
                ended.wait()
            finally:
                child.kill()
        yield ProbeResult("done")

    ended = threading.Event()
    try:
        ((name, line),) = list(run_probes({"spinning": spinning}, longest=1))
    finally:
        ended.set()
    assert name == "spinning"
    assert line.found == "no answer within 1 s"
    assert line.advice


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a core that is shared for certain")
def test_a_busy_machine_is_measured_and_is_no_trouble() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    command = [sys.executable, "-I", "-S", "-c", SPINNING.format(seconds=1000)]
    others = [subprocess.Popen(command) for _ in range(3)]
    try:
        busy = limits.load()
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()
    assert busy.is_note
    assert "the machine is busy" in (busy.advice or "")
    assert "× their CPU time" in busy.found


def test_a_note_is_no_trouble(asked: Callable[..., None], capsys: pytest.CaptureFixture) -> None:
    asked(load=[ProbeResult("a lot", "the machine is busy", is_note=True)], links=[ProbeResult("none")])
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    summary = "This machine is ready. 1 note (lines marked ~~)."
    assert said == f"~~ load: a lot; the machine is busy\nok links: none\n{summary}\n"


def test_links_are_read_off_the_matrix() -> None:
    assert gpu_probes.link_kinds(TOPOLOGY) == {"NV18": 1, "SYS": 2}
    assert gpu_probes.link_kinds("nonsense") == {}
    assert gpu_probes.link_kinds("") == {}


class FakeCuda:
    """The parts of ``torch.cuda`` that probes of a machine with GPUs use."""

    def __init__(self, count: int, apart: tuple[tuple[int, int], ...] = ()) -> None:
        self._count, self._apart = count, apart

    def device_count(self) -> int:
        return self._count

    def can_device_access_peer(self, first: int, second: int) -> bool:
        return (first, second) not in self._apart


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that torch sees ``count`` GPUs, and that nvidia-smi prints these rows."""
    import torch

    def pretend(
        seen: int, rows: list[list[str]], apart: tuple[tuple[int, int], ...] = (), cuda: str | None = "12.8"
    ) -> None:
        monkeypatch.setattr(torch, "cuda", FakeCuda(seen, apart))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(gpu_probes, "gpu_rows", lambda *names: rows)
        monkeypatch.setattr(gpu_probes, "command_output", lambda *command: TOPOLOGY)

    return pretend


H200 = ["NVIDIA H200", "143771", "Default"]


def test_gpus_are_named(gpus: Callable[..., None]) -> None:
    gpus(3, [H200] * 3)
    assert [line.found for line in gpu_probes.devices()] == ["3 × NVIDIA H200, 143771 MiB, compute mode Default"]
    kinds, reach = gpu_probes.links()
    assert kinds.found == "NV18 between 1 pair, SYS between 2 pairs"
    assert reach == ProbeResult("all 3 devices have peer access to each other")


@pytest.mark.parametrize(
    ("seen", "rows", "cuda", "word"),
    [
        (1, [["A", "1", "Exclusive_Process"]], "12.8", "nvidia-smi -c 0"),
        (1, [["A", "1", "Prohibited"]], "12.8", "nvidia-smi -c 0"),
        (0, [H200], "12.8", "CUDA_VISIBLE_DEVICES"),
        (0, [H200], None, "install a CUDA build"),
    ],
)
def test_gpus_that_cannot_be_used_come_with_advice(
    gpus: Callable[..., None], seen: int, rows: list[list[str]], cuda: str | None, word: str
) -> None:
    gpus(seen, rows, cuda=cuda)
    assert any(word in (line.advice or "") for line in gpu_probes.devices())


def test_no_gpu_is_well(gpus: Callable[..., None]) -> None:
    gpus(0, [], cuda=None)
    (line,) = gpu_probes.devices()
    assert line.advice is None
    assert "simulated" in line.found


def test_pairs_that_do_not_reach_each_other_are_named(gpus: Callable[..., None]) -> None:
    gpus(3, [H200] * 3, apart=((0, 2),))
    *_, line = gpu_probes.links()
    assert "0 and 2" in line.found
    assert "NCCL_P2P_DISABLE" in (line.advice or "")


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("total", "free", "word"),
    [(64 << 20, 60 << 20, "--shm-size"), (8 << 30, 1 << 20, "nearly full"), (8 << 30, 8 << 30, None)],
)
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, total: int, free: int, word: str | None) -> None:
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda place: Usage(total, total - free, free))
    (line,) = limits.shared_memory()
    assert (line.advice is None) == (word is None)
    assert word is None or word in (line.advice or "")


def test_few_files_and_processes_come_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (100, 100))
    files, processes, _ = limits.limits()
    assert files.advice == "ulimit -n 1024"
    assert "ulimit -u 1024" in (processes.advice or "")


def test_no_limit_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (limits.resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(limits, "cgroup_number", lambda name: None)
    assert [line.advice for line in limits.limits()] == [None, None, None]


def test_a_report_directory_that_is_yet_to_be_made_is_well(tmp_path: Path) -> None:
    (line,) = limits.disk(tmp_path / "not" / "yet")
    assert line.advice is None
    assert str(tmp_path) in line.found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_report_directory_that_is_not_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    (line,) = limits.disk(tmp_path)
    assert "--report-dir" in (line.advice or "")


def test_a_file_in_the_place_of_the_report_directory(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("")
    (line,) = limits.disk(tmp_path / "reports")
    assert "--report-dir" in (line.advice or "")
