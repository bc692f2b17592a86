"""Trains a rank that holds one stage: makes a plan, keeps the stage's part, trains, restores the whole module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from plumbline.trainer import checkpoints
from plumbline.trainer.balanced.blocks import held_tensors
from plumbline.trainer.balanced.exchange import Exchange, StageTimeout, group_with_timeout, limit_default_group
from plumbline.trainer.balanced.measurements import StageMemory
from plumbline.trainer.balanced.pipeline import Pipeline, Place
from plumbline.trainer.balanced.pipeline_batches import SameBatches
from plumbline.trainer.balanced.planning import make_plan
from plumbline.trainer.balanced.shared_weights import Beacon, SharedWeights, StageReplicas, clip_over_stages
from plumbline.trainer.balanced.stage_plan import Balance
from plumbline.trainer.checkpoints import TrainingState
from plumbline.trainer.loop import RankResources, StepModule, loss_function, train
from plumbline.trainer.module import Module
from plumbline.trainer.nested import map_tensors
from plumbline.trainer.optimizers import parameters_of


def train_stage(trainer: Any, module: Module, device: torch.device, ckpt_path: Any) -> None:
    """Train this rank's stage of ``module``. Afterwards, the module has all its weights again, on the CPU."""
    plan, rank = trainer.plan, trainer.rank
    control: Any = dist.new_group(backend="gloo")
    precision = plan.precision(plan.dtype, plan.accelerator)
    precision.convert(module)
    checkpoint = None if ckpt_path is None else checkpoints.read(ckpt_path)
    if checkpoint is not None:
        module.load_state_dict(checkpoint["module"])
    state = StageState(module, precision)
    train_loader, val_loader = state.prepare(trainer)
    trainer.optimizers = state.optimizers
    trainer.checkpoint = partial(checkpoints.capture, trainer, state)
    box: list[Any] = [None]
    if rank == 0:
        with module.while_planning():
            box = [make_plan(trainer, state, train_loader, val_loader, device)]
    dist.broadcast_object_list(box, 0, control)
    chain, balance = box[0]
    trainer.balance = Balance(balance)
    for tensor in held_tensors(module).values():  # all ranks begin with rank 0's tensors, as with DDP
        values = tensor.detach().cpu().contiguous()
        dist.broadcast(values, 0, control)
        tensor.data.copy_(values)

    replica, number = divmod(rank, len(balance.stages))
    place = Place(number, len(balance.stages), replica, balance.replicas)
    if trainer.stage_file is not None:
        name = balance.stage_name(number)
        Path(trainer.stage_file).write_text(name[0].lower() + name[1:], "utf-8")
    # From here on, the user's code runs on all ranks, and any rank can wait for another.
    timeout = StageTimeout(plan.stage_timeout, number, place.first_rank, _get_default_store(), place.count)
    limit_default_group(timeout.limit)
    control = group_with_timeout(timeout.limit)
    replicas = StageReplicas.meet(place, control, timeout.limit)
    held = [chain.holds(stage.first, stage.last) for stage in balance.stages]
    state.held, state.owned = held[number], held[number].difference(*held[:number])
    state.control, state.replica, state.waiting = replicas.control, replica, timeout.waiting
    keep_stage(module, held[number], device)
    interception = chain.interception(module, device)

    scaler = getattr(precision, "scaler", None)
    beacon = None
    if scaler is not None and scaler.is_enabled():
        scaler.scale(torch.zeros((), device=device))  # creates the scale, also on stages without a loss
        beacon = Beacon(device)
    names = {id(tensor): name for name, tensor in held_tensors(module).items()}
    state.parts = [keep_own(optimizer, names, state, beacon) for optimizer in state.optimizers]
    weights = [[slot.weight for slot in part.slots] for part in state.parts]
    shared = SharedWeights(holders(module, held), dict(module.named_parameters()), place, timeout.limit)
    precision.prepare(state.optimizers)
    if checkpoint is not None:
        checkpoints.restore(checkpoint, trainer, state)

    stage = balance.stages[number]
    pipeline = Pipeline(
        place, chain.part(stage.first, stage.last), balance.micro_batches, interception,
        Exchange(device, timeout), precision,
    )  # fmt: skip
    step = StepModule(module, precision)
    allowed = None if balance.memory is None else balance.memory[number]
    memory = StageMemory(balance.stage_name(number), module, state.optimizers, device, allowed)
    running = RunningStage(pipeline, step, module, state, shared, beacon, memory, replicas)
    resources = RankResources(
        engine=running,
        evaluate=StageEvaluation(running),
        devices=[device],
        train_loader=SameBatches(train_loader, rank, control, timeout),
        val_loader=None if val_loader is None else SameBatches(val_loader, rank, control, timeout),
        weights=weights,
        waiting=timeout.waiting,
    )
    with interception.installed(), module.while_staged(held[number]):
        train(trainer, state, resources)
    reports: list[Any] = [None] * trainer.world_size
    with timeout.waiting("the end of training"):
        dist.all_gather_object(reports, (*pipeline.clock.report(), memory.peak_bytes()), control)
    trainer.balance = trainer.balance.with_measured(reports)
    box = [checkpoints.capture(trainer, state)]
    with timeout.waiting("the trained weights"):
        dist.broadcast_object_list(box, 0, control)
    state.take_whole(box[0]["module"])
    trainer.checkpoint = lambda: box[0]


