"""Optimizers that act on whole matrices, sharded or divided over ranks, and trainings with them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Run Muon's Newton-Schulz iteration in bfloat16."""
    x = matrix.bfloat16()
    if is_tall := x.size(-2) > x.size(-1):
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrix.dtype)


def muon_update(gradient: Tensor, momentum: Tensor, beta: float = 0.9) -> Tensor:
    momentum.lerp_(gradient, 1 - beta)
    update = orthogonal(gradient.lerp(momentum, beta))
    return update * max(1, gradient.size(-2) / gradient.size(-1)) ** 0.5


class Divided(Optimizer):
    """Muon whose matrices are divided over ranks: each owner steps its own, and weights are gathered.

    ``mistake`` changes one thing.
    """

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.1, mistake: str = "") -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.mistake = mistake

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            decay = 1 - group["lr"] * group["weight_decay"]
            for number, p in enumerate(group["params"]):
                owner = number % world
                if self.mistake == "nobody" and number % (world + 1) == world:
                    owner = -1
                update = torch.zeros_like(p)
                if rank == owner or self.mistake == "all-sum":
                    state = self.state[p]
                    if "momentum" not in state or (self.mistake == "anew" and owner == 1):
                        state["momentum"] = torch.zeros_like(p)
                    update = muon_update(p.grad, state["momentum"])
                before = p.clone()
                if not (self.mistake == "decay-lost" and world > 1):
                    p.mul_(decay)
                if self.mistake == "decay-twice" and world > 1:
                    p.sub_(before, alpha=1 - decay)
                dist.all_reduce(update)
                if self.mistake == "averaged":
                    update /= world
                p.sub_(update, alpha=group["lr"])


class Gathered(Divided):
    """The same with weights gathered like in KellerJordan's Muon."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        world = dist.get_world_size()
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * (world - len(params) % world)
            for base in range(len(params))[::world]:
                if base + dist.get_rank() < len(params):
                    p = params[base + dist.get_rank()]
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    update = muon_update(p.grad, state["momentum"])
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"])
                parts = padded[base : base + world]
                gathered = [torch.empty_like(one) for one in parts]
                dist.all_gather(gathered, padded[base + dist.get_rank()].detach().clone())
                for one, new in zip(parts, gathered, strict=True):
                    one.copy_(new)


class ByRow(Optimizer):
    """Scales each row by a state whose dtype is not specified."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                squares = self.state[p].setdefault("squares", torch.zeros(len(p), 1))
                squares.lerp_(p.grad.square().mean(1, keepdim=True), 0.1)
                p.sub_(p.grad / (squares.sqrt() + 1e-8), alpha=group["lr"])


class Stacked(Optimizer):
    """Muon over a stack of matrices of one shape: each rank has some rows, and their momentum, as in nanochat."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            params = group["params"]
            rows = -(-len(params) // world)
            empty = [torch.zeros_like(params[0])] * (rows * world - len(params))
            gradients = torch.stack([*(p.grad for p in params), *empty])[rank * rows :][:rows]
            weights = torch.stack([*params, *empty])[rank * rows :][:rows]
            state = self.state[params[0]]
            if not state:
                state["momentum"] = torch.zeros_like(gradients)
            weights.sub_(muon_update(gradients, state["momentum"]), alpha=group["lr"])
            gathered = [torch.empty_like(weights) for _ in range(world)]
            dist.all_gather(gathered, weights)
            for p, new in zip(params, torch.cat(gathered), strict=False):
                p.copy_(new)


class OnShards(Optimizer):
    """Muon over DTensors: gathers the matrix (unless it has the ``mistake``), and steps its shard."""

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.1, mistake: str = "") -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.mistake = mistake

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if self.mistake == "by-shard":
                    own = p.to_local()
                    if own.numel():
                        update = muon_update(p.grad.to_local(), state["momentum"].to_local())
                        own.sub_(update, alpha=group["lr"])
                    continue
                momentum = state["momentum"]
                momentum.lerp_(p.grad, 0.1)
                whole = p.grad.lerp(momentum, 0.9).full_tensor()
                update = orthogonal(whole)
                if self.mistake == "shape":
                    update *= max(1, p.to_local().size(0) / p.to_local().size(1)) ** 0.5
                else:
                    update *= max(1, p.size(0) / p.size(1)) ** 0.5
                p.sub_(distribute_tensor(update, p.device_mesh, p.placements), alpha=group["lr"])


class LocalLion(Optimizer):
    """Steps each entry by itself, on local shards, with momentum in plain tensors."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                own, gradient = parameter.to_local(), parameter.grad.to_local()
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
                own.sub_(momentum.lerp(gradient, 0.1).sign_(), alpha=group["lr"])
                momentum.lerp_(gradient, 0.01)


