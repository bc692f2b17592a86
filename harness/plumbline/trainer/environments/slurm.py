"""Tasks that srun has started."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

from plumbline.trainer.environments.base import ClusterEnvironment
from plumbline.trainer.errors import MisconfigurationError

MOST_HOSTS = 1 << 16
"""Above the size of any cluster, and few enough to be written out."""


class SlurmEnvironment(ClusterEnvironment):
    """A task is a rank; the first host of the job is the main one."""

    name = "SLURM"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Return whether this is a task of srun; a shell that srun opened (job name ``bash``) is none."""
        return {"SLURM_PROCID", "SLURM_NTASKS"} <= set(variables) and variables.get("SLURM_JOB_NAME") != "bash"

    def node_rank(self) -> int:
        """Return SLURM_NODEID."""
        return self.number("SLURM_NODEID", 0)

    def local_rank(self) -> int:
        """Return SLURM_LOCALID."""
        return self.number("SLURM_LOCALID")

    def rank(self, local_rank: int, processes_per_node: int) -> int:
        """Return SLURM_PROCID: with ``--distribution=cyclic`` it is not what the nodes suggest."""
        return self.number("SLURM_PROCID")

    def main_address(self) -> str:
        """Return MASTER_ADDR, where names of nodes lead nowhere, or the first host of the job's node list."""
        if self.variables.get("MASTER_ADDR"):
            return self.variables["MASTER_ADDR"]
        nodes = self.variables.get("SLURM_NODELIST") or self.variables.get("SLURM_JOB_NODELIST")
        return expand_hosts(nodes)[0] if nodes else "127.0.0.1"

    def main_port(self) -> int:
        """Return MASTER_PORT, or a port below the ephemeral ones that follows from the job's id."""
        return self.number("MASTER_PORT", 12000 + self.number("SLURM_JOB_ID", 0) % 20000)

    def check(self, num_nodes: int, processes_per_node: int) -> None:
        """Raise MisconfigurationError where SLURM started something else than the trainer's topology means."""
        super().check(num_nodes, processes_per_node)
        text = self.variables.get("SLURM_STEP_TASKS_PER_NODE") or self.variables.get("SLURM_TASKS_PER_NODE")
        if text and set(tasks_per_node(text)) != {processes_per_node}:
            raise MisconfigurationError(
                f"SLURM put {text} tasks on its nodes, but the trainer's gpus, num_nodes and distributed_backend mean "
                f"{processes_per_node} on each: start them with srun --ntasks-per-node={processes_per_node}."
            )

    def expected(self, num_nodes: int, processes_per_node: int) -> dict[str, int]:
        """Return the numbers of tasks and nodes that the trainer's topology means."""
        return {"SLURM_NTASKS": num_nodes * processes_per_node, "SLURM_NNODES": num_nodes}


def tasks_per_node(text: str) -> list[int]:
    """Return how many tasks each node has, of SLURM's ``8,4`` or ``2(x3),1``.

    Raises:
        MisconfigurationError: it is malformed.

    """
    found = re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text)
    repeats = [(int(count), int(times or 1)) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)]
    if not found or sum(times for _, times in repeats) > MOST_HOSTS:
        raise MisconfigurationError(f"The tasks per node {text!r} are malformed: they should look like 8(x2),4.")
    return [count for count, times in repeats for _ in range(times)]


def expand_hosts(nodes: str) -> list[str]:
    """Return the hosts of a SLURM node list: ``a[1-2,07],b3`` is a1, a2, a07, b3.

    Raises:
        MisconfigurationError: The brackets or ranges are malformed, or it names more hosts than any cluster has.

    """
    group = r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not re.fullmatch(rf"{group}(,{group})*", nodes):
        raise MisconfigurationError(f"The node list {nodes!r} is malformed: it should look like node[1-3,7],other4.")
    hosts: list[str] = []
    for pattern in re.findall(group, nodes):
        parts = re.split(r"\[([^\]]*)\]", pattern)  # text, ranges, text, ranges, … text
        if math.prod(map(_how_many, parts[1::2])) + len(hosts) > MOST_HOSTS:
            raise MisconfigurationError(f"The node list {nodes[:80]!r} names more than {MOST_HOSTS} hosts.")
        choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def _how_many(ranges: str) -> int:
    """Return how many numbers ``001-003,7`` means, without making them; of very long numbers, too many."""
    items = [item.partition("-")[::2] for item in ranges.split(",")]
    if any(len(number) > 9 for item in items for number in item):
        return MOST_HOSTS + 1
    return sum(max(0, int(high or low) - int(low) + 1) for low, high in items)


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of ``001-003,7`` with their leading zeros."""
    numbers = []
    for item in ranges.split(","):
        low, _, high = item.partition("-")
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    return numbers
