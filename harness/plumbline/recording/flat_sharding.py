"""Flat parameters of FullyShardedDataParallel (FSDP1): the original ones in them, and their whole tensors.

Each rank of a process group holds a shard of a flat parameter, which has the entries of several original ones. The
optimizer has the flat parameter or, with ``use_orig_params``, the original ones: of each, what lies in the shard.
Whole tensors are gathered by all ranks of the group together, so that every rank has to ask for them in the same order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
_HANDLE = "torch.distributed.fsdp._flat_param", "FlatParamHandle"

WRAPPED = "_fsdp_wrapped_module."
"""What FullyShardedDataParallel adds to the names of parameters."""

Take = Callable[[Tensor], Tensor]
"""Returns a parameter's part of a whole flat tensor."""


class FlatUnit:
    """One flat parameter, with the FullyShardedDataParallel that made it."""

    def __init__(self, module: nn.Module, handle: Any) -> None:
        self.module = module
        self._handle = handle
        self._flat = handle.flat_param

    @property
    def flat(self) -> nn.Parameter:
        """The flat parameter, at which the gradient of a backward pass arrives."""
        return self._flat  # type: ignore[no-any-return]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer has: the original parameters with ``use_orig_params``, else the flat one."""
        return [self._flat] if self._flat._params is None else list(self._flat._params)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold shards: not with ``NO_SHARD``."""
        return bool(self._handle.uses_sharded_strategy)

    @property
    def is_replicated(self) -> bool:
        """Whether several groups of ranks hold the same shards (``HYBRID_SHARD``)."""
        return "HYBRID" in self._handle._sharding_strategy.name

    @property
    def group(self) -> Any:
        """The process group whose ranks hold the shards."""
        return self._handle.process_group

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the module computes, and its gradients arrive."""
        computing: torch.dtype | None = self._handle._fwd_bwd_param_dtype
        return computing or self._flat.dtype

    def reduction_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes through which gradients go on their way over ranks: the policy's, and a hook's."""
        module: Any = self.module
        hook = getattr(getattr(module, "_comm_hook", None), "__name__", "")
        formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return [self._handle._reduce_dtype, *(dtype for name, dtype in formats.items() if name in hook)]

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether all ranks hold the same original parameters, and average their gradients.

        Not where these are DTensors, nor where only some of the ranks belong to the module's process groups.
        """
        sizes = [torch.distributed.get_world_size(self.group)]
        if self.is_replicated:
            module: Any = self.module
            sizes.append(torch.distributed.get_world_size(module._inter_node_pg))
        has_dtensors = any(one is not None for one in self._flat._param_extensions)
        return not has_dtensors and math.prod(sizes) == torch.distributed.get_world_size()

    @property
    def state(self) -> tuple[int, int]:
        """The version and the address of the shard that lasts, whatever the flat parameter shows at present."""
        shard = getattr(self._flat, "_local_shard", self._flat)
        return shard._version, shard.data_ptr()

    @property
    def is_stale(self) -> bool:
        """Whether the unsharded weights that a forward has used, if they are still there, are not those of the shard.

        FSDP1 does not gather what it has not freed, and frees some units only in a backward pass.
        """
        unsharded = getattr(self._flat, "_full_param_padded", None)
        if not self.is_sharded or unsharded is None or not unsharded.untyped_storage().size():
            return False
        shard = self._flat._local_shard.detach().to(unsharded.device, unsharded.dtype)
        own = unsharded.detach().chunk(self._handle.world_size)[self._handle.rank]
        return not torch.equal(own.view(torch.uint8), shard.view(torch.uint8))

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of the original parameters."""
        return list(self._flat._shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the original parameters as views of a whole flat tensor."""
        return [self.original(number, flat) for number in range(len(self._flat._shapes))]

    def original(self, number: int, flat: Tensor) -> Tensor:
        """Return one original parameter as a view of a whole flat tensor."""
        shape = self._flat._shapes[number]
        start = self._starts[number]
        own = flat[start : start + shape.numel()]
        contiguities = getattr(self._flat, "_contiguities", None)  # before torch 2.5, all are flattened in their order
        if contiguities is None or contiguities[number]:
            return own.view(shape)
        return own.as_strided(shape, self._flat._strides[number])

    @cached_property
    def _starts(self) -> list[int]:
        numels = getattr(self._flat, "_numels_with_padding", self._flat._numels)
        padding = getattr(self._flat, "_is_padding_mask", [False] * len(numels))
        starts, start = [], 0
        for numel, is_padding in zip(numels, padding, strict=True):
            if not is_padding:
                starts.append(start)
            start += numel
        return starts

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the module and the attribute that hold each original parameter."""
        for name, module, *_ in self._flat._param_infos:
            yield module, name

    def shared_places(self) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
        """Yield each further place of an original parameter, and its first one."""
        for name, module, _, first_name, first_module, _ in self._flat._shared_param_infos:
            yield module, name, first_module, first_name

    def stand_ins(self) -> set[int]:
        """Return the identities of what modules hold at present in the places of parameters: they may be views."""
        places = [*self.places(), *((module, name) for module, name, *_ in self.shared_places())]
        tensors = [self._flat, *(getattr(module, name, None) for module, name in places)]
        return {id(one) for one in (*tensors, *self.parameters, *(self._flat._shared_params or ()))}

    def weights(self) -> Tensor:
        """Return the whole flat weights; all ranks of the group have to ask."""
        return self.gather(getattr(self._flat, "_local_shard", self._flat).detach())

    def gather(self, shard: Tensor) -> Tensor:
        """Return the whole flat tensor of which each rank of the group has a shard; all of them have to ask."""
        if not self.is_sharded:
            return shard
        own = shard.to(self._handle.device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self._handle.world_size)]
        torch.distributed.all_gather(parts, own, group=self.group)
        return torch.cat(parts)[: self._flat._unpadded_unsharded_size.numel()]

    def gathered(self, of: Callable[[Tensor], Tensor | None]) -> list[Tensor | None]:
        """Return whole tensors, one for each of ``parameters``, of which ``of`` gives what this rank has.

        None for a parameter of which every rank says None. All ranks of the group have to ask.
        """
        given = list(map(of, self.parameters))
        known = torch.tensor([one is not None for one in given], dtype=torch.uint8, device=self._handle.device)
        if self.is_sharded:
            torch.distributed.all_reduce(known, torch.distributed.ReduceOp.MAX, group=self.group)
        whole = self.gather(self._shard(given))
        parts = [whole] if self._flat._params is None else self.views(whole)
        return [one if is_known else None for one, is_known in zip(parts, known.tolist(), strict=True)]

    def _shard(self, given: list[Tensor | None]) -> Tensor:
        """Return this rank's shard of what it has of each parameter, zero where that is nothing."""
        shard = torch.zeros(self._flat._sharded_size, dtype=self._flat.dtype, device=self._flat.device)
        if self._flat._params is None:
            targets = [shard]
        elif not self.is_sharded:
            targets = self.views(shard)
        else:
            targets = [
                shard[one.offset_in_shard : one.offset_in_shard + one.numel_in_shard] if one.in_shard else shard[:0]
                for one in self._flat._shard_param_infos
            ]
        for target, values in zip(targets, given, strict=True):
            if values is not None:
                target.copy_(values.reshape(target.shape))
        return shard

    def any(self, answer: bool) -> bool:
        """Return whether a rank of the group says yes; all of them have to ask."""
        said = torch.tensor([answer], dtype=torch.uint8, device=self._handle.device)
        if self.is_sharded:
            torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(said)


