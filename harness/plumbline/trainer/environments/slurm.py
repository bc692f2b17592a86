"""Tasks that srun has started."""

from __future__ import annotations

import re
from collections.abc import Mapping

from plumbline.trainer.environments.base import ClusterEnvironment
from plumbline.trainer.errors import MisconfigurationError


class SlurmEnvironment(ClusterEnvironment):
    """A task is a rank; the first host of the job is the main one."""

    name = "SLURM"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Return whether srun has started this process, not counting a shell that srun opened (job name ``bash``)."""
        return {"SLURM_PROCID", "SLURM_NTASKS"} <= set(variables) and variables.get("SLURM_JOB_NAME") != "bash"

    def node_rank(self) -> int:
        return self.number("SLURM_NODEID", 0)

    def local_rank(self) -> int:
        return self.number("SLURM_LOCALID")

    def rank(self, local_rank: int, processes_per_node: int) -> int:
        """Return SLURM_PROCID: with ``--distribution=cyclic`` it does not follow from the node's rank."""
        return self.number("SLURM_PROCID")

    def main_address(self) -> str:
        """Return MASTER_ADDR, where node names do not resolve, or the first host of the job's node list."""
        if self.variables.get("MASTER_ADDR"):
            return self.variables["MASTER_ADDR"]
        nodes = self.variables.get("SLURM_NODELIST") or self.variables.get("SLURM_JOB_NODELIST")
        return first_host(nodes) if nodes else "127.0.0.1"

    def main_port(self) -> int:
        """Return MASTER_PORT, or a port that follows from the job's id and lies below the ephemeral ones."""
        return self.number("MASTER_PORT", 12000 + self.number("SLURM_JOB_ID", 0) % 20000)

    def check(self, num_nodes: int, processes_per_node: int) -> None:
        super().check(num_nodes, processes_per_node)
        text = self.variables.get("SLURM_STEP_TASKS_PER_NODE") or self.variables.get("SLURM_TASKS_PER_NODE")
        if text and tasks_per_node(text) != {processes_per_node}:
            raise MisconfigurationError(
                f"SLURM put {text} tasks on its nodes, but the trainer's gpus, num_nodes and distributed_backend mean "
                f"{processes_per_node} on each: start them with srun --ntasks-per-node={processes_per_node}."
            )

    def expected(self, num_nodes: int, processes_per_node: int) -> dict[str, int]:
        return {"SLURM_NTASKS": num_nodes * processes_per_node, "SLURM_NNODES": num_nodes}


def tasks_per_node(text: str) -> set[int]:
    """Return the different numbers of tasks in SLURM's ``8,4`` or ``2(x3),1``.

    Raises:
        MisconfigurationError: it is malformed.

    """
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise MisconfigurationError(f"The tasks per node {text!r} are malformed: they should look like 8(x2),4.")
    return {int(item.partition("(")[0]) for item in text.split(",")}


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: of ``a[01-12,20]b,c3`` it is a01b.

    Raises:
        MisconfigurationError: The brackets or ranges are malformed.

    """
    group = r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not re.fullmatch(rf"{group}(,{group})*", nodes):
        raise MisconfigurationError(f"The node list {nodes!r} is malformed: it should look like node[1-3,7],other4.")
    first = re.match(group, nodes)
    assert first is not None  # it is a part of what matched
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])