class Whole(Optimizer):
    """Steps whole matrices; for a DTensor, gathers the gradient and keeps whole state."""

    def __init__(self, params: Any, lr: float = 0.01, every: int = 1) -> None:
        super().__init__(params, {"lr": lr, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                update = self.update(gradient, state, group)
                if hasattr(p, "device_mesh"):
                    update = distribute_tensor(update, p.device_mesh, p.placements)
                p.sub_(update, alpha=group["lr"])

    def update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Shampoo(Whole):
    """Gupta, Koren, Singer 2018: multiplies the gradient by inverse fourth roots of its two second moments."""

    def update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["factors"] = [torch.eye(size, dtype=gradient.dtype) * 1e-2 for size in gradient.shape]
            state["roots"] = [torch.eye(size, dtype=gradient.dtype) for size in gradient.shape]
            state["step"] = 0
        state["factors"][0] += gradient @ gradient.T
        state["factors"][1] += gradient.T @ gradient
        if state["step"] % group["every"] == 0:
            for index, factor in enumerate(state["factors"]):
                values, vectors = torch.linalg.eigh(factor)
                state["roots"][index] = (vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.T
        state["step"] += 1
        left, right = state["roots"]
        return left @ gradient @ right


class Soap(Whole):
    """Vyas et al. 2024: Adam in the eigenbasis of Shampoo's second moments, which the first step only initialises."""

    def update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        first = not state
        if first:
            state |= {"factors": [torch.zeros(size, size, dtype=gradient.dtype) for size in gradient.shape], "step": 0}
            state |= {"mean": torch.zeros_like(gradient), "square": torch.zeros_like(gradient)}
        for factor, product in zip(state["factors"], (gradient @ gradient.T, gradient.T @ gradient), strict=True):
            factor.lerp_(product, 0.05)
        if first:
            state["bases"] = [torch.linalg.eigh(factor)[1] for factor in state["factors"]]
            return torch.zeros_like(gradient)
        left, right = state["bases"]
        state["step"] += 1
        state["mean"].lerp_(gradient, 0.1)
        state["square"].lerp_((left.T @ gradient @ right).square(), 0.05)
        mean = left.T @ state["mean"] @ right / (1 - 0.9 ** state["step"])
        update = left @ (mean / ((state["square"] / (1 - 0.95 ** state["step"])).sqrt() + 1e-8)) @ right.T
        if state["step"] % group["every"] == 0:
            pairs = zip(state["factors"], state["bases"], strict=True)
            state["bases"] = [torch.linalg.qr(factor @ basis)[0] for factor, basis in pairs]
        return update


def perceptron(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(before, after, bias=False) for before, after in pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])


SIZES = (12, 32, 24, 8)


def training(
    make: Callable[[Any], Optimizer], wrap: Callable[[nn.Sequential], nn.Module], *, sizes: Any = SIZES, steps: int = 3,
    between: Callable[[Optimizer], None] = lambda optimizer: None, dtype: torch.dtype = torch.float32, same: int = 1,
) -> Callable[[], None]:  # fmt: skip
    """Return a training of a perceptron; ``same``: ranks with the same samples."""

    def train() -> None:
        model = wrap(perceptron(*sizes).to(dtype))
        optimizer = make(list(model.parameters()))
        torch.manual_seed(7 + dist.get_rank() // same)
        for _ in range(steps):
            loss = nn.functional.mse_loss(
                model(torch.randn(16, sizes[0], dtype=dtype)), torch.randn(16, sizes[-1], dtype=dtype)
            )
            loss.backward()
            optimizer.step()
            between(optimizer)
            optimizer.zero_grad()

    return train


def ddp(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Sequential) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def hybrid(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def in_parts(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
