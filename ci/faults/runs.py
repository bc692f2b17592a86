"""Faults around a whole run: what stands in its way, who kills it, who runs beside it. Each is a real pytest."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.cells import SUBJECTS
from faults.fault import Fault, ImpossibleHereError, Shot
from faults.mounts import mounted

SUITES = Path(__file__).resolve().parents[2] / "suites"
CELLS = (
    "--gpus",
    "2",
    "--workloads",
    "mlp,linear-exact",
    "--precisions",
    "32",
    "--subject",
    "torch",
    "--backends",
    "none,ddp",
)
PATIENCE = 600.0
"""Seconds for a whole pytest, also on a machine that has other things to do."""

AT_ONCE = 20.0
"""Seconds that count as at once, as opposed to a cell's time limit of 120."""

_SHOWN = re.compile(r"test_cell\[([^\]]+)\] (PASSED|DEVIATES|FAILED|ERRORED|CRASHED|TIMED_OUT)")


@dataclass(frozen=True)
class Said:
    """How a pytest ended, and what it printed."""

    code: int
    text: str

    @property
    def shown(self) -> set[str]:
        """The ids of the cells whose verdict it showed."""
        return {cell for cell, _ in _SHOWN.findall(self.text)}


class Project:
    """A folder with the suites in it, where pytest is run as a user runs it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        shutil.copytree(SUITES, folder / "suites", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib --strict-markers\n")
        self.reports = folder / "reports"

    def begin(self, *arguments: str, under: Sequence[str] = (), **environment: str) -> subprocess.Popen[bytes]:
        """Begin a pytest, in a session of its own; ``under`` is a command that runs it."""
        command = [*under, sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "suites/", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
        )

    def pytest(self, *arguments: str, under: Sequence[str] = (), **environment: str) -> Said:
        """Run one to its end."""
        return ended(self.begin(*arguments, under=under, **environment))

    def run(self, name: str = "latest") -> list[dict[str, Any]]:
        """The whole lines of a run's results; one that was torn off at the end is left out."""
        text = (self.reports / name / "results.jsonl").read_bytes()
        return [json.loads(line) for line in text.split(b"\n")[:-1] if line]


def ended(process: subprocess.Popen[bytes], patience: float = PATIENCE) -> Said:
    """Wait for a pytest's end."""
    try:
        text, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        return Said(-999, text.decode(errors="replace") + "\nno end was seen")
    return Said(process.returncode, text.decode(errors="replace"))


def cells_of(records: Sequence[dict[str, Any]]) -> set[str]:
    """The ids of the cells that have a result."""
    return {record["cell"] for record in records if record["type"] == "result"}


def sentence(said: Said, *words: str, code: int | None = None) -> Shot:
    """Ask for words, in a run that ends of itself and shows no traceback of ours."""
    missing = [word for word in words if not re.search(word, said.text)]
    wrong = [f"no word of {missing}"] if missing else []
    wrong += ["a traceback"] if "INTERNALERROR" in said.text or "Traceback (most recent call last)" in said.text else []
    wrong += [f"exit code {said.code}"] if code is not None and said.code != code else []
    return Shot(not wrong, f"{', '.join(wrong)}: …{said.text[-900:]}" if wrong else words[0])


def read_only(bench: Any, folder: Path) -> Shot:
    """The report directory cannot be written to."""
    project = Project(folder)
    project.reports.mkdir()
    with mounted(project.reports, "size=1m", read_only=True):
        said = project.pytest(*CELLS)
        shot = sentence(said, "[Rr]ead-only.*--report-dir", code=4)
        left = os.listdir(project.reports)
    return shot if not left else Shot(False, f"half-written: {left}")


def full_disk(bench: Any, folder: Path) -> Shot:
    """The disk of the report directory is full after some lines."""
    project = Project(folder)
    project.reports.mkdir()
    with mounted(project.reports, "size=20k"):
        said = project.pytest(*CELLS)
        shot = sentence(said, "No space left.*make room.*--report-dir")
        run = project.run()
    unknown = cells_of(run) - {cell["cell"] for cell in run[0]["planned"]}
    return shot if not unknown else Shot(False, f"cells that were not planned: {unknown}")


