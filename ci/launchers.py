"""Compares launchers on the same cells: verdicts must be equal. Also measures times, and takes nodes away.

    python ci/launchers.py                             # verdicts and times, two nodes of two devices
    python ci/launchers.py --only ray --lose 20        # a node of Ray is killed twenty times in the middle of a cell
    python ci/launchers.py --nodes 4 --gpus 1
    python ci/launchers.py --suite                     # the smoke and all `ddp` cells of the suite, by each launcher

Every node is this machine: torchrun does this by itself, hosts uses a command that leads back here, Ray one raylet per
node, and SLURM one slurmd per node, in an allocation that all launchers then use. Launchers take turns, so other work
on the machine affects all of them. Times are medians over the rounds, and ratios are relative to `local` in the same
run. A node is lost when its raylet is killed, or for other launchers its server. The cell must then end with an error
that names the node, the next pool must pass the same cell, and nothing may be left behind. Exits with 1 if anything is
wrong, and with 3 if SLURM is selected but not available. Linux only.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from fault_lane.cells import SUBJECTS
from fault_lane.left import MARK, SETTLING, Present
from ray_cluster import RayCluster, is_actor

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError
from plumbline.core.topology import Topology
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, launch, start
from plumbline.launch.launchers import find_launcher
from plumbline.launch.pool import Launcher, LauncherOptions, Pool
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.results.run import read_run
from plumbline.worker.processes import adopt, end_all
from plumbline.workloads import WORKLOADS

LAUNCHERS = ("local", "torchrun", "hosts", "ray", "slurm")
NODE_COMMAND = "env PLUMBLINE_NODE_NAME=host-{node}"
HERE = "127.0.0.1"
WAITING = str(SUBJECTS / "waiting.py")
FOLDER = "PLUMBLINE_FAULTS_FOLDER"
SLURM_CLUSTER = Path(__file__).with_name("slurm_cluster.sh")
LIMIT = Settings(600.0)
REFERENCE = (("mlp", "ddp"), ("mlp", "ddp2"), ("contrastive", "ddp2"))
"""The compared cells of the reference trainer: workload and backend."""
SUITE = (("-m", "smoke"), ("--backends", "ddp"))
"""Selections of the conformance suite for ``--suite``, one run each."""
NOTHING_SELECTED = 5
"""The exit code of pytest if no cell was selected."""

Verdict = dict[str, tuple[str, str | None]]
"""The outcome and the cause of each check."""


class Comparison:
    """The launchers by name, for the nodes and devices of ``topology``; all use the folder ``temporary``."""

    def __init__(self, names: Sequence[str], topology: Topology, temporary: Path, cluster: RayCluster | None) -> None:
        self._topology = topology
        self._temporary = temporary
        self._cluster = cluster
        asked = LauncherOptions(topology.num_nodes, topology.gpus)
        own = {"hosts": replace(asked, node_command=NODE_COMMAND, listen=HERE)}
        self.launchers: dict[str, Launcher] = {name: find_launcher(name, own.get(name, asked)) for name in names}

    def verdict(self, pool: Pool, workload: str, backend: str) -> tuple[Verdict, float]:
        """Train and judge a cell of the reference; return its verdict, and the seconds from launch to trace."""
        cell = Cell("reference", workload, backend, self._topology, "32", "cpu")
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            trace = launch(pool, cell, Path(folder), LIMIT)
            seconds = time.monotonic() - started
            found = judge(TraceAnalysis(trace, WORKLOADS[workload], cell))
        return {one.check: (one.outcome.value, one.cause) for one in found}, seconds

    def compare(self, rounds: int) -> bool:
        """Print verdicts and times side by side; return whether all verdicts are equal."""
        warm: dict[str, float] = {}
        seconds: dict[tuple[str, tuple[str, str]], list[float]] = {}
        verdicts: dict[tuple[str, tuple[str, str]], list[Verdict]] = {}
        with ExitStack() as open_pools:
            pools = {}
            for name, launcher in self.launchers.items():
                started = time.monotonic()
                pools[name] = open_pools.enter_context(closing(launcher.pool("reference", None)))
                assert pools[name].subjects
                warm[name] = time.monotonic() - started
            for turn in range(rounds + 1):
                for key in ((name, one) for one in REFERENCE for name in pools):
                    verdict, took = self.verdict(pools[key[0]], *key[1])
                    verdicts.setdefault(key, []).append(verdict)
                    if turn:  # a pool's first cell warms it up
                        seconds.setdefault(key, []).append(took)
        print("| launcher | warm after, s |", *(f"{w} {b}, s (ratio) |" for w, b in REFERENCE))
        print("|---|--:|" + "--:|" * len(REFERENCE))
        first = next(iter(self.launchers))
        same = True
        for name in self.launchers:
            columns = []
            for one in REFERENCE:
                median, base = (statistics.median(seconds[who, one]) for who in (name, first))
                columns.append(f"{median:.2f} ({median / base:.2f})")
                same &= all(verdict == verdicts[first, one][0] for verdict in verdicts[name, one])
            print(f"| {name} | {warm[name]:.1f} |", " | ".join(columns), "|")
        print(f"verdicts {'are the same' if same else 'DIFFER'} over {(rounds + 1) * len(REFERENCE)} cells a launcher")
        return same

    def run_suite(self) -> bool:
        """Run the cells of ``SUITE`` with each launcher as a user does; return whether all verdicts are equal."""
        first = next(iter(self.launchers))
        same = True
        print("| cells | launcher | cells | passed | wall time, s | verdicts that differ from", first, "|")
        print("|---|---|--:|--:|--:|---|")
        for words in SUITE:
            verdicts: dict[str, dict[tuple[object, str], tuple[str, str | None]]] = {}
            for name in self.launchers:
                started = time.monotonic()
                verdicts[name] = self._suite_verdicts(name, words)
                seconds = time.monotonic() - started
                cells = {cell for cell, _ in verdicts[name]}
                passed = cells - {cell for (cell, _), (outcome, _) in verdicts[name].items() if outcome != "passed"}
                other = {
                    cell
                    for cell, check in verdicts[name].keys() | verdicts[first].keys()
                    if verdicts[name].get((cell, check)) != verdicts[first].get((cell, check))
                }
                same &= not other
                told = ", ".join(sorted(map(str, other))) or "none"
                print(
                    f"| `{' '.join(words)}` | {name} | {len(cells)} | {len(passed)} | {seconds:.0f} | {told} |",
                    flush=True,
                )
        return same

    def _suite_verdicts(self, name: str, words: Sequence[str]) -> dict[tuple[object, str], tuple[str, str | None]]:
        """Run cells of the suite with a launcher; return outcome and cause by cell and check."""
        own = {"hosts": ("--node-command", NODE_COMMAND, "--listen", HERE)}
        command = [str(Path(sys.executable).with_name("plumbline")), "run", "conformance", "--subject", "reference"]
        command += ["--nodes", str(self._topology.num_nodes), "--gpus", str(self._topology.gpus)]
        command += ["--launcher", name, *own.get(name, ()), *words, "--accelerator", "cpu", "-q"]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([*command, "--report-dir", folder], capture_output=True, text=True, check=False)
            if done.returncode == NOTHING_SELECTED:
                return {}
            if done.returncode not in (0, 1):
                raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            run = read_run(Path(folder, "latest"))
        return {(one.coordinates, one.check): (one.outcome.value, one.cause) for one in run.results}

    def lose_nodes(self, name: str, times: int) -> bool:
        """Repeatedly take a node away in the middle of a cell; return whether the result was right each time."""
        wrong = []
        for number in range(times):
            before = self._present()
            started = time.monotonic()
            shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
            Path(os.environ[FOLDER]).mkdir()
            seen = self._lose_one(name)
            if left := self._left(before):
                seen.append(f"left: {left}")
            said = "; ".join(seen) or "named, the next cell passed, nothing left behind"
            print(f"{name} {number + 1}/{times}: {said} ({time.monotonic() - started:.1f} s)", flush=True)
            wrong += seen
        return not wrong

    def _lose_one(self, name: str) -> list[str]:
        """Lose the last node; return what went wrong."""
        launcher, folder = self.launchers[name], Path(os.environ[FOLDER])
        lost = self._topology.num_nodes - 1
        cell = Cell("waits", "mlp", "ddp", self._topology, "32", "cpu")
        seen = []
        with closing(launcher.pool(WAITING, None)) as pool, tempfile.TemporaryDirectory() as evidence:
            running = start(pool, cell, Path(evidence), LIMIT)
            ranks = [folder / f"reached-{rank}" for rank in range(cell.processes)]
            _until(lambda: all(rank.exists() for rank in ranks))
            host = pool.hosts[lost] if isinstance(pool, RemotePool) else ""
            if name == "ray" and self._cluster:
                host = f"node{lost}"  # whichever ranks Ray placed there
                self._cluster.kill(lost)
            else:
                os.kill(int(ranks[-1].read_text()), signal.SIGKILL)
            try:
                running.wait_for_trace()
                seen.append("the cell came to its end")
            except LaunchError as error:
                print(f"    {error}"[:400])
                if host and f" on {host}: it closed the connection" not in str(error):
                    seen.append(f"{host} is not named: {error}")
            if pool.alive:
                seen.append("the pool counts as alive")
        (folder / "go-on").touch()
        back = self._cluster if name == "ray" else None
        if back:
            back.bring_back(lost)
        with closing(launcher.pool(WAITING, None)) as pool, tempfile.TemporaryDirectory() as evidence:
            trace = launch(pool, cell, Path(evidence), LIMIT)
            outcomes = {one.outcome.value for one in judge(TraceAnalysis(trace, WORKLOADS["mlp"], cell))}
            if outcomes != {"passed"}:
                seen.append(f"the next cell is {outcomes}")
        return seen

    def _present(self) -> Present:
        return Present.now(self._temporary)

    def _left(self, before: Present) -> str:
        """Return what exists now but not ``before``, after everything had time to disappear; "" if nothing."""
        deadline = time.monotonic() + SETTLING
        while True:
            now = self._present()
            ours = self._cluster.processes if self._cluster else frozenset()
            new = {pid for pid in now.processes - before.processes - ours if _runs(pid)}
            new |= {pid for pid in now.processes if is_actor(pid)}
            memory, folders = now.shared_memory - before.shared_memory, now.folders - before.folders
            if not (new or memory or folders):
                return ""
            if time.monotonic() > deadline:
                named = [f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()[:80]}" for pid in new if _runs(pid)]
                return f"processes {named}, /dev/shm {sorted(memory)}, folders {sorted(folders)}"
            time.sleep(0.1)


def _runs(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT.time_limit
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks did not come to their second step")
        time.sleep(0.05)


@contextmanager
def _cluster_of(options: argparse.Namespace) -> Iterator[RayCluster | None]:
    """Start a Ray cluster if Ray is selected, and connect this process to it."""
    if "ray" not in options.only:
        yield None
        return
    with RayCluster(options.nodes, options.gpus) as cluster:
        os.environ.update(cluster.environment)
        yield cluster


def _in_allocation(nodes: int, ranks: int) -> int:
    """Run this command again in an allocation of its own SLURM cluster; return its exit code."""
    made = subprocess.run([SLURM_CLUSTER, "up", "", str(nodes)], stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        return made.returncode  # 3 if SLURM is not available
    variables = dict(re.findall(r"(\w+)=(\S+)", made.stdout))
    try:
        again = (f"--nodes={nodes}", f"--ntasks-per-node={ranks}", sys.executable, *sys.argv)
        return subprocess.run(["salloc", "--quiet", *again], env=os.environ | variables, check=False).returncode
    finally:
        subprocess.run([SLURM_CLUSTER, "down", variables["PLUMBLINE_CLUSTER"]], check=True)


def main() -> int:
    """Compare, lose nodes, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=LAUNCHERS, type=lambda given: tuple(given.split(",")), metavar="A,B")
    parser.add_argument("--nodes", type=int, default=2, metavar="N")
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="devices of a node (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="timed cells of each kind (default: 3)")
    parser.add_argument("--suite", action="store_true", help="also run the smoke cells and all ddp cells of the suite")
    parser.add_argument("--lose", type=int, default=0, metavar="N", help="lose a node this many times (default: 0)")
    options = parser.parse_args()
    if "slurm" in options.only and "SLURM_JOB_ID" not in os.environ:
        return _in_allocation(options.nodes, options.gpus)
    adopt()  # become the parent of orphans
    torch.set_num_threads(1)
    os.environ[MARK] = secrets.token_hex(8)
    good = True
    with tempfile.TemporaryDirectory(prefix="plumbline-launchers-") as root:
        temporary = Path(root, "tmp")
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        os.environ[FOLDER] = str(Path(root, "reached"))
        before = Present.now(temporary)
        with _cluster_of(options) as cluster:
            comparison = Comparison(options.only, Topology(options.nodes, options.gpus), temporary, cluster)
            if options.rounds:
                good &= comparison.compare(options.rounds)
            if options.suite:
                good &= comparison.run_suite()
            for name in options.only if options.lose else ():
                good &= comparison.lose_nodes(name, options.lose)
        left = {pid for pid in Present.now(temporary).processes - before.processes if _runs(pid)}
        print(f"In all: {'as expected' if good else 'NOT as expected'}; {len(left)} processes are left")
        end_all()
    return 0 if good and not left else 1


if __name__ == "__main__":
    sys.exit(main())
