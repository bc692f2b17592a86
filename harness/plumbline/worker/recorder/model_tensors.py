"""The tensors of the trained model on this rank: weights, buffers and received gradients, by name.

The evidence has a dense copy, a reference to the store, or this rank's shard of a sharded tensor. A rank does not
communicate with others for this: a rank that hangs elsewhere would not answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.core.errors import TraceError
from plumbline.core.mesh import FlatPart, Part
from plumbline.evidence.tensor_store import TensorStore, reference
from plumbline.evidence.trace import Shard, StoredTensor, Tensors
from plumbline.recording.grad_scaler import scale_left
from plumbline.recording.master_weights import Piece, likely_pieces, pieces_of
from plumbline.recording.parameters import ParameterNames, parameters_of

PLAIN = (Tensor, nn.Parameter)
"""Tensor classes that are known not to be DTensors."""

BLOCKS = ("Shard", "_StridedShard", "Replicate")
"""Class names of placements with which a rank holds a block of a DTensor."""


def kept(tensor: Tensor | Shard, store: TensorStore | None) -> Any:
    """Return what is recorded of a weight or gradient, on the CPU.

    For a DTensor, as FSDP2 makes them, or for a declared part, this is the rank's shard. For any other tensor it is a
    reference if ``store`` takes the tensor, or else a dense copy.
    """
    if isinstance(tensor, Shard) or _is_shared_out(tensor):
        return _shard(tensor)
    dense = _dense(tensor)
    return store.keep(dense) if store is not None and store.takes(dense) else copied(dense)


def is_still(tensor: Tensor | Shard, recorded: Any) -> bool:
    """Return whether, on this rank, a tensor still equals the one from which ``recorded`` was made."""
    sharded = isinstance(tensor, Shard) or _is_shared_out(tensor)
    if isinstance(tensor, Shard) or sharded or isinstance(recorded, Shard):
        if not (sharded and isinstance(recorded, Shard)):
            return False
        values, *place = _placed(tensor)
        return place == [recorded.begin, recorded.shape, recorded.ranks] and _is_equal(values, recorded.values)
    return reference(tensor) == recorded if isinstance(recorded, StoredTensor) else _is_equal(tensor, recorded)


def is_zero(recorded: Any) -> bool:
    if isinstance(recorded, StoredTensor):
        return recorded == reference(torch.zeros(recorded.shape, dtype=getattr(torch, recorded.dtype)))
    values = recorded.values if isinstance(recorded, Shard) else recorded
    return not values.any()


def is_flattened(tensor: Tensor) -> bool:
    """Return whether a tensor is a FlatParameter of FullyShardedDataParallel, which concatenates several parameters."""
    return getattr(tensor, "_is_flat_param", False)


def copied(tensor: Tensor) -> Tensor:
    return _dense(tensor).to("cpu", copy=True)


def _is_equal(tensor: Tensor, copy: Tensor) -> bool:
    return tensor.dtype == copy.dtype and torch.equal(tensor.detach().cpu(), copy)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()


def _is_shared_out(tensor: Tensor) -> bool:
    # A DTensor is recognized by an attribute: its class has moved between torch versions, and is slow to import.
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def _shard(tensor: Tensor | Shard) -> Shard:
    values, *place = _placed(tensor)
    return Shard(copied(values), *place)


def _placed(tensor: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return this rank's part of a tensor, where it begins, the shape of the whole, and the ranks with its parts.

    Along each dimension of its mesh, a DTensor is replicated, or sharded along a dimension of its own as by
    ``torch.chunk``. Strided shards are divided last, outer mesh dimensions after inner ones: fully_shard divides the
    blocks of tensor parallelism, whose mesh dimension is an inner one. There are no ranks if the part is not a block.
    """
    if isinstance(tensor, Shard):
        return tensor.values, tensor.begin, tensor.shape, tensor.ranks
    with torch.no_grad():  # else autograd would record it
        values: Tensor = tensor.to_local()
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    begin, size = [0] * len(shape), list(shape)
    placed = list(enumerate(zip(mesh.get_coordinate() or (), tensor.placements, strict=False)))
    copy = [slice(None) if _divides(placement) else place for _, (place, placement) in placed]
    strided = [one for one in placed if _is_strided(one[1][1])]
    for dimension, (place, placement) in [one for one in placed if one not in strided] + strided[::-1]:
        if _divides(placement):
            chunk = -(-size[placement.dim] // mesh.size(dimension))
            first = min(place * chunk, size[placement.dim])
            begin[placement.dim] += first
            size[placement.dim] = min(chunk, size[placement.dim] - first)
    known = all(type(placement).__name__ in BLOCKS for placement in tensor.placements)
    is_block = known and len(copy) == mesh.ndim and tuple(values.shape) == tuple(size)
    return values, tuple(begin), shape, tuple(mesh.mesh[tuple(copy)].flatten().tolist()) if is_block else ()


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _divides(placement: Any) -> bool:
    return placement.is_shard() or _is_strided(placement)


class DeclaredParts:
    """The parts of parameters that the subject has declared with ``job.parts``, by parameter name."""

    def __init__(self) -> None:
        self._parts: dict[str, FlatPart | Part] = {}
        self._tensors: set[int] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._ranks: tuple[int, ...] = ()

    def declare(
        self, parts: Mapping[str, FlatPart | Part], shapes: Mapping[str, torch.Size], ranks: Collection[int]
    ) -> None:
        """Replace all earlier declarations by ``parts``; ``shapes`` has the shapes of the model's parameters."""
        for name, part in parts.items():
            if name not in shapes:
                raise TraceError(f"job.parts names {name!r}: job.model() has no such parameter")
            if flaw := _flaw(name, part, shapes[name]):
                raise TraceError(f"job.parts: {flaw}")
        self._parts = dict(parts)
        self._tensors = {id(part.tensor) for part in parts.values()}
        self._shapes = {name: tuple(shapes[name]) for name in parts}
        self._ranks = tuple(sorted(ranks))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    @property
    def are_flat(self) -> bool:
        return any(isinstance(part, FlatPart) for part in self._parts.values())

    def weight(self, name: str) -> Shard:
        return self._shard(name, self._parts[name].tensor)

    def names_in(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return the names of the parameters whose parts lie in these tensors."""
        held = {id(tensor) for tensor in tensors}
        return [name for name, part in self._parts.items() if id(part.tensor) in held]

    def piece(self, name: str, parameter: Tensor) -> Piece | None:
        """Return the entries of the model's own ``parameter`` that a flat part declares; None for other parts."""
        part = self._parts[name]
        return (
            Piece(parameter, part.begin, part.length, part.tensor, part.offset) if isinstance(part, FlatPart) else None
        )

    def hold(self, tensor: Tensor) -> bool:
        return id(tensor) in self._tensors

    def gradients_in(self, tensors: Iterable[Tensor], scale: float) -> Iterator[tuple[str, Shard]]:
        """Yield the names of the parameters with parts in ``tensors``, and their gradients, divided by ``scale``."""
        gradients = {id(one): one.grad if scale == 1.0 else one.grad / scale for one in tensors if one.grad is not None}
        for name, part in self._parts.items():
            if id(part.tensor) in gradients:
                yield name, self._shard(name, gradients[id(part.tensor)])

    def _shard(self, name: str, tensor: Tensor) -> Shard:
        part, values = self._parts[name], tensor.detach()
        if isinstance(part, FlatPart):
            run = values.reshape(-1)[part.offset : part.offset + part.length]
            return Shard(run, (part.begin,), self._shapes[name], self._ranks)
        return Shard(values, part.begin, self._shapes[name], self._ranks)


def _flaw(name: str, part: FlatPart | Part, shape: torch.Size) -> str | None:
    """Return why ``part`` cannot be a part of the parameter ``name`` with this ``shape``; else None."""
    size = list(part.tensor.shape)
    if isinstance(part, Part):
        inside = len(part.begin) == len(size) == len(shape) and all(
            0 <= begin <= begin + length <= whole for begin, length, whole in zip(part.begin, size, shape, strict=True)
        )
        return None if inside else f"a block of {size} at {list(part.begin)} exceeds {name}, which is {list(shape)}"
    if not 0 <= part.begin <= part.begin + part.length <= shape.numel():
        return f"{_run(part.begin, part)} exceed {name}, which has {shape.numel()}"
    if len(size) != 1 or not 0 <= part.offset <= part.offset + part.length <= size[0]:
        return f"{name} cannot be {_run(part.offset, part)} of a tensor of {size}"
    return None


def _run(begin: int, part: FlatPart) -> str:
    return f"entries {begin} to {begin + part.length}"


class ModelTensors:
    """Copies this rank's tensors of a ``model``; large tensors are written to ``store``.

    ``holds_nothing``: the names to which ``holding`` restricted this rank include no parameter.
    """

    def __init__(self, store: TensorStore | None) -> None:
        self.model: nn.Module | None = None
        self.holds_nothing = False
        self._store = store
        self._shapes: dict[str, torch.Size] = {}
        self._names = ParameterNames()
        self._held: frozenset[str] | None = None
        self._parts = DeclaredParts()
        self._masters: dict[str, Tensor] = {}

    def watch(self, model: nn.Module) -> None:
        """Follow ``model`` instead of an earlier one. Call this before the model is sharded."""
        self.model, self._masters = model, {}
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    @contextmanager
    def holding(self, names: Collection[str]) -> Iterator[None]:
        """Restrict recording to the parameters and buffers ``names``, as if the model had no others."""
        self._held = frozenset(names)
        self.holds_nothing = not self._own_parameters()
        try:
            yield
        finally:
            self._held = None

    def parts(self, parts: Mapping[str, FlatPart | Part], ranks: Collection[int]) -> None:
        self._parts.declare(parts, self._shapes, ranks)

    def find_masters(self, optimizer: Optimizer) -> None:
        """Find the higher-precision copies of the model's parameters (master weights) that an optimizer steps."""
        if self.model is None:
            return
        own = dict(self.model.named_parameters())
        known = {*map(id, own.values()), *map(id, self._masters.values())}
        others = [one for one in parameters_of(optimizer) if id(one) not in known and not self._parts.hold(one)]
        if not others:
            return
        left = {id(one): name for name, one in own.items() if name not in self._masters}
        local = {id(_local(own[name])): name for name in left.values()}
        copies = {id(_local(one)): one for one in others}
        weights, masters = [_local(own[name]) for name in left.values()], list(map(_local, others))
        for piece in pieces_of(weights, masters) or likely_pieces(weights, masters):
            name = local[id(piece.parameter)]
            if piece.length == piece.master.numel() and _is_finer(piece.master, own[name]):
                self._masters[name] = copies[id(piece.master)]

    @property
    def has_masters(self) -> bool:
        """Whether an optimizer steps copies of the model's parameters, or parts that were declared."""
        return bool(self._masters or any(True for _ in self._parts))

    def off_masters(self) -> dict[str, float]:
        """Return the largest relative error of each parameter whose weights are not its rounded master weights.

        Only the parts on this rank count. The keys are names of parameters.
        """
        own = {} if self.model is None else dict(self.model.named_parameters())
        pieces = {
            name: Piece(_local(own[name]), 0, _local(master).numel(), _local(master), 0)
            for name, master in self._masters.items()
            if name in own
        }
        for name in self._parts:
            piece = self._parts.piece(name, own[name]) if name in own else None
            if piece is not None and piece.length and _is_finer(piece.master, own[name]):
                pieces[name] = piece
        return {name: far for name, piece in pieces.items() if (far := piece.off_master)}

    def weights(self) -> Tensors:
        return {name: kept(parameter, self._store) for name, parameter in self._own_parameters().items()}

    def weights_since(self, last: Tensors | None) -> Tensors:
        """Return the current weights, or ``last`` itself if they have not changed since."""
        own = self._own_parameters()
        if last is not None and last.keys() == own.keys() and all(is_still(own[name], last[name]) for name in last):
            return last
        return self.weights()

    def buffers(self, module: nn.Module) -> Tensors:
        """Return copies of the buffers of ``module``, which is the model or a copy of it."""
        return {name: copied(buffer) for name, buffer in module.named_buffers() if self._holds(name)}

    def received(self, optimizer: Optimizer) -> Tensors:
        parameters = parameters_of(optimizer)
        scale = scale_left(optimizer)
        received = {
            name: kept(parameter.grad if scale == 1.0 else parameter.grad.detach() / scale, self._store)
            for name, parameter in zip(self._known_names(optimizer), parameters, strict=True)
            if name is not None and parameter.grad is not None
        }
        declared = self._parts.gradients_in(parameters, scale)
        return received | {name: kept(gradient, self._store) for name, gradient in declared}

    def names_of(self, optimizer: Optimizer) -> tuple[str, ...]:
        declared = self._parts.names_in(parameters_of(optimizer))
        return (*filter(None, self._known_names(optimizer)), *declared)

    def learning_rates(self, optimizer: Optimizer) -> tuple[float, ...]:
        # A trainer steps flat tensors one after another, and empties the groups of the others meanwhile.
        groups = [group for group in optimizer.param_groups if group["params"] or not self._parts.are_flat]
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def refuse_undeclared_parts(self) -> None:
        """Raise an error if a plain parameter is only a part of the model's, and the subject has not declared which."""
        for name, parameter in self.model.named_parameters() if self.model is not None else ():
            whole = self._shapes.get(name, parameter.shape)
            if self._parts.hold(parameter) or name in self._parts:
                continue
            # With use_orig_params=True, FullyShardedDataParallel exposes slices of its flat parameter as parameters.
            if is_flattened(parameter) or (parameter.dim() == 1 and len(whole) != 1):
                raise TraceError(
                    f"{name} is in a flat parameter of FullyShardedDataParallel: shard with fully_shard (FSDP2), or "
                    "declare where this rank has its part of each parameter with job.parts"
                )
            if parameter.shape != whole:
                raise TraceError(
                    f"{name} is {list(parameter.shape)} on this rank and {list(whole)} in job.model(): declare this "
                    "rank's part of it with job.parts, or make it a DTensor"
                )

    def _own_parameters(self) -> dict[str, Tensor | Shard]:
        every = () if self.model is None else self.model.named_parameters()
        plain = {name: parameter for name, parameter in every if not self._parts.hold(parameter)}
        declared = {name: self._parts.weight(name) for name in self._parts}
        return {name: held for name, held in (plain | self._masters | declared).items() if self._holds(name)}

    def _holds(self, name: str) -> bool:
        return self._held is None or name in self._held

    def _known_names(self, optimizer: Optimizer) -> list[str | None]:
        parameters = parameters_of(optimizer)
        if self.model is not None and not all(map(self._names.knows, parameters)):
            # Read the names again: fully_shard has replaced the original parameters.
            self._names = ParameterNames(self.model)
        known = zip(self._names.known(parameters), parameters, strict=True)
        masters = {id(master): name for name, master in self._masters.items()}
        return [None if self._parts.hold(one) else masters.get(id(one), name) for name, one in known]


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _is_finer(master: Tensor, weights: Tensor) -> bool:
    return torch.finfo(master.dtype).eps < torch.finfo(weights.dtype).eps
