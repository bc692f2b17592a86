"""Replays steps that one rank cannot replay alone, on whole parameters gathered from the ranks that hold them.

A twin (a copy of the optimizer) steps each whole parameter in a world of one rank. This gives the right result. If
parameters are sharded, another twin steps the shards, and communicates as the optimizer does. If it agrees with the
first twin in float64, its rounding is the optimizer's own. Known mistakes are stepped as well, for the judge to
compare.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from plumbline.check.evidence.training import as_real, segment
from plumbline.check.rank.optimizer.optimizer_replay import (
    Guard,
    NotReplayable,
    exactly_stepped,
    is_of_torch,
    replaying,
    stepping,
)
from plumbline.check.rank.optimizer.twin import StepInput, norm_in_float64, stepped
from plumbline.check.rank.optimizer.whole_input import WholeInput, described, like_shard
from plumbline.check.rank.store_exchange import AbsentRankError, Exchange
from plumbline.recording.observer import Facts
from plumbline.recording.sharding import dtensors, local, whole

Numbered = tuple[int, dict[str, Any], Any]
"""A parameter's number in the optimizer's groups, its group, and the parameter."""

_NUDGES = 2
"""Number of steps with a gradient that is rounded differently. They show how much the update depends on rounding."""

NEARLY = 0.1
"""Relative distance up to which two updates count as nearly the same.

Chosen: changes with little effect, such as that of Adam's epsilon, are not accused.
"""

_AGREE = 1e-6
"""Relative distance in float64 up to which both twins agree. Iterations make the rounding some 1,000 × larger.

