"""Notes how the ranks divide the work: wrappers, meshes, groups of some of the ranks, gradients reduced by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.evidence.rank_file import dtype_name
from plumbline.recording.flat_sharding import flat_units
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.patching import attempt, wrap
from plumbline.recording.pause import is_paused
from plumbline.recording.process import rank_and_world
from plumbline.recording.sharding import (
    holds_gradients_back,
    is_data_parallel_shard,
    is_replicated,
    requested_divisors,
)

_REDUCTIONS = (
    "all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
    "all_gather", "all_gather_into_tensor", "all_gather_single",
)  # fmt: skip

_OTHER_COLLECTIVES = ("all_to_all", "all_to_all_single", "broadcast", "reduce")
"""Without isend and irecv, which torch compares by identity."""

SHARDED_AS_DATA = ("FSDPModule", "FullyShardedDataParallel")
"""Classes of modules whose parameters are distributed although each rank has its own data."""


REPLICATED_SHARDS = "2: Replicate Shard"
"""The layout of shards that several groups of ranks hold."""


def world_size() -> int:
    """Return the number of ranks of torch.distributed, 1 where there is no group."""
    place = rank_and_world()
    return 1 if place is None else place[1]


def active_wrapper() -> Any:
    """Return the DistributedDataParallel whose forward is running, None where there is none."""
    # A private name, in every version of torch so far.
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


class ParallelismObserver(Observer):
    """Notes the wrappers of the called modules, and what is reduced between the last backward pass and a step.

    A module's wrapper is the one whose forward was running when it was called for the first time.
    """

    name = "parallelism"

    def __init__(self) -> None:
        self._wrappers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        self._modules: list[nn.Module] = []
        self._facts: list[Facts] = []
        self._meshes: list[Facts] = []
        self._dimensions: dict[str, int] = {}
        self._groups: list[int] = []
        self._wrapped = False
        self._covered: WeakKeyDictionary[Any, dict[int, tuple[weakref.ref[Tensor], bool]]] = WeakKeyDictionary()
        self._counting = False
        self._reduced: dict[int, int] = {}
        self._formats: dict[str, int] = {}
        self._entries = 0
        self._stepping = False
        self._collectives = 0

    def install(self) -> None:
        if not torch.distributed.is_available():
            return
        mesh: Any = getattr(torch.distributed, "device_mesh", None)
        wrap(getattr(mesh, "DeviceMesh", None), "__init__", self._around_mesh)
        wrap(torch.distributed, "new_group", self._around_group)
        wrap(nn.parallel.DistributedDataParallel, "__init__", self._around_wrapper)
        for name in _REDUCTIONS:
            wrap(torch.distributed, name, self._around_reduction)
        for name in _OTHER_COLLECTIVES:
            wrap(torch.distributed, name, self._around_collective)

    def found(self, one: Any) -> None:
        self._wrapped = self._wrapped or isinstance(one, nn.parallel.DistributedDataParallel)
        if type(one).__name__ == "DeviceMesh":
            self._note_mesh(one)
        elif not torch.distributed.is_available():
            return
        elif isinstance(one, torch.distributed.ProcessGroup) and 1 < one.size() < world_size():
            self._groups.append(one.size())

    def wrapper_of(self, module: nn.Module) -> Any:
        """Return the DistributedDataParallel through which a module has been called, None where there is none."""
        return module if isinstance(module, nn.parallel.DistributedDataParallel) else self._wrappers.get(module)

    def unreduced(self, module: nn.Module) -> dict[int, str]:
        """Return, by id, why the gradients of some trainable parameters of a module are not reduced.

        ``added`` or ``frozen``: when DistributedDataParallel was created, the model did not have them yet, or they
        required no gradient. ``unsharded``: ``fully_shard`` has the module, but not them.
        """
        wrapper = self.wrapper_of(module)
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        own = [
            parameter
            for name, parameter in getattr(wrapper, "module", module).named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        if wrapper is None:
            is_sharded = any(base.__name__ == "FSDPModule" for one in module.modules() for base in type(one).__mro__)
            plain = [one for one in own if not hasattr(one, "placements") or is_replicated(one)]
            return dict.fromkeys(map(id, plain), "unsharded") if is_sharded else {}
        if (covered := self._covered.get(wrapper)) is None:
            return {}
        found = {}
        for one in own:
            known, required_gradient = covered.get(id(one), (None, False))
            if known is None or known() is not one:
                found[id(one)] = "added"
            elif not required_gradient:
                found[id(one)] = "frozen"
        return found

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how a module is parallel, when it is called for the first time."""
        if any(known is module for known in self._modules):
            return
        self._modules.append(module)
        active = active_wrapper()
        if active is not None and any(part is module for part in active.modules()):
            self._wrappers[module] = active
        self._facts.append(self._describe(module))

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Stop counting: reductions within a backward pass are the wrapper's."""
        self._counting = False

    def backward_ends(self, number: int) -> Facts | None:
        self._counting, self._reduced, self._formats = True, {}, {}
        return None

    def before_step(self, optimizer: Optimizer) -> None:
        self._counting = False
        self._stepping, self._collectives = True, 0
        self._entries = sum(p.numel() for p in parameters_of(optimizer) if p.grad is not None)

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Return how many entries were reduced by hand, by the group's size, and how many the gradients have.

        ``formats`` has the same number by the dtype of what was reduced. ``collectives`` counts those that ran inside
        the step. ``held_back``: FSDP2 was told to reduce no gradients.
        """
        self._stepping = False
        held_back = holds_gradients_back(self._modules)
        if not self._reduced and not self._collectives and not held_back:
            return None
        return {
            "reduced": {str(size): count for size, count in self._reduced.items()},
            "formats": self._formats,
            "entries": self._entries,
            "collectives": self._collectives,
            "held_back": held_back,
        }

    def stop(self) -> None:
        self._counting, self._stepping, self._modules = False, False, []

    def final_facts(self) -> Facts | None:
        """Return the modules, meshes of several dimensions, and the sizes of groups that are not the world.

        ``dimensions`` has the sizes of the named dimensions of all meshes.

        ``wrapped``: the script has made a DistributedDataParallel, whether or not it calls it.
        """
        return {
            "modules": self._facts,
            "meshes": self._meshes[:32],
            "dimensions": self._dimensions,
            "groups": sorted(set(self._groups)),
            "wrapped": self._wrapped,
        }

    def _describe(self, module: nn.Module) -> Facts:
        wrapper = self.wrapper_of(module)
        facts: Facts = {"class": type(module).__name__, "wrapper": None}
        if wrapper is not None:
            facts["wrapper"] = {"ranks": torch.distributed.get_world_size(wrapper.process_group)}
        facts["sharded_as_data"] = any(
            base.__name__ in SHARDED_AS_DATA for part in module.modules() for base in type(part).__mro__
        ) or any(map(is_data_parallel_shard, module.parameters()))
        units = flat_units(module)
        if not all(one.is_of_all_ranks for one in units):
            facts["sharded_as_data"] = False
        facts["divisors"] = list(requested_divisors([module]))
        layouts = {layout for p in module.parameters() if (layout := _layout(p))}
        replicated = any(one.is_replicated for one in units)
        facts["layouts"] = sorted(layouts | ({REPLICATED_SHARDS} if replicated else set()))
        return facts

    def _around_mesh(self, original: Callable[..., Any], mesh: Any, /, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        if not is_paused():
            attempt(self._note_mesh, mesh)

    def _note_mesh(self, mesh: Any) -> None:
        names = mesh.mesh_dim_names or ()
        self._dimensions.update((name, size) for name, size in zip(names, mesh.mesh.shape, strict=False) if size > 1)
        if mesh.mesh.ndim > 1:
            self._meshes.append({"shape": list(mesh.mesh.shape), "names": list(mesh.mesh_dim_names or ())})

    def _around_wrapper(self, original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> None:
        self._wrapped = True
        original(wrapper, *args, **kwargs)
        attempt(self._note_covered, wrapper)

    def _note_covered(self, wrapper: Any) -> None:
        self._covered[wrapper] = {id(one): (weakref.ref(one), one.requires_grad) for one in wrapper.parameters()}

    def _around_group(self, original: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        group = original(ranks, *args, **kwargs)
        if ranks is not None and 1 < len(ranks) < world_size():
            self._groups.append(len(ranks))
        return group

    def _around_reduction(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Asked first: a compiled region must not depend on what is being counted.
        if not torch.compiler.is_compiling() and self._counting and not is_paused():
            attempt(self._note_reduction, args, kwargs)
        return self._around_collective(original, *args, **kwargs)

    def _around_collective(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and self._stepping and not is_paused():
            self._collectives += 1
        return original(*args, **kwargs)

    def _note_reduction(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        groups = [value for value in given if isinstance(value, torch.distributed.ProcessGroup)]
        size = torch.distributed.get_world_size(groups[0] if groups else None)
        entries, dtype = max(map(_size_and_dtype, given), default=(0, ""))
        self._reduced[size] = self._reduced.get(size, 0) + entries
        self._formats[dtype] = self._formats.get(dtype, 0) + entries


def _size_and_dtype(value: Any) -> tuple[int, str]:
    """Return how many entries the tensors in a value have, and the dtype of the first one."""
    if isinstance(value, torch.Tensor):
        return value.numel(), dtype_name(value.dtype)
    found = list(map(_size_and_dtype, value)) if isinstance(value, (list, tuple)) else []
    return sum(size for size, _ in found), next((dtype for _, dtype in found if dtype), "")


def _layout(parameter: torch.Tensor) -> str:
    """Return how a distributed parameter lies on its mesh, as ``2: Replicate Shard``; "" for a plain one."""
    placements, mesh = getattr(parameter, "placements", None), getattr(parameter, "device_mesh", None)
    if placements is None or mesh is None:
        return ""
    return f"{mesh.mesh.ndim}: {' '.join(type(one).__name__.lstrip('_') for one in placements)}"
