"""The devices of a run: the type of ``--accelerator``, and ``--mesh``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from plumbline.core.backend import BACKENDS, Backend, Held
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.core.topology import Topology
from plumbline.devices.counting import available, count
from plumbline.devices.types import accelerators, device_type, module_of


def check_accelerator(requested: str) -> None:
    """Raise ``PlanError`` if no type of device has this name. This machine need not have such a device."""
    known = ("auto", "cpu", *accelerators())
    if requested not in known:
        raise PlanError(f"--accelerator {requested}: unknown type of device; choose from {', '.join(known)}")


def resolve_accelerator(requested: str) -> tuple[str, int]:
    """Return the accelerator for ``--accelerator``, which may be ``auto``, and the number of its devices.

    The number for ``cpu`` is 0, because the CPU simulates any number of devices.

    Raises:
        PlanError: this torch does not support the type, or this machine has no such device.
    """
    if requested == "auto":
        return available()
    if requested == "cpu":
        return "cpu", 0
    if module_of(requested) is None:
        known = ", ".join(("cpu", *(name for name in accelerators() if module_of(name) is not None)))
        raise PlanError(
            f"--accelerator {requested}: torch {torch.__version__} has no devices of this type; it has {known}"
        )
    present = count(requested)
    if not present:
        raise PlanError(
            f"--accelerator {requested}: this machine has no {device_type(requested).label} device; "
            "use --accelerator cpu"
        )
    return requested, present


DEFAULT_GPUS = 4

DATA = "dp"
"""Stands for the dimension that divides samples. If two dimensions do, it stands for the one that is not named."""

SHARDS = {"fsdp": "shard"}
"""Aliases of dimensions."""


@dataclass(frozen=True)
class MeshChoice:
    """The sizes of a backend's mesh, outermost dimension first; ``text`` is what the user typed."""

    text: str
    backend: str
    sizes: tuple[int, ...]

    def is_of(self, cell: Cell) -> bool:
        return (cell.backend, cell.topology.mesh) == (self.backend, self.sizes)

    def topology(self, num_nodes: int = 1) -> Topology:
        devices = math.prod(self.sizes)
        if devices % num_nodes:
            raise PlanError(f"--mesh {self.text}: {devices} devices do not divide evenly among {num_nodes} nodes")
        return Topology(num_nodes, devices // num_nodes, self.sizes)


def parse_mesh(text: str) -> MeshChoice:
    """Parse ``name=size,name=size``. Dimensions can come in any order."""
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = (part.strip() for part in word.partition("="))
        if not (name and size.isascii() and size.isdecimal() and int(size) > 1) or name in sizes:
            raise PlanError(
                f"--mesh {text}: give each dimension once, with a size of at least 2, for example dp=2,tp=2"
            )
        sizes[name] = int(size)
    for backend in BACKENDS.values():
        ordered = _sizes_for(backend, sizes)
        if ordered is not None:
            return MeshChoice(text, backend.name, ordered)
    known = "; ".join(f"{names} ({backend.name})" for backend in BACKENDS.values() if (names := _names(backend)))
    raise PlanError(
        f"--mesh {text}: no backend has these dimensions. Available: {known}. Write {DATA} for the dimension that "
        "divides samples, and fsdp for shard"
    )


def _sizes_for(backend: Backend, sizes: dict[str, int]) -> tuple[int, ...] | None:
    if backend.gathers:
        return None
    named = {SHARDS.get(name, name): size for name, size in sizes.items()}
    data = [one.name for one in backend.dimensions if Held.SAMPLES in one.splits and one.name not in named]
    own = {data[0] if name == DATA and len(data) == 1 else name: size for name, size in named.items()}
    if len(named) < len(sizes):
        return None
    required = {one.name for one in backend.dimensions if not one.optional}
    if not required <= own.keys() <= {one.name for one in backend.dimensions}:
        return None
    return tuple(own.get(one.name, 1) for one in backend.dimensions)


def _names(backend: Backend) -> str:
    names = [one.name for one in backend.dimensions]
    return "" if backend.gathers else ",".join(names)