Chosen: if the twins are farther apart, the one that communicates is not used.
"""


_SCALES: tuple[Callable[[int, int], float], ...] = (
    lambda rows, columns: max(1, rows / columns) ** 0.5,
    lambda rows, columns: max(rows, columns) ** 0.5,
    lambda rows, columns: max(1, rows / columns),
    lambda rows, columns: (rows / columns) ** 0.5,
    lambda rows, columns: (rows * columns) ** 0.5,
)
"""How matrix optimizers scale the learning rate by the shape."""


@dataclass(frozen=True, eq=False)
class WholeDue:
    """One whole parameter before its step, with its possible updates, as segments.

    ``right``: right updates in the parameter's own precision; ``exact``: the update in float64. ``noise``: the distance
    between the two. ``unit``: one rounding. ``tight``: how far a right update can be from one of ``right``. ``others``:
    updates with known mistakes.
    """

    before: Tensor
    right: list[Tensor]
    exact: Tensor
    noise: float
    unit: float
    tight: float
    others: dict[str, Tensor] = field(default_factory=dict)

    def compared(self, parameter: Tensor) -> tuple[list[float], Facts]:
        """Compare the actual update: return the row for ``UpdateReplay``, without a number, and the ``close`` facts."""
        made = _segment(whole(parameter.detach())) - self.before
        nearest = min(float((made - one).norm()) for one in self.right)
        right = self.right[0]
        others = {name: [float((made - one).norm()), float((one - right).norm())] for name, one in self.others.items()}
        row = [
            float((made - self.exact).norm()), self.noise, float(self.exact.norm()), float(made.norm()),
            float(made @ self.exact), nearest, self.tight,
        ]  # fmt: skip
        return row, {"nearest": nearest, "tight": self.tight, "others": others}


class ReplayTogether:
    """Replays steps together with other ranks, which have to take the same steps."""

    def __init__(self) -> None:
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        self._obstacle = ""

    def replay(
        self, optimizer: Optimizer, numbered: Sequence[Numbered], guard: Guard
    ) -> Iterator[tuple[int, WholeDue | str]]:
        """Yield for each parameter its right update, or why it cannot be judged.

        Raises:
            NotReplayable: the ranks do not replay this step.
        """
        if self._obstacle:
            raise NotReplayable(self._obstacle)
        if not (dist.is_available() and dist.is_initialized()):
            raise NotReplayable("this optimizer's parameters are sharded, but torch.distributed is not initialized")
        try:
            for ranks, own in _by_ranks(numbered).items():
                yield from self._replayed(ranks, optimizer, own, guard)
        except AbsentRankError as error:
            self._obstacle = str(error)
            raise NotReplayable(self._obstacle) from error

    def all_agree(self, parameters: Sequence[Tensor], answer: bool) -> bool:
        """Return whether ``answer`` is true on every rank that holds the parameters."""
        try:
            every = {_ranks_of(one): None for one in parameters}
            said = [self._exchange(ranks).values(answer) for ranks in every]
        except AbsentRankError as error:
            self._obstacle = str(error)
            return False
        return all(map(all, said))

    def _exchange(self, ranks: tuple[int, ...]) -> Exchange:
        name = f"plumbline updates {' '.join(map(str, ranks))}"
        return self._exchanges.setdefault(ranks, Exchange(name, ranks))

    def _replayed(
        self, ranks: tuple[int, ...], optimizer: Optimizer, numbered: Sequence[Numbered], guard: Guard
    ) -> Iterator[tuple[int, WholeDue | str]]:
        exchange = self._exchange(ranks)
        own = {str(number): described(stepping(optimizer), one) for number, _, one in numbered}
        said = exchange.values({"class": type(optimizer).__name__, "held": own})
        if any(one["class"] != said[0]["class"] or one["held"].keys() != own.keys() for one in said):
            raise NotReplayable("this optimizer's step communicates, but the ranks step different optimizers")
        for number, group, parameter in numbered:
            held = [one["held"][str(number)] for one in said]
            if any(one["gradient"] is None for one in held):
                if parameter.grad is not None:
                    yield number, "not every rank has a gradient for it"
                continue
            given = WholeInput(stepping(optimizer), parameter, ranks, held)
            yield number, _Replay(stepping(optimizer), group, parameter, guard, exchange.values).due(given)


class _Replay:
    """Steps the twins of one parameter."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        parameter: Any,
        guard: Guard,
        values: Callable[[Any], list[Any]],
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        self._parameter = parameter
        self._guard = guard
        self._values = values
        self._is_sharded = local(parameter) is not parameter
        self._has_parts = self._is_sharded and any(hasattr(one, "dim") for one in parameter.placements)
        self._on_mesh = False

    def due(self, of: WholeInput) -> WholeDue | str:
        """Return the right update, or why it is unknown. All ranks return the same kind of answer."""
        given: StepInput | None = None
        with self._agreed() as agreed:
            of.require_memory()
        if agreed.why:
            return agreed.why
        with self._agreed() as agreed:
            given = of.gathered()
        if agreed.why or given is None:
            return agreed.why
        found: WholeDue | None = None
        with self._agreed() as agreed:
            found = self._alone(given, averaged=of.has_own_gradients)
        if agreed.why or found is None:
            return agreed.why
        if self._has_parts:
            self._add_by_shard(found)
            self._add_communicating(found)
        return found

    def _agreed(self) -> _Agreed:
        return _Agreed(self._values)

    def _alone(self, given: StepInput, *, averaged: bool) -> WholeDue:
        before = given.weights
        start = _segment(before)
        try:
            native = self._step(given)
        except NotReplayable:
            if not self._is_sharded:
                raise
            self._on_mesh = True
            native = self._step(given)
        exact = self._step(given, exact=True)
        right, truth = _segment(native) - start, _segment(exact) - start
        unit = (norm_in_float64(before) + norm_in_float64(exact - before)) * torch.finfo(before.dtype).eps / 2
        noise = max(norm_in_float64(native.double() - exact), unit)
        del native, exact
        nudged = [_segment(self._step(_nudged(given, seed))) - start for seed in range(_NUDGES)]
        spread = max(float((one - right).norm()) for one in nudged)
        due = WholeDue(start, [right], truth, noise, unit, max(unit, spread))
        if averaged:  # the step may instead sum gradients of a loss that was divided by the number of ranks
            added = StepInput(before, given.gradient * dist.get_world_size(), given.state)
            self._add_one_that_adds(due, _segment(self._step(added)) - start)
        self._add_known_mistakes(due, given)
        return due

    def _add_one_that_adds(self, due: WholeDue, update: Tensor) -> None:
        """Add the update for the sum over ranks. If the mean gives nearly the same, it is right whatever the loss is.

        This is so for optimizers that normalise gradients.
        """
        right = due.right[0]
        if float((update - right).norm()) <= NEARLY * float(right.norm()):
            due.right.append(update)
        else:
            due.others["added"] = update

    def _step(self, given: StepInput, *, exact: bool = False, **options: Any) -> Tensor:
        optimizer, group = self._optimizer, {**self._group, **options}
        # The classes of torch communicate only through DTensors.
        world = nullcontext() if is_of_torch(optimizer) else alone()
        with world, replaying(optimizer, self._guard, communicates=True):
            if self._on_mesh:
                given = self._as_dtensors(given)
            if exact:
                return whole(exactly_stepped(optimizer, group, given, as_only_rank)[0])
            return whole(stepped(optimizer, group, given, attributes=as_only_rank))

    def _as_dtensors(self, given: StepInput) -> StepInput:
        mesh = own_mesh(self._parameter.device_mesh)
        shape = given.weights.shape

        def changed(one: Tensor) -> Tensor:
            return on_own_mesh(one.clone(), mesh, self._parameter.placements) if one.shape == shape else one

        made = given.mapped(changed)
        if given.state is None or made.state is None:
            return made
        # An optimizer that steps with to_local() also keeps its state in plain tensors.
        own = self._optimizer.state.get(self._parameter, {})
        plain = {name for name, one in own.items() if isinstance(one, Tensor) and local(one) is one}
        state = {name: given.state[name] if name in plain else one for name, one in made.state.items()}
        return replace(made, state=state)

    def _add_known_mistakes(self, due: WholeDue, given: StepInput) -> None:
        right, world = due.right[0], dist.get_world_size()
        due.others["still"] = torch.zeros_like(right)
        if any(bool(one.any()) for one in _tensors_of(given.state)):
            anew = StepInput(given.weights, given.gradient, None)
            self._try(due, "state-anew", lambda: self._step(anew))
        if self._group.get("weight_decay"):
            self._try(due, "decay-lost", lambda: self._step(given, weight_decay=0 * self._group["weight_decay"]))
            if (without := due.others.get("decay-lost")) is not None:
                due.others["decay-twice"] = right + (right - without)
        rest = due.others.get("decay-lost", right)  # without weight decay
        if bool((right - rest).any()):
            due.others["decay-only"] = right - rest
        due.others["summed"] = world * right
        due.others["summed-but-decay"] = right + (world - 1) * rest
        for factor in self._factors():
            due.others[f"scaled {factor:.4g}"] = right + (factor - 1) * rest

    def _factors(self) -> set[float]:
        """Return by what an update is off if ranks average it, or scale the learning rate by their shard's shape."""
        world, whole_shape, own = dist.get_world_size(), self._parameter.shape, local(self._parameter).shape
        factors = {1 / world}
        if len(own) > 1 and own.numel():
            factors |= {scale(*own[:2]) / scale(*whole_shape[:2]) for scale in _SCALES}
        return factors - {1.0, float(world)}

    def _try(self, due: WholeDue, name: str, step: Callable[[], Tensor]) -> None:
        try:
            due.others[name] = _segment(step()) - due.before
        except NotReplayable:
            return

    def _add_by_shard(self, due: WholeDue) -> None:
        """Add the update that results if each rank mistakes its shard for the whole parameter."""
        shard = StepInput.of(self._optimizer, self._parameter)
        after = torch.zeros_like(shard.weights)
        with self._agreed() as agreed:
            if after.numel():
                after = local(self._step(shard))
        if not agreed.why:
            due.others["by-shard"] = _segment(whole(like_shard(after, self._parameter))) - due.before

    def _add_communicating(self, due: WholeDue) -> None:
        """Add the update of a twin that communicates, if it agrees with the first twin in float64."""
        optimizer, parameter = self._optimizer, self._parameter
        state = dict(optimizer.state[parameter]) if parameter in optimizer.state else None
        given = StepInput(parameter.detach(), parameter.grad.detach(), state)
        with self._agreed() as agreed, replaying(optimizer, self._guard, communicates=True):
            native = _segment(whole(stepped(optimizer, self._group, given))) - due.before
            exact = _segment(whole(exactly_stepped(optimizer, self._group, given)[0])) - due.before
        if not agreed.why and float((exact - due.exact).norm()) <= _AGREE * float(due.exact.norm()) + due.unit:
            due.right.append(native)