def full_temporary(bench: Any, folder: Path) -> Shot:
    """There is no room for evidence."""
    project = Project(folder)
    small = folder / "small"
    small.mkdir()
    with mounted(small, "size=24k"):
        said = project.pytest(*CELLS, TMPDIR=str(small))
        shot = sentence(said, "No space left", "TMPDIR", code=1)
        passed = [
            r for r in project.run() if r["type"] == "result" and r["outcome"] == "passed" and "linear" not in r["cell"]
        ]
        left = [name for name in os.listdir(small) if not name.endswith(".lock")]  # empty, and there for everybody
    if passed:
        return Shot(False, f"passed without evidence: {passed[0]['cell']}")
    return shot if not left else Shot(False, f"left: {left}")


def full_shared_memory(bench: Any, folder: Path) -> Shot:
    """There is no room in /dev/shm, and a subject's workers need some."""
    project = Project(folder)
    with mounted(Path("/dev/shm"), "size=4k"):
        said = project.pytest(
            "--gpus", "1", "--workloads", "mlp", "--precisions", "32", "--subject", f"{SUBJECTS / 'starving.py'}"
        )
    return sentence(said, "/dev/shm", code=1)


def ipv6_only(bench: Any, folder: Path) -> Shot:
    """The loopback has no IPv4 address."""
    if os.geteuid() or not shutil.which("ip"):
        raise ImpossibleHereError("a network of its own needs root and iproute2")
    under = ["unshare", "-n", "sh", "-c", 'ip link set lo up; ip addr del 127.0.0.1/8 dev lo; exec "$@"', "sh"]
    said = Project(folder).pytest(*CELLS, under=under)
    shot = sentence(said, r"\d+ passed", code=0)
    return shot if shot.right else sentence(said, "127.0.0.1", code=4)


def no_loopback(bench: Any, folder: Path) -> Shot:
    """The loopback is down."""
    if os.geteuid():
        raise ImpossibleHereError("a network of its own needs root")
    said = Project(folder).pytest(*CELLS, under=["unshare", "-n"])
    return sentence(said, "loopback", code=1)


def port_in_use(bench: Any, folder: Path) -> Shot:
    """The machine's MASTER_PORT is in use, and the subject's environment names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = Project(folder).pytest(
            *CELLS, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]), RANK="3"
        )
    return sentence(said, r"\d+ passed", code=0)


def subjects_port_in_use(bench: Any, folder: Path) -> Shot:
    """A subject insists on a port that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = Project(folder).pytest(
            "--gpus", "2", "--workloads", "mlp", "--precisions", "32", "--backends", "ddp",
            "--subject", str(SUBJECTS / "insisting.py"), PLUMBLINE_FAULTS_PORT=str(taken.getsockname()[1]),
        )  # fmt: skip
    return sentence(said, "address already in use|EADDRINUSE", code=1)


def server_killed(bench: Any, folder: Path) -> Shot:
    """A rank kills the fork server: the cell is tried again, and the report says so; the next cells are trained."""
    project = Project(folder)
    said = project.pytest(
        "--gpus", "2", "--workloads", "mlp", "--precisions", "32",
        "--subject", f"{SUBJECTS / 'dying.py'}::kills-the-server", "--subject", f"{SUBJECTS / 'dying.py'}::trains",
    )  # fmt: skip
    shot = sentence(said, "tried twice: the fork server of .* died", code=1)
    bad = {
        r["cell"]
        for r in project.run()
        if r["type"] == "result" and "trains-" in r["cell"] and r["outcome"] != "passed"
    }
    bad -= {cell for cell in bad if "-dp-" in cell}
    return shot if not bad else Shot(False, f"others suffered: {bad}")


def server_killed_once(bench: Any, folder: Path) -> Shot:
    """Somebody kills the fork server, once: the cell is tried again, passes, and the report says so."""
    project = Project(folder)
    said = project.pytest(
        "--gpus", "2", "--workloads", "mlp", "--precisions", "32", "--backends", "ddp",
        "--subject", f"{SUBJECTS / 'dying.py'}::kills-the-server-once", PLUMBLINE_FAULTS_ONCE=str(folder / "once"),
    )  # fmt: skip
    told = [
        r for r in project.run() if r["type"] == "result" and "tried again, because the fork server" in r["message"]
    ]
    return (
        sentence(said, "2 passed", code=0) if told else Shot(False, f"the report does not say so: {said.text[-500:]}")
    )


