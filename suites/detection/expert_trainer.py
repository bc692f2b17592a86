"""A right expert-parallel trainer: each rank holds some experts, which compute the rows of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mesh_trainer import GatheredForOwnUse, MeshTrainer, ReducedForOwnUse
from torch import nn


class ExpertParallel(MeshTrainer):
    """Averages all gradients but the experts', which already come from all ranks' losses and are only divided."""

    def divide(self, model):
        model.experts = OwnExperts(self, model.experts)

    def own_experts(self, count):
        """Return the indices of the experts that this rank holds."""
        return torch.arange(count).tensor_split(self.job.world_size)[self.job.rank].tolist()

    def gathered(self, x):
        """Return the rows of all ranks."""
        group = self.group("ep")
        return GatheredForOwnUse.apply(x, 0, group, len(x) * group.size())

    def reduced(self, x):
        """Return, for this rank's rows, the sum of all ranks' expert outputs."""
        return ReducedForOwnUse.apply(x, 0, self.group("ep"))

    def gated(self, gates):
        """Return the gates by which this rank weights its experts' outputs, for the rows of all ranks."""
        return gates

    def computed(self, expert, x, rows):
        """Return an expert's outputs for ``x``; ``rows`` are the indices of these rows among all ranks' rows."""
        return expert(x)

    def of_experts(self):
        """Return the gradients of this rank's experts."""
        return {name: gradient for name, gradient in self.gradients().items() if name.startswith("experts.")}

    def of_the_rest(self):
        """Return the gradients of all parameters but the experts'."""
        return {name: gradient for name, gradient in self.gradients().items() if not name.startswith("experts.")}

    def synchronize(self):
        for gradient in self.of_the_rest().values():
            dist.all_reduce(gradient)
        for gradient in self.gradients().values():
            gradient /= self.job.world_size

    def squared_norm(self):
        experts = squares(self.of_experts())
        dist.all_reduce(experts)
        return squares(self.of_the_rest()) + experts


def squares(gradients):
    """Return the squared norm of all ``gradients`` together."""
    return sum((one.double().square().sum() for one in gradients.values()), torch.zeros((), dtype=torch.float64))


class OwnExperts(nn.ModuleDict):
    """The experts of one rank, under their names in the whole model."""

    def __init__(self, trainer, experts):
        super().__init__({str(number): experts[number] for number in trainer.own_experts(len(experts))})
        self.__dict__["trainer"] = trainer  # not a submodule

    def forward(self, x, gates):
        rows, weights = self.trainer.gathered(x), self.trainer.gated(self.trainer.gathered(gates))
        total = torch.zeros_like(rows, dtype=weights.dtype)
        for number, expert in self.items():
            used = weights[:, int(number)].nonzero().flatten()
            made = weights[used, int(number), None] * self.trainer.computed(expert, rows[used], used)
            total = total.index_add(0, used, made.to(total.dtype))
        return self.trainer.reduced(total)
