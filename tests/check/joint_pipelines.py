"""Pipelines, right and wrong: with torch's schedules, on meshes, and with stages that communicate."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

STEPS = 4
WIDTH = 16
ROWS = 8
MISTAKE = ""
"""The current training's mistake; "" for a right one."""

_HAS_SCALING = "scale_grads" in inspect.signature(pipelining.Schedule1F1B).parameters
_UNSCALED: dict[str, Any] = {"scale_grads": False} if _HAS_SCALING else {}
"""Options of a schedule that does not scale the gradients of a step."""

Step = Callable[[Tensor, Tensor], None]


class Stage(nn.Module):
    def __init__(self, end: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, end)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(self.norm(values))))


class Sent(torch.autograd.Function):
    """Sends activations to a rank; the backward receives their gradient."""

    @staticmethod
    def forward(context: Any, values: Tensor, to: int) -> Tensor:
        context.to, context.shape = to, values.shape
        dist.send(values.contiguous(), to)
        return values.new_zeros(())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        received = gradient.new_empty(context.shape)
        dist.recv(received, context.to)
        return received, None


class Received(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, root: Tensor, shape: tuple[int, ...], source: int) -> Tensor:
        context.source = source
        values = root.new_empty(shape)
        dist.recv(values, source)
        return values

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        dist.send(gradient.contiguous() * (2 if MISTAKE == "gradient-sent-doubled" else 1), context.source)
        return gradient.new_zeros(()), None, None