@dataclass(frozen=True, eq=False)
class FlatPart:
    """What an optimizer has of a unit: one original parameter, by its number, or all of them."""

    unit: FlatUnit
    number: int | None

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        flat: Any = self.unit.flat
        return torch.Size(flat._unpadded_unsharded_size if self.number is None else flat._shapes[self.number])

    def take(self, flat: Tensor) -> Tensor:
        """Return this part of a whole flat tensor."""
        return flat if self.number is None else self.unit.original(self.number, flat)


_PARTS: Any = WeakTensorKeyDictionary()  # parameter: its module and handle, weakly, and its number


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether a module is a FullyShardedDataParallel."""
    return any((one.__module__, one.__name__) == _MODULE for one in type(module).__mro__)


def flat_units(root: nn.Module) -> list[FlatUnit]:
    """Return the flat parameters of a module, in the order of its submodules, and remember what lies in them."""
    units = []
    for module in root.modules():
        handle = vars(module).get("_handle")
        if (type(handle).__module__, type(handle).__name__) == _HANDLE:
            units.append(FlatUnit(module, handle))
            _remember(units[-1], handle)
    return units


def _remember(unit: FlatUnit, handle: Any) -> None:
    if unit.flat in _PARTS:
        return
    known = weakref.ref(unit.module), weakref.ref(handle)
    _PARTS[unit.flat] = *known, None
    if unit.parameters[0] is not unit.flat:
        for number, parameter in enumerate(unit.parameters):
            _PARTS[parameter] = *known, number


def part_of(parameter: Tensor) -> FlatPart | None:
    """Return where a parameter lies in a flat one, None where it does not, or its module has not been called yet."""
    if not getattr(parameter, "_fsdp_flattened", False):
        return None
    module, handle, number = _PARTS.get(parameter, (_nothing, _nothing, None))
    found = module(), handle()
    return None if None in found else FlatPart(FlatUnit(*found), number)


def _nothing() -> None:
    return None


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the whole of a parameter, of which this rank may hold a piece of a flat one."""
    part = part_of(parameter)
    return parameter.shape if part is None else part.shape


def arrivals(roots: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Tensor, Take | None]]:
    """Yield each trained parameter with the flat one at which its gradients arrive, and its part of what arrives.

    None where ranks do not hold the same parameters: see ``FlatUnit.is_of_all_ranks``.
    """
    for root in roots:
        for unit in flat_units(root):
            is_of_all_ranks = unit.is_of_all_ranks
            for number, parameter in enumerate(unit.parameters):
                part = FlatPart(unit, None if parameter is unit.flat else number)
                if parameter.requires_grad:
                    yield parameter, unit.flat, part.take if is_of_all_ranks else None


def plain_forward(module: nn.Module, cast: Callable[[Any, torch.dtype | None], Any]) -> Callable[..., Any]:
    """Return a forward of a FullyShardedDataParallel that only casts inputs as it does, and calls what it wraps."""
    return partial(_plain_forward, module, cast)


def _plain_forward(module: Any, cast: Callable[[Any, torch.dtype | None], Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast((args, kwargs), _input_dtype(module))
    return module._fsdp_wrapped_module(*args, **kwargs)


def _input_dtype(module: Any) -> torch.dtype | None:
    policy = module.mixed_precision
    casts = policy.cast_forward_inputs or (module._is_root and policy.cast_root_forward_inputs)
    return policy.param_dtype if casts else None