def keep_stage(module: nn.Module, held: frozenset[str], device: torch.device) -> None:
    """Move the stage's tensors to its device, and free the memory of all others.

    The others keep their shape. Their single value is nan, so that a wrong use shows, or 0 for integers. Buffers that
    are not in a checkpoint are kept, because they could not be restored.
    """
    saved = {id(value) for value in module.state_dict(keep_vars=True).values()}
    for name, tensor in held_tensors(module).items():
        if name in held:
            tensor.data = tensor.data.to(device)
        elif id(tensor) in saved:
            empty = torch.nan if tensor.is_floating_point() else 0
            tensor.data = torch.full((1,) * tensor.dim(), empty, dtype=tensor.dtype).expand(tensor.shape)
            tensor.grad = None


def holders(module: nn.Module, held: list[frozenset[str]]) -> dict[str, tuple[int, ...]]:
    stages = {
        name: tuple(number for number, names in enumerate(held) if name in names)
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }
    return {name: numbers for name, numbers in stages.items() if len(numbers) > 1}


@dataclass
class RunningStage:
    """The engine of a rank that holds one stage."""

    pipeline: Pipeline
    step: StepModule
    module: Module
    state: StageState
    shared: SharedWeights
    beacon: Beacon | None
    memory: StageMemory
    replicas: StageReplicas

    def __post_init__(self) -> None:
        self.buffers = [name for name, _ in self.module.named_buffers() if name in self.state.held]
        self.takes_loss = self.pipeline.place.is_last
        self.loss_of = loss_function(self.module, self.state.precision, False)

    def backward(self, batch: Any, batch_idx: int, arguments: tuple[int, ...], share: int, last: bool) -> Tensor:
        def loss(micro_batch: Any) -> Tensor:
            return self.loss_of(self.step("training_step", micro_batch, batch_idx, *arguments), micro_batch)

        self.share_buffers()
        if not self.memory.measuring:
            return self.pipeline.train(loss, batch, share, ("training_step", *arguments))
        with self.memory.measure():
            mean = self.pipeline.train(loss, batch, share, ("training_step", *arguments))
        self.pipeline.clock.disturbed = not self.memory.measuring
        return mean

    def complete(self, optimizer: Optimizer) -> None:
        """Sum the gradients over stages and replicas, and tell all stages whether any gradient is infinite."""
        weights = [slot.weight for slot in self._part(optimizer).slots]
        with self.state.waiting("the sum of gradients"):
            self.shared.add_gradients(weights)
            self.replicas.sum_gradients(weights)
            if self.beacon is not None:
                self.beacon.light(optimizer, weights)

    def clip(self, optimizer: Optimizer, largest: float) -> None:
        parameters = parameters_of(optimizer)
        with self.state.waiting("the norm of gradients"):
            clip_over_stages(parameters, self._part(optimizer).counted, largest, self.replicas.pipeline)

    def share_buffers(self) -> None:
        with self.state.waiting("the first replica's buffers"):
            # By name, because a step can replace buffers with other tensors.
            self.replicas.share_buffers([self.module.get_buffer(name) for name in self.buffers])

    def _part(self, optimizer: Optimizer) -> Any:
        return next(p for one, p in zip(self.state.optimizers, self.state.parts, strict=True) if one is optimizer)