class Communicating(nn.Module):
    """A stage that sends and receives in its forward."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        rank = dist.get_rank()
        if rank % 2 == 0:
            return Sent.apply(self.stage(rows), rank + 1)
        root = torch.zeros((), dtype=rows.dtype, requires_grad=True)
        return functional.mse_loss(self.stage(Received.apply(root, (len(rows), WIDTH), rank - 1)), targets)


def _communicating() -> tuple[list[nn.Module], Step]:
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = [dist.new_group(range(index, world, 2)) for index in range(2)][rank % 2]
    model = Communicating([Stage(), Stage(4)][rank % 2])

    def averaged(rows: Tensor, targets: Tensor) -> None:
        model(rows.roll(rank // 2, 1), targets).backward()
        if world > 2:
            for one in model.parameters():
                dist.all_reduce(one.grad, group=replicas)
                one.grad /= world if MISTAKE == "divided-by-all-ranks" else world / 2

    return [model], averaged


def _scheduled(kind: str) -> tuple[list[nn.Module], Step]:
    """Train this rank's stages, one or two, with one of torch's schedules."""
    rank, world = dist.get_rank(), dist.get_world_size()
    schedule: Any = getattr(pipelining, f"Schedule{kind}")
    has_one = "stage" in inspect.signature(schedule).parameters
    count = world if has_one else 2 * world
    stages = [Stage() for _ in range(count - 1)] + [Stage(4)]
    places = [rank] if has_one else [rank, count - 1 - rank] if "V" in kind else [rank, rank + world]
    mine = [pipelining.PipelineStage(stages[one], one, count, torch.device("cpu")) for one in places]
    options = _UNSCALED if MISTAKE == "not-scaled" else {}
    made = schedule(mine[0] if has_one else mine, 4, functional.mse_loss, **options)
    return [stages[one] for one in places], _step(made, mine)


def _of_two(kind: str, loss: Callable[[Tensor, Tensor], Tensor], **options: bool) -> tuple[list[nn.Module], Step]:
    rank = dist.get_rank()
    module = [Stage(), Stage(4)][rank]
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    return [module], _step(getattr(pipelining, f"Schedule{kind}")(stage, 4, loss, **options), [stage])


def _accumulated() -> tuple[list[nn.Module], Step]:
    """Two stages that run the schedule twice before each step, with a loss divided by all micro-batches."""
    modules, step = _of_two("1F1B", lambda values, targets: functional.mse_loss(values, targets) / 8, **_UNSCALED)

    def twice(rows: Tensor, targets: Tensor) -> None:
        step(rows, targets)
        step(rows.flip(1), targets)

    return modules, twice


def _summed(kind: str) -> tuple[list[nn.Module], Step]:
    """Two stages with a summed loss; gradients are then divided by its number of terms."""
    modules, step = _of_two(kind, partial(functional.mse_loss, reduction="sum"), **_UNSCALED)

    def divided(rows: Tensor, targets: Tensor) -> None:
        step(rows, targets)
        for one in modules[0].parameters():
            one.grad /= targets.numel()

    return modules, divided


def _clip(parameters: list[nn.Parameter]) -> None:
    """Clip by hand by the norm of all stages."""
    square = torch.stack([one.grad.square().sum() for one in parameters]).sum()
    dist.all_reduce(square)
    for one in parameters:
        one.grad *= 0.01 / square.sqrt()


class LastStage(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(super().forward(values))


def _alike() -> tuple[list[nn.Module], Step]:
    """Two stages; the second starts as a copy of the first, with one more layer."""
    rank = dist.get_rank()
    first, second = Stage(), LastStage()
    second.load_state_dict(first.state_dict(), strict=False)
    stage = pipelining.PipelineStage([first, second][rank], rank, 2, torch.device("cpu"))
    options = _UNSCALED if MISTAKE else {}
    step = _step(pipelining.Schedule1F1B(stage, 4, functional.mse_loss, **options), [stage])

    def finished(rows: Tensor, targets: Tensor) -> None:
        step(rows, targets)
        if MISTAKE == "layers-averaged":
            for one in [first, second][rank].up.parameters():
                dist.all_reduce(one.grad)
                one.grad /= 2

    return [[first, second][rank]], finished


def _in_parts() -> tuple[list[nn.Module], Step]:
    """A mesh of two stages, each on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
    place = mesh["stage"].get_local_rank()
    torch.manual_seed(place)
    module = [Stage(), Stage(4)][place]
    parallelize_module(module, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    stage = pipelining.PipelineStage(module, place, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    return [module], _step(pipelining.Schedule1F1B(stage, 4, functional.mse_loss), [stage])


class OneLayer(nn.Module):
    """The first or the last stage of a model whose first and last layers share a weight."""

    def __init__(self, stage: nn.Module, layer: nn.Linear, *, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        if not is_last:
            self.embedding = layer
        self.stage = stage
        if is_last:
            self.head = layer

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.stage(values)) if self.is_last else self.stage(self.embedding(values))


def _tied() -> tuple[list[nn.Module], Step]:
    """Two stages cut out of copies of a model whose first and last layers share a weight."""
    rank = dist.get_rank()
    first, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    model = nn.ModuleList([OneLayer(Stage(), first, is_last=False), OneLayer(Stage(), last, is_last=True)])
    last.weight = first.weight
    module = copy.deepcopy(model)[rank]
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    step = _step(
        pipelining.Schedule1F1B(stage, 4, lambda values, targets: values[:, :4].sub(targets).square().mean()), [stage]
    )

    def added(rows: Tensor, targets: Tensor) -> None:
        step(rows, targets)
        if MISTAKE != "tied-not-added":
            dist.all_reduce((module.head if rank else module.embedding).weight.grad)

    return [module], added


def _equal() -> tuple[list[nn.Module], Step]:
    """Two stages built on their own ranks, whose first and last weights get the same values."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    module = OneLayer(Stage(), layer, is_last=bool(rank))
    dist.broadcast(layer.weight.data, 0)
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    loss = lambda values, targets: values[:, :4].sub(targets).square().mean()  # noqa: E731
    step = _step(pipelining.Schedule1F1B(stage, 4, loss), [stage])

    def added(rows: Tensor, targets: Tensor) -> None:
        step(rows, targets)
        if MISTAKE != "tied-not-added":
            dist.all_reduce(layer.weight.grad)

    return [module], added


def _replicas() -> tuple[list[nn.Module], Step]:
    """Two pipelines with different rows, whose gradients are averaged."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    place, replica = mesh["stage"].get_local_rank(), mesh["data"].get_local_rank()
    torch.manual_seed(place)
    module = nn.Sequential(OrderedDict([(f"stage{place}", [Stage(), Stage(4)][place])]))
    stage = pipelining.PipelineStage(module, place, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    step = _step(pipelining.Schedule1F1B(stage, 4, functional.mse_loss), [stage])

    def average(tensors: list[Any]) -> None:
        for one in tensors:
            dist.all_reduce(one, group=mesh["data"].get_group())
            one /= 2

    def averaged(rows: Tensor, targets: Tensor) -> None:
        # Local SGD averages weights instead of gradients.
        if MISTAKE == "weights-averaged":
            average([one.data for one in module.parameters()])
        step(rows.roll(replica, 1), targets)  # the norm would remove a shift
        if not MISTAKE:
            average([one.grad for one in module.parameters()])

    return [module], averaged


def _freed(*, keeps_edge: bool = False) -> tuple[list[nn.Module], Step]:
    """Two hand-written stages that free what they have sent, and call autograd's engine, like Megatron-LM.

    With ``keeps_edge``, only the place in the graph is kept, as in torch's own schedules since torch 2.15.
    """
    rank = dist.get_rank()
    stage = [Stage(), Stage(4)][rank]

    def backward(values: Any, gradient: Tensor) -> None:
        torch.autograd.Variable._execution_engine.run_backward(
            tensors=(values,), grad_tensors=(gradient,), keep_graph=False, create_graph=False, inputs=(),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip

    def step(rows: Tensor, targets: Tensor) -> None:
        for own, wanted in zip(rows.chunk(2), targets.chunk(2), strict=True):
            if rank == 0:
                values = stage(own)
                dist.send(values.detach(), 1)
                gradient = torch.empty(values.shape)
                if keeps_edge:
                    values = get_gradient_edge(values)
                else:
                    values.data = torch.empty(1)
                dist.recv(gradient, 1)
                backward(values, gradient)
            else:
                received = torch.empty(len(own), WIDTH)
                dist.recv(received, 0)
                received.requires_grad_()
                loss = functional.mse_loss(stage(received), wanted) / 2
                backward(loss, torch.ones_like(loss))
                dist.send(received.grad * (2 if MISTAKE == "gradient-sent-doubled" else 1), 0)

    return [stage], step


def _converted(sent_as: torch.dtype) -> tuple[list[nn.Module], Step]:
    """Two hand-written stages under autocast, whose 16-bit outputs are converted before they are sent."""
    rank = dist.get_rank()
    stage = [Stage(), Stage(4)][rank]

    def step(rows: Tensor, targets: Tensor) -> None:
        for own, wanted in zip(rows.chunk(2), targets.chunk(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                if rank == 0:
                    values = stage(own)
                    dist.send(values.detach().to(sent_as), 1)
                    gradient = torch.empty(values.shape, dtype=sent_as)
                    dist.recv(gradient, 1)
                    values.backward(gradient.to(values.dtype))
                else:
                    received = torch.empty(len(own), WIDTH, dtype=sent_as)
                    dist.recv(received, 0)
                    received.requires_grad_()
                    (functional.mse_loss(stage(received).float(), wanted) / 2).backward()
                    dist.send(received.grad * (2 if MISTAKE == "gradient-sent-doubled" else 1), 0)

    return [stage], step


def _beside() -> tuple[list[nn.Module], Step]:
    """Two hand-written stages; the first also sends a tensor that it computes from its output outside the module."""
    rank = dist.get_rank()
    stage = [Stage(), Stage(4)][rank]

    def step(rows: Tensor, targets: Tensor) -> None:
        if rank == 0:
            values = stage(rows)
            sent = [values, values.tanh()]
            gradients = [torch.empty_like(values) for _ in sent]
            for one in sent:
                dist.send(one.detach(), 1)
            for one in gradients:
                dist.recv(one, 1)
            torch.autograd.backward(sent, gradients)
        else:
            received = [torch.empty(len(rows), WIDTH) for _ in range(2)]
            for one in received:
                dist.recv(one, 0)
                one.requires_grad_()
            functional.mse_loss(stage(received[0]) + received[1][:, :4], targets).backward()
            for one in received:
                dist.send(one.grad * (2 if MISTAKE == "gradient-sent-doubled" else 1), 0)

    return [stage], step


def _between_modules(kind: str) -> tuple[list[nn.Module], Step]:
    """Two stages by hand, with operations outside of modules before activations are sent, or after they are received.

    ``multiplied``: the backward pass of the first stage begins at the product of its output and the gradient.
    ``shared``: the last stage passes what it receives to two modules. ``transposed``: what is sent has another layout
    than the tensor at which the backward pass begins.
    """
    rank = dist.get_rank()
    stage, head = [Stage(), Stage(4)][rank], nn.Linear(WIDTH, 4)

    def step(rows: Tensor, targets: Tensor) -> None:
        if rank == 0:
            values = stage(rows)
            values = values[2:].tanh() if kind == "computed" else values
            sent = values.detach().t().contiguous() if kind == "transposed" else values.detach()
            dist.send(sent, 1)
            gradient = torch.empty_like(sent)
            dist.recv(gradient, 1)
            if kind == "multiplied":
                (values * gradient).sum().backward()
            else:
                values.backward(gradient.t() if kind == "transposed" else gradient)
            return
        targets = targets[2:] if kind == "computed" else targets
        shape = (WIDTH, len(targets)) if kind == "transposed" else (len(targets), WIDTH)
        received = torch.empty(shape)
        dist.recv(received, 0)
        received.requires_grad_()
        if kind == "shared":
            outputs = stage(received) + head(received.clone())
        else:
            outputs = stage(
                received.t() if kind == "transposed" else received.sigmoid() if kind == "computed" else received
            )
        functional.mse_loss(outputs, targets).backward()
        dist.send(received.grad * (2 if MISTAKE == "gradient-sent-doubled" else 1), 0)

    return [stage, head] if rank and kind == "shared" else [stage], step


class PassingOn(nn.Module):
    """A stage whose forward receives activations and sends its outputs, without functions that exchange gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.is_last = dist.get_rank() == dist.get_world_size() - 1
        self.stage = Stage(4 if self.is_last else WIDTH)
        self.received = torch.empty(0)

    def forward(self, rows: Tensor) -> Tensor:
        if dist.get_rank():
            rows = self.received = torch.empty_like(rows)
            dist.recv(rows, dist.get_rank() - 1)
            rows.requires_grad_()
        values: Tensor = self.stage(rows)
        if not self.is_last:
            dist.send(values.detach(), dist.get_rank() + 1)
        return values


def _passing_on() -> tuple[list[nn.Module], Step]:
    rank, model = dist.get_rank(), PassingOn()
    for one in model.parameters():
        nn.init.normal_(one, std=0.3, generator=torch.Generator().manual_seed(rank))

    def step(rows: Tensor, targets: Tensor) -> None:
        values = model(rows)
        if model.is_last:
            functional.mse_loss(values, targets).backward()
        else:
            gradient = torch.empty_like(values)
            dist.recv(gradient, rank + 1)
            values.backward(gradient)
        if rank:
            dist.send(model.received.grad * (2 if MISTAKE == "gradient-sent-doubled" else 1), rank - 1)

    return [model], step


def _step(schedule: Any, stages: list[Any]) -> Step:
    def step(rows: Tensor, targets: Tensor) -> None:
        given = [rows] if any(one.is_first for one in stages) else []
        schedule.step(*given, **({"target": targets} if any(one.is_last for one in stages) else {}))

    return step


def run(scene: str, mistake: str = "") -> None:
    """Train on the ranks of the current process group."""
    global MISTAKE
    MISTAKE = mistake
    torch.manual_seed(0)
    others = {
        "communicating": _communicating, "in-parts": _in_parts, "replicas": _replicas, "alike": _alike, "tied": _tied,
        "equal": _equal, "accumulated": _accumulated,
        "summed": partial(_summed, "1F1B"), "clipped": partial(_of_two, "1F1B", functional.mse_loss),
        "freed": _freed, "kept-edge": partial(_freed, keeps_edge=True), "passing-on": _passing_on, "beside": _beside,
        **{kind: partial(_between_modules, kind) for kind in ("computed", "multiplied", "shared", "transposed")},
        "sent-in-float32": partial(_converted, torch.float32),
        "sent-in-bfloat16": partial(_converted, torch.bfloat16),
    }  # fmt: skip
    modules, step = others[scene]() if scene in others else _scheduled(scene)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        if mistake != "gradients-not-zeroed":
            optimizer.zero_grad()
        for _ in range(2 if mistake.startswith("divided-again") else 1):
            rows, targets = (torch.randn(ROWS, width, generator=generator) for width in (WIDTH, 4))
            step(rows, targets)
        if mistake == "divided-again-then-by-windows":
            for one in parameters:
                one.grad /= 2
        if scene == "clipped":
            _clip(parameters)
        optimizer.step()