class _Agreed:
    """A context for what each rank does by itself. ``why``: why it failed on some rank, "" if it did on none."""

    def __init__(self, values: Callable[[Any], list[Any]]) -> None:
        self._values = values
        self.why = ""

    def __enter__(self) -> _Agreed:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, AbsentRankError) or not (error is None or isinstance(error, Exception)):
            return False
        own = str(error) if isinstance(error, NotReplayable) else f"{type(error).__name__}: {error}"
        said = self._values("" if error is None else own)
        self.why = next(filter(None, said), "")
        return True


def _by_ranks(numbered: Sequence[Numbered]) -> dict[tuple[int, ...], list[Numbered]]:
    found: dict[tuple[int, ...], list[Numbered]] = {}
    for one in numbered:
        found.setdefault(_ranks_of(one[2]), []).append(one)
    return found


def _ranks_of(parameter: Any) -> tuple[int, ...]:
    """Return the ranks that hold a parameter: those of a DTensor's mesh, and all for other parameters."""
    if local(parameter) is parameter:
        return tuple(range(dist.get_world_size()))
    return tuple(sorted(parameter.device_mesh.mesh.flatten().tolist()))


def _nudged(given: StepInput, seed: int) -> StepInput:
    """Return the same input with each entry of the gradient one rounding larger or smaller."""
    gradient = given.gradient
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, gradient.shape, generator=generator).to(gradient.device) * 2 - 1
    nudged = (gradient.double() * (1 + torch.finfo(gradient.dtype).eps * signs)).to(gradient.dtype)
    return StepInput(given.weights, nudged, given.state)