class StageEvaluation(nn.Module):
    """Validates a batch. The last stage returns the metrics, others an empty dict. Replicas take batches in turn."""

    def __init__(self, stage: RunningStage) -> None:
        super().__init__()
        self.step = stage.step
        self.stage = stage

    def forward(self, hook: str, batch: Any, index: int) -> dict[str, Tensor]:
        pipeline = self.stage.pipeline
        if index % pipeline.place.replicas != pipeline.place.replica:
            return {}
        rows: dict[str, Tensor] | None = pipeline.evaluate(lambda one: self.step(hook, one, index), batch, hook)
        return rows or {}


@dataclass(frozen=True)
class Slot:
    """A weight in this stage's part of an optimizer: its ``number`` in the whole, and whether this stage owns it."""

    number: int
    weight: nn.Parameter
    owned: bool


@dataclass(frozen=True)
class StageOptimizer:
    """The part of an optimizer that a stage keeps.

    ``group_sizes`` and ``dtypes`` describe all parameters of the whole optimizer. ``beacon``: whether a ``Beacon``'s
    parameter follows the module's.
    """

    slots: tuple[Slot, ...]
    group_sizes: tuple[int, ...]
    dtypes: tuple[Any, ...]
    beacon: bool

    @property
    def counted(self) -> list[bool]:
        return [slot.owned for slot in self.slots] + [False] * self.beacon