def interrupted(bench: Any, folder: Path) -> Shot:
    """Ctrl-C in the middle: a clean end with a partial report."""
    project = Project(folder)
    process = project.begin(*CELLS)
    text = _until_shown(process, 2)
    os.killpg(process.pid, signal.SIGINT)
    said = ended(process, 30)
    said = Said(said.code, text + said.text)
    shot = sentence(said, "KeyboardInterrupt", "incomplete|not tried|missing", code=2)
    missing = said.shown - cells_of(project.run())
    table = (project.reports / "latest" / "support.md").is_file()
    return shot if not missing and table else Shot(False, f"shown and not there: {missing}; a table: {table}")


def interrupted_twice(bench: Any, folder: Path) -> Shot:
    """Ctrl-C, and again at once: an end within seconds."""
    project = Project(folder)
    process = project.begin(
        "--subject", str(SUBJECTS / "hanging.py"), "--gpus", "2", "--workloads", "mlp", "--precisions", "32"
    )
    _until(process, "collected")
    time.sleep(1.0)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    said = ended(process, 30)
    took = time.monotonic() - began
    return Shot(
        said.code != -999 and took < AT_ONCE,
        f"ended with exit code {said.code} after {took:.1f} s: {said.text[-300:] if took >= AT_ONCE else ''}",
    )


def killed(bench: Any, folder: Path) -> Shot:
    """The parent is killed at a random moment; then --resume goes on, and everything that was shown is there."""
    project = Project(folder)
    process = project.begin(*CELLS)
    draw = random.SystemRandom()
    text = _until(process, "collected") if draw.random() < 0.9 else ""
    time.sleep(draw.uniform(0.0, 3.0))
    process.kill()
    said = ended(process)
    said = Said(said.code, text + said.text)
    begun = (project.reports / "latest" / "results.jsonl").is_file()
    before = project.run() if begun else []
    missing = said.shown - cells_of(before)
    if missing:
        return Shot(False, f"shown and not there: {missing}")
    resumed = project.pytest(*CELLS, *(["--resume"] if begun and before and before[-1]["type"] != "footer" else []))
    after = project.run()
    lost = [
        record
        for record in before
        if record["type"] == "result" and record["cell"] in said.shown and record not in after
    ]
    if resumed.code != 0 or after[-1]["type"] != "footer" or lost:
        return Shot(False, f"resumed with {resumed.code}, lost {lost[:1]}: {resumed.text[-600:]}")
    if {cell["cell"] for cell in after[0]["planned"]} != cells_of(after):
        return Shot(False, "the resumed run is not whole")
    return Shot(True, f"{len(cells_of(before))} cells were there")


def powerless(bench: Any, folder: Path) -> Shot:
    """The machine loses its power: the results end anywhere, even in the middle of a sign; --resume goes on."""
    project = Project(folder)
    whole = bench.whole_run(project)
    file = project.reports / "latest" / "results.jsonl"
    first = whole.index(b"\n") + 1
    cut = random.SystemRandom().randrange(first, len(whole))
    file.write_bytes(whole[:cut])
    before = project.run()
    resumed = project.pytest(*CELLS, "--resume")
    after = project.run()
    lost = [r for r in before[:-1] if r["type"] == "result" and r["cell"] != before[-1].get("cell") and r not in after]
    good = resumed.code == 0 and after[-1]["type"] == "footer" and not lost
    return Shot(good, "goes on" if good else f"cut at {cut}, lost {lost[:1]}: {resumed.text[-600:]}")