def _tensors_of(state: Any) -> list[Tensor]:
    return [one for one in tree_leaves(state) if isinstance(one, Tensor) and one.numel() > 1]


def _segment(tensor: Tensor) -> Tensor:
    return segment(as_real(tensor).double())


_RANKS = ("rank", "global_rank", "group_rank")
_SIZES = ("world_size", "group_size")

_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # maps the group of all ranks to a group of this rank alone


@contextmanager
def alone() -> Iterator[None]:
    """Make torch.distributed and the environment act as if this rank were the only one, communicating with itself."""
    c10d: Any = dist.distributed_c10d
    everyone = c10d._world.default_pg
    own = _own_group()
    if own is None:
        yield
        return
    environment = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    c10d._update_default_pg(own)
    os.environ.update({name: "0" if name == "RANK" else "1" for name in environment})
    try:
        yield
    finally:
        os.environ.update(environment)
        c10d._update_default_pg(everyone)


def _own_group() -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    everyone = dist.group.WORLD
    if everyone not in _GROUPS:
        # If a device is bound to the group of all ranks, NCCL would split this group, and all ranks must take part.
        backend = "gloo" if getattr(everyone, "bound_device_id", None) is not None else None
        _GROUPS[everyone] = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    return _GROUPS[everyone]


def as_only_rank(name: str, value: Any) -> Any:
    """Return the value that an attribute or an option of an optimizer has in a world of one rank."""
    if isinstance(value, dist.ProcessGroup):
        return _own_group()
    if isinstance(value, DeviceMesh):
        return own_mesh(value)
    if type(value) is int and name.lstrip("_") in _RANKS:
        return 0
    if type(value) is int and name.lstrip("_") in _SIZES:
        return 1
    return value


def own_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank alone, with as many dimensions as another mesh."""
    groups = [_own_group()] * mesh.ndim
    only = torch.full((1,) * mesh.ndim, dist.get_rank())
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=only, mesh_dim_names=names)


def on_own_mesh(tensor: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """Return a whole tensor as a DTensor of this rank alone, with placements of the same kinds."""
    types = dtensors()
    own = [types.Shard(one.dim) if hasattr(one, "dim") else types.Replicate() for one in placements]
    whole_tensor: Tensor = types.DTensor.from_local(tensor, mesh, own, run_check=False)
    return whole_tensor
