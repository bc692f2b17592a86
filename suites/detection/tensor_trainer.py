"""A right tensor-parallel trainer: a group's ranks hold parts of the linear layers and see the same samples."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from mesh_trainer import Copied, Gathered, MeshTrainer, Parted, Reduced, local, part
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear


class TensorParallel(MeshTrainer):
    """Divides linear layers by columns and by rows in turn; everything else is replicated.

    The input and the output of a divided layer are whole on every rank.
    """

    def divide(self, model):
        by_columns, by_rows = self.plan(model)
        for layer in by_columns:
            self.shard(layer, weight=0, bias=0)
            layer.forward = partial(self.column_forward, layer)
        for layer in by_rows:
            self.shard(layer, weight=1)
            layer.forward = partial(self.row_forward, layer)

    def plan(self, model):
        """Return the column-parallel and the row-parallel layers: all that share no weight with another layer."""
        uses = [id(p) for module in model.modules() for p in module.parameters(recurse=False)]
        linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        linear = [layer for layer in linear if uses.count(id(layer.weight)) == 1]
        return linear[::2], linear[1::2]

    def shard(self, layer, **dims):
        """Replace a layer's tensors with this rank's parts along the given dimensions."""
        for name, dim in dims.items():
            if (whole := getattr(layer, name)) is not None:
                own = part(whole.detach(), dim, self.group("tp")).clone()
                shape = {"shape": whole.shape, "stride": whole.stride()}
                divided = DTensor.from_local(own, self.mesh["tp"], [Shard(dim)], run_check=False, **shape)
                setattr(layer, name, nn.Parameter(divided, requires_grad=whole.requires_grad))

    def column_forward(self, layer, x):
        bias = None if layer.bias is None else layer.bias.to_local()
        own = linear(self.enter(x), layer.weight.to_local(), bias)
        return Gathered.apply(own, -1, self.group("tp"), layer.out_features)

    def row_forward(self, layer, x):
        own = linear(Parted.apply(x, -1, self.group("tp")), layer.weight.to_local())
        total = self.reduce(own)
        return total if layer.bias is None else total + layer.bias

    def enter(self, x):
        """Return the input of a column-parallel layer."""
        return Copied.apply(x, self.group("tp"))

    def reduce(self, x):
        """Return the sum of the ranks' outputs of a row-parallel layer."""
        return Reduced.apply(x, self.group("tp"))

    def squared_norm(self):
        divided = sum(self.squares(divided=True))
        dist.all_reduce(divided, group=self.group("tp"))
        return divided + sum(self.squares(divided=False))

    def squares(self, divided):
        """Yield the squared norm of this rank's part of each divided gradient, or of each replicated one."""
        for parameter in self.model.parameters():
            if parameter.grad is not None and isinstance(parameter, DTensor) == divided:
                yield local(parameter.grad).double().square().sum()


class ActivationsInParts(TensorParallel):
    """Each rank drops units of its own part of an activation, between a column- and a row-parallel layer.

    Supports the model of ``random-masks``.
    """

    def plan(self, model):
        return [model.first], [model.middle]

    def divide(self, model):
        super().divide(model)
        self.state = self.own_state()
        model.drop_first.coins.forward = partial(self.drawn_for_own_part, model.drop_first.coins.forward)

    def own_state(self):
        """Return the state of this rank's own generator."""
        return torch.Generator().manual_seed(self.job.seed + 1000 + self.job.rank).get_state()

    def drawn_for_own_part(self, draw, like, batch):
        common = torch.get_rng_state()
        torch.set_rng_state(self.state)
        drawn = draw(like, batch)
        self.state = torch.get_rng_state()
        torch.set_rng_state(common)
        return drawn

    def column_forward(self, layer, x):
        return linear(self.enter(x), layer.weight.to_local(), layer.bias.to_local())

    def row_forward(self, layer, x):
        return self.reduce(linear(x, layer.weight.to_local())) + layer.bias


class TensorParallelExperts(TensorParallel):
    """Divides the layers of experts, so each rank computes a part of the weighted sum."""

    def plan(self, model):
        return [expert[0] for expert in model.experts], [expert[2] for expert in model.experts]

    def divide(self, model):
        super().divide(model)
        model.experts.forward = partial(self.weighted_sum, model.experts)

    def weighted_sum(self, experts, x, gates):
        group, x, gates = self.group("tp"), self.enter(x), self.enter_gates(gates)
        total = torch.zeros_like(x)
        for number, (first, middle, last) in enumerate(experts):
            inner = middle(linear(x, first.weight.to_local(), first.bias.to_local()))
            bias = Copied.apply(last.bias, group) / group.size()
            total = total + gates[:, number, None] * linear(inner, last.weight.to_local(), bias)
        return Reduced.apply(total, group)

    def enter_gates(self, gates):
        """Return the gates that each rank multiplies its outputs by."""
        return Copied.apply(gates, self.group("tp"))
