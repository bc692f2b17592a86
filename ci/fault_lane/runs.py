"""Faults around a whole run: obstacles, and other runs at the same time. Each runs a real pytest."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

from fault_lane.cells import SUBJECTS
from fault_lane.fault import ImpossibleHereError, Shot
from fault_lane.mounts import mounted
from fault_lane.project import CELLS, Project, cells_of, ended, fault, sentence


def read_only(bench: Any, folder: Path) -> Shot:
    """The report directory is read-only."""
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
        shot = sentence(said, "No space left.*free disk space.*--report-dir")
        run = project.run()
    unknown = cells_of(run) - {cell["cell"] for cell in run[0]["planned"]}
    return shot if not unknown else Shot(False, f"cells that were not planned: {unknown}")


def full_temporary(bench: Any, folder: Path) -> Shot:
    """The temporary directory has no space for evidence."""
    project = Project(folder)
    small = folder / "small"
    small.mkdir()
    with mounted(small, "size=24k"):
        said = project.pytest(*CELLS, TMPDIR=str(small))
        shot = sentence(said, "No space left", "TMPDIR", code=1)
        passed = [
            r for r in project.run() if r["type"] == "result" and r["outcome"] == "passed" and "linear" not in r["cell"]
        ]
        left = [name for name in os.listdir(small) if not name.endswith(".lock")]  # empty, and writable for all
    if passed:
        return Shot(False, f"passed without evidence: {passed[0]['cell']}")
    return shot if not left else Shot(False, f"left: {left}")


def full_shared_memory(bench: Any, folder: Path) -> Shot:
    """/dev/shm is full, and a subject's workers need some of it."""
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
    """MASTER_PORT from the environment is in use."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = Project(folder).pytest(
            *CELLS, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]), RANK="3"
        )
    return sentence(said, r"\d+ passed", code=0)


def subjects_port_in_use(bench: Any, folder: Path) -> Shot:
    """A subject insists on a port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = Project(folder).pytest(
            "--gpus", "2", "--workloads", "mlp", "--precisions", "32", "--backends", "ddp",
            "--subject", str(SUBJECTS / "insisting.py"), PLUMBLINE_FAULTS_PORT=str(taken.getsockname()[1]),
        )  # fmt: skip
    return sentence(said, "address already in use|EADDRINUSE", code=1)


def two_at_once(bench: Any, folder: Path) -> Shot:
    """Two runs at the same time, into the same report directory."""
    project = Project(folder)
    both = [project.begin(*CELLS), project.begin(*CELLS)]
    said = [ended(process) for process in both]
    runs = [path.name for path in project.reports.iterdir() if path.is_dir() and not path.is_symlink()]
    whole = [project.run(name) for name in runs]
    good = len(runs) == 2 and all(one.code == 0 for one in said) and all(run[-1]["type"] == "footer" for run in whole)
    good = good and all({cell["cell"] for cell in run[0]["planned"]} == cells_of(run) for run in whole)
    return Shot(good, "both are whole" if good else "\n".join(one.text[-400:] for one in said))


def xdist(bench: Any, folder: Path) -> Shot:
    """Four xdist workers."""
    project = Project(folder)
    said = project.pytest(*CELLS, "-n", "4")
    run = project.run()
    good = said.code == 0 and run[-1]["type"] == "footer" and {c["cell"] for c in run[0]["planned"]} == cells_of(run)
    return Shot(good, "whole" if good else said.text[-600:])


def keeps_secrets(bench: Any, folder: Path) -> Shot:
    """Environment variables do not get into the report."""
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
    """-x, --lf and -k work as usual, with a subject that raises."""
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
        "-p",
        "cacheprovider",
    )
    first = project.pytest(*asked, "-x")
    again = project.pytest(*asked, "--lf")
    chosen = project.pytest(*asked, "-k", "ddp and not ddp2")
    shown = (len(first.shown), again.shown == first.shown, all("-ddp-" in cell for cell in chosen.shown))
    return Shot(shown == (1, True, True) and bool(chosen.shown), str(shown))


OF_MACHINES = [
    fault(7, read_only, "a message that names --report-dir, exit code 4, nothing half-written"),
    fault(7, full_disk, "a message that names --report-dir, no traceback, existing results are readable"),
    fault(7, full_temporary, "errored, «No space left», TMPDIR; nothing passes, nothing is left"),
    fault(7, full_shared_memory, "a message that names /dev/shm"),
    fault(7, ipv6_only, "another address, or a message"),
    fault(7, no_loopback, "a message about the loopback"),
    fault(7, port_in_use, "another port: passed"),
    fault(7, subjects_port_in_use, "«address already in use»"),
    fault(11, two_at_once, "two complete runs"),
    fault(11, xdist, "a complete run"),
    fault(13, keeps_secrets, "the secret is in no file"),
    fault(13, selections, "-x, --lf and -k work as usual"),
]
