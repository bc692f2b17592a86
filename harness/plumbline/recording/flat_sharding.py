"""Flat parameters of FullyShardedDataParallel (FSDP1): the original parameters in them, and their gathered tensors.

A flat parameter has the entries of several original ones, and each rank of a process group holds a shard of it. The
optimizer has the flat parameter or, with ``use_orig_params``, the part of each original parameter that lies in the
shard. All ranks of the group gather whole tensors together, so every rank must request them in the same order.
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
"""The part that FullyShardedDataParallel adds to the names of parameters."""

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
        """The flat parameter, at which the gradients of backward passes arrive."""
        return self._flat  # type: ignore[no-any-return]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of an optimizer: the original ones with ``use_orig_params``, else the flat one."""
        return [self._flat] if self._flat._params is None else list(self._flat._params)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold shards; False with ``NO_SHARD``."""
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
        """The dtype in which the module computes, and in which its gradients arrive."""
        computing: torch.dtype | None = self._handle._fwd_bwd_param_dtype
        return computing or self._flat.dtype

    def reduction_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which gradients are sent between ranks: the policy's, and a communication hook's."""
        module: Any = self.module
        hook = getattr(getattr(module, "_comm_hook", None), "__name__", "")
        formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return [self._handle._reduce_dtype, *(dtype for name, dtype in formats.items() if name in hook)]

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether all ranks hold the same original parameters, and average their gradients.

        False if these are DTensors, or if only some of the ranks belong to the module's process groups.
        """
        sizes = [torch.distributed.get_world_size(self.group)]
        if self.is_replicated:
            module: Any = self.module
            sizes.append(torch.distributed.get_world_size(module._inter_node_pg))
        has_dtensors = any(one is not None for one in self._flat._param_extensions)
        return not has_dtensors and math.prod(sizes) == torch.distributed.get_world_size()

    @property
    def state(self) -> tuple[int, int]:
        """The version and the address of the persistent shard, whatever memory the flat parameter uses now."""
        shard = getattr(self._flat, "_local_shard", self._flat)
        return shard._version, shard.data_ptr()

    @property
    def is_stale(self) -> bool:
        """Whether the unsharded weights of an earlier forward still exist, and differ from the shard.

        FSDP1 gathers weights again only after it has freed them, and frees some units only in a backward pass.
        """
        unsharded = getattr(self._flat, "_full_param_padded", None)
        if not self.is_sharded or unsharded is None or not unsharded.untyped_storage().size():
            return False
        shard = self._flat._local_shard.detach().to(unsharded.device, unsharded.dtype)
        own = unsharded.detach().chunk(self._handle.world_size)[self._handle.rank]
        return not torch.equal(own.view(torch.uint8), shard.view(torch.uint8))

    @property
    def shapes(self) -> list[torch.Size]:
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
        """Yield each further place of a shared original parameter, and its first place."""
        for name, module, _, first_name, first_module, _ in self._flat._shared_param_infos:
            yield module, name, first_module, first_name

    def stand_ins(self) -> set[int]:
        """Return the identities of the tensors that modules hold now in place of parameters; they may be views."""
        places = [*self.places(), *((module, name) for module, name, *_ in self.shared_places())]
        tensors = [self._flat, *(getattr(module, name, None) for module, name in places)]
        return {id(one) for one in (*tensors, *self.parameters, *(self._flat._shared_params or ()))}

    def weights(self) -> Tensor:
        """Return the gathered flat weights. All ranks of the group must call this."""
        return self.gather(getattr(self._flat, "_local_shard", self._flat).detach())

    def gather(self, shard: Tensor) -> Tensor:
        """Return the flat tensor of which each rank of the group has a shard. All of them must call this."""
        if not self.is_sharded:
            return shard
        own = shard.to(self._handle.device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self._handle.world_size)]
        torch.distributed.all_gather(parts, own, group=self.group)
        return torch.cat(parts)[: self._flat._unpadded_unsharded_size.numel()]

    def gathered(self, of: Callable[[Tensor], Tensor | None]) -> list[Tensor | None]:
        """Return one gathered tensor for each of ``parameters``; ``of`` returns this rank's part of it, or None.

        The result for a parameter is None if its part is None on every rank. If ranks have their own whole gradients,
        because FSDP has not reduced them, these are the results. All ranks of the group must call this.
        """
        given = list(map(of, self.parameters))
        said = [self._has_own(given), *(one is not None for one in given)]
        answers = torch.tensor(said, dtype=torch.uint8, device=self._handle.device)
        if self.is_sharded:
            torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX, group=self.group)
        is_own, *known = answers.tolist()
        if is_own:
            size = self._flat._unpadded_unsharded_size.numel()
            return given if self._flat._params is not None else [None if one is None else one[:size] for one in given]
        whole = self.gather(self._shard(given))
        parts = [whole] if self._flat._params is None else self.views(whole)
        return [one if is_known else None for one, is_known in zip(parts, known, strict=True)]

    def _has_own(self, given: list[Tensor | None]) -> bool:
        """Return whether these are whole tensors, although this rank should have shards."""
        if not self.is_sharded:
            return False
        if self._flat._params is None:
            sizes = [self._flat._sharded_size.numel()]
        else:
            sizes = [one.numel_in_shard if one.in_shard else 0 for one in self._flat._shard_param_infos]
        return any(one is not None and one.numel() != size for one, size in zip(given, sizes, strict=True))

    def _shard(self, given: list[Tensor | None]) -> Tensor:
        """Return this rank's shard, filled with its parts of the parameters, and with zeros if a part is None."""
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
        """Return whether any rank of the group answers True. All of them must call this."""
        said = torch.tensor([answer], dtype=torch.uint8, device=self._handle.device)
        if self.is_sharded:
            torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(said)