def renumbered(groups: Sequence[dict[str, Any]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return parameter groups of these sizes as in a state dict, in which parameters are numbered from 0."""
    numbers = count()
    return [{**group, "params": list(islice(numbers, size))} for group, size in zip(groups, sizes, strict=True)]


def keep_own(optimizer: Optimizer, names: dict[int, str], state: StageState, beacon: Beacon | None) -> StageOptimizer:
    """Remove the parameters of other stages from an optimizer. ``names`` has the module's parameter names by id."""
    everything = [group["params"] for group in optimizer.param_groups]
    flat = [weight for group in everything for weight in group]
    slots = tuple(
        Slot(number, weight, names[id(weight)] in state.owned)
        for number, weight in enumerate(flat)
        if names[id(weight)] in state.held
    )
    here = {id(slot.weight) for slot in slots}
    for group in optimizer.param_groups:
        group["params"] = [weight for weight in group["params"] if id(weight) in here]
    for weight in flat:
        if id(weight) not in here:
            optimizer.state.pop(weight, None)
    if beacon is not None:
        beacon.add_to(optimizer)
    dtypes = tuple(weight.dtype for weight in flat)
    return StageOptimizer(slots, tuple(map(len, everything)), dtypes, beacon is not None)


@dataclass
class StageState(TrainingState):
    """The state of a rank that holds one stage.

    ``held`` and ``owned`` name parameters and buffers. If several stages hold one, the first of them owns it.
    ``control`` is a gloo group of all stages of this pipeline. Only the first pipeline, whose ``replica`` is 0, writes
    checkpoints. ``waiting(description)`` is a context for operations in which stages wait for each other.
    """

    held: frozenset[str] = frozenset()
    owned: frozenset[str] = frozenset()
    control: Any = None
    replica: int = 0
    waiting: Callable[..., AbstractContextManager[None]] = field(default=nullcontext)
    parts: list[StageOptimizer] = field(default_factory=list)

    def tensors(self) -> dict[str, Any]:
        """Return the state of module, optimizers and precision of all stages on rank 0. All ranks must call this."""
        if self.replica:
            return {}
        tensors = held_tensors(self.module)
        share = (
            {name: on_cpu(tensors[name]) for name in self.owned},
            [self._states(part, optimizer) for part, optimizer in zip(self.parts, self.optimizers, strict=True)],
            self._masters(),
        )
        shares: list[Any] = [None] * dist.get_world_size(self.control)
        with self.waiting("a checkpoint"):
            dist.gather_object(share, shares if dist.get_rank() == 0 else None, 0, self.control)
        if dist.get_rank():
            return {}
        weights = merged(weights for weights, _, _ in shares)
        states = [merged(each) for each in zip(*(states for _, states, _ in shares), strict=True)]
        masters = [merged(each) for each in zip(*(masters for _, _, masters in shares), strict=True)]
        names = {id(tensor): name for name, tensor in tensors.items()}
        return {
            "module": {
                key: weights[names[id(value)]] if id(value) in names else value
                for key, value in self.module.state_dict(keep_vars=True).items()
            },
            "optimizers": [
                {"state": whole, "param_groups": renumbered(optimizer.state_dict()["param_groups"], part.group_sizes)}
                for whole, part, optimizer in zip(states, self.parts, self.optimizers, strict=True)
            ],
            "precision": {
                **self.precision.state_dict(),
                **({"masters": [list(each.values()) for each in masters]} if masters else {}),
            },
        }

    def load_tensors(self, checkpoint: dict[str, Any]) -> None:
        """Load this stage's part of the optimizers and the precision. The module's weights are already loaded."""
        for part, optimizer, saved in zip(self.parts, self.optimizers, checkpoint["optimizers"], strict=True):
            groups = renumbered(saved["param_groups"], [len(own["params"]) for own in optimizer.param_groups])
            numbers = [slot.number for slot in part.slots]
            state = {at: saved["state"][number] for at, number in enumerate(numbers) if number in saved["state"]}
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        precision = dict(checkpoint["precision"])
        if "masters" in precision:
            precision["masters"] = [
                [dict(zip(self._halves(part.dtypes), masters, strict=True))[slot.number] for slot in self._half(part)]
                for part, masters in zip(self.parts, precision["masters"], strict=True)
            ]
        self.precision.load_state_dict(precision)

    def take_whole(self, module: dict[str, Any]) -> None:
        """Load all weights into the module, on the CPU, as after training on one device."""
        names = {id(value): key for key, value in self.module.state_dict(keep_vars=True).items()}
        for tensor in held_tensors(self.module).values():
            if id(tensor) in names:
                tensor.data = module[names[id(tensor)]].clone()

    def _states(self, part: StageOptimizer, optimizer: Optimizer) -> dict[int, Any]:
        parameters = parameters_of(optimizer)
        return {
            slot.number: map_tensors(on_cpu, optimizer.state[parameter])
            for slot, parameter in zip(part.slots, parameters, strict=False)  # a beacon can follow
            if slot.owned and parameter in optimizer.state
        }

    def _masters(self) -> list[dict[int, Tensor]]:
        return [
            {slot.number: on_cpu(master) for slot, master in zip(self._half(part), masters, strict=True) if slot.owned}
            for part, masters in zip(self.parts, self.precision.state_dict().get("masters", ()), strict=False)
        ]

    def _half(self, part: StageOptimizer) -> list[Slot]:
        return [slot for slot in part.slots if slot.weight.dtype is self.precision.dtype]

    def _halves(self, dtypes: Sequence[Any]) -> list[int]:
        return [number for number, dtype in enumerate(dtypes) if dtype is self.precision.dtype]


def merged(parts: Iterable[dict[Any, Any]]) -> dict[Any, Any]:
    return dict(sorted((key, value) for part in parts for key, value in part.items()))


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