def two_at_once(bench: Any, folder: Path) -> Shot:
    """Two runs at once, into the same report directory."""
    project = Project(folder)
    both = [project.begin(*CELLS), project.begin(*CELLS)]
    said = [ended(process) for process in both]
    runs = [path.name for path in project.reports.iterdir() if path.is_dir() and not path.is_symlink()]
    whole = [project.run(name) for name in runs]
    good = len(runs) == 2 and all(one.code == 0 for one in said) and all(run[-1]["type"] == "footer" for run in whole)
    good = good and all({cell["cell"] for cell in run[0]["planned"]} == cells_of(run) for run in whole)
    return Shot(good, "both are whole" if good else "\n".join(one.text[-400:] for one in said))


def xdist(bench: Any, folder: Path) -> Shot:
    """Four workers."""
    project = Project(folder)
    said = project.pytest(*CELLS, "-n", "4")
    run = project.run()
    good = said.code == 0 and run[-1]["type"] == "footer" and {c["cell"] for c in run[0]["planned"]} == cells_of(run)
    return Shot(good, "whole" if good else said.text[-600:])


def keeps_secrets(bench: Any, folder: Path) -> Shot:
    """What stands in the environment does not reach the report."""
    project = Project(folder)
    secret = "hunter2-" + os.urandom(8).hex()
    said = project.pytest(
        "--gpus", "1", "--workloads", "mlp", "--precisions", "32", "--keep-traces", AWS_SECRET_ACCESS_KEY=secret
    )
    found = [
        str(file) for file in project.reports.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()
    ]
    return Shot(said.code == 0 and not found, f"in {found}" if found else f"exit code {said.code}")


def selections(bench: Any, folder: Path) -> Shot:
    """-x, --lf and -k mean what they mean, with a subject that raises."""
    project = Project(folder)
    asked = (
        "--gpus",
        "2",
        "--workloads",
        "mlp",
        "--precisions",
        "32",
        "--subject",
        f"{SUBJECTS / 'raising.py'}::raises",
    )
    asked += ("-p", "cacheprovider")
    first = project.pytest(*asked, "-x")
    again = project.pytest(*asked, "--lf")
    chosen = project.pytest(*asked, "-k", "ddp and not ddp2")
    shown = (len(first.shown), again.shown == first.shown, all("-ddp-" in cell for cell in chosen.shown))
    return Shot(shown == (1, True, True) and bool(chosen.shown), str(shown))


def _until(process: subprocess.Popen[bytes], words: str) -> str:
    return _until_shown(process, 1, words)


def _until_shown(process: subprocess.Popen[bytes], times: int, words: str = "PASSED") -> str:
    """Read until some words were printed so often, or all is over; return what was read."""
    assert process.stdout is not None
    text = ""
    while text.count(words) < times:
        chunk = os.read(process.stdout.fileno(), 1 << 16).decode(errors="replace")
        if not chunk:
            break
        text += chunk
    return text


def fault(row: int, inject: Any, must: str) -> Fault:
    """Return a run's fault, named like its function."""
    return Fault(inject.__name__.replace("_", "-"), row, must, inject)


OF_RUNS = [
    fault(2, server_killed, "errored, tried twice, why; the next cells are trained"),
    fault(2, server_killed_once, "tried again, passed, and the report says why"),
    fault(7, read_only, "a sentence with --report-dir, exit code 4, nothing half-written"),
    fault(7, full_disk, "a sentence with --report-dir, no traceback, what is there can be read"),
    fault(7, full_temporary, "errored, «No space left», TMPDIR; nothing passes, nothing stays"),
    fault(7, full_shared_memory, "a word of /dev/shm"),
    fault(7, ipv6_only, "another address, or a sentence"),
    fault(7, no_loopback, "a sentence about the loopback"),
    fault(7, port_in_use, "another port: passed"),
    fault(7, subjects_port_in_use, "«address already in use»"),
    fault(8, killed, "--resume goes on, nothing that was shown is lost"),
    fault(8, powerless, "--resume goes on, a torn last line is recognised"),
    fault(9, interrupted, "exit code 2, partial report, nothing that was shown is lost"),
    fault(9, interrupted_twice, f"an end within {AT_ONCE:.0f} s"),
    fault(11, two_at_once, "both whole"),
    fault(11, xdist, "whole"),
    fault(13, keeps_secrets, "the secret is in no file"),
    fault(13, selections, "-x, --lf, -k as always"),
]