@dataclass(frozen=True, eq=False)
class FlatPart:
    """The part of a unit that an optimizer has: an original parameter, by its number, or None for all of them."""

    unit: FlatUnit
    number: int | None

    @property
    def shape(self) -> torch.Size:
        flat: Any = self.unit.flat
        return torch.Size(flat._unpadded_unsharded_size if self.number is None else flat._shapes[self.number])

    def take(self, flat: Tensor) -> Tensor:
        return flat if self.number is None else self.unit.original(self.number, flat)


_PARTS: Any = WeakTensorKeyDictionary()  # parameter: its module and handle, weakly, and its number


def is_fully_sharded(module: nn.Module) -> bool:
    return any((one.__module__, one.__name__) == _MODULE for one in type(module).__mro__)


def flat_units(root: nn.Module) -> list[FlatUnit]:
    """Return the flat parameters of a module, in the order of its submodules, and remember them for ``part_of``."""
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
    """Return the place of a parameter in a flat one; None if it has none, or ``flat_units`` has not found it yet."""
    if not getattr(parameter, "_fsdp_flattened", False):
        return None
    module, handle, number = _PARTS.get(parameter, (_nothing, _nothing, None))
    found = module(), handle()
    return None if None in found else FlatPart(FlatUnit(*found), number)


def _nothing() -> None:
    return None


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter, of which this rank may hold only a part."""
    part = part_of(parameter)
    return parameter.shape if part is None else part.shape


def arrivals(roots: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Tensor, Take | None]]:
    """Yield each trainable parameter, the flat one at which its gradients arrive, and a function that takes its part.

    The function is None if ranks do not hold the same parameters: see ``FlatUnit.is_of_all_ranks``.
    """
    for root in roots:
        for unit in flat_units(root):
            is_of_all_ranks = unit.is_of_all_ranks
            for number, parameter in enumerate(unit.parameters):
                part = FlatPart(unit, None if parameter is unit.flat else number)
                if parameter.requires_grad:
                    yield parameter, unit.flat, part.take if is_of_all_ranks else None


def plain_forward(module: nn.Module, cast: Callable[[Any, torch.dtype | None], Any]) -> Callable[..., Any]:
    """Return a forward for a FullyShardedDataParallel that only casts inputs, and calls the module that it wraps."""
    return partial(_plain_forward, module, cast)


def _plain_forward(module: Any, cast: Callable[[Any, torch.dtype | None], Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast((args, kwargs), _input_dtype(module))
    return module._fsdp_wrapped_module(*args, **kwargs)


def _input_dtype(module: Any) -> torch.dtype | None:
    policy = module.mixed_precision
    casts = policy.cast_forward_inputs or (module._is_root and policy.cast_root_forward_inputs)
    return policy.param_dtype if casts else None
