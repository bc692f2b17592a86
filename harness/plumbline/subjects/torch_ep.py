"""Training with expert parallelism: each rank holds some of the experts, and samples travel to the experts they use.

torch has no module for it; the exchange is its all_to_all_single, as libraries for it call it. What is no expert is
trained as with DistributedDataParallel: each rank has all of it, and its gradients are averaged.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from plumbline.subjects.declare import subject
from plumbline.subjects.handwritten import CAPABILITIES, OneDevice, fit
from plumbline.subjects.torch_checkpoint import load_parts, save_parts
from plumbline.subjects.torch_fsdp import broadcast_buffers

# GradScaler looks at the gradients of a rank alone, and its experts are no other's: no float16.
PRECISIONS = ["64", "32", "bf16"]
REFUSED = ("sparse-gradients", "unused-parameters", "several-optimizers")


@subject(
    name="torch",
    backends=["ep"],
    precisions=PRECISIONS,
    capabilities=[name for name in CAPABILITIES if name not in REFUSED],
    library="torch",
)
def train(job):
    fit(job, Ep(job))


class Ep(OneDevice):
    """The model with its experts replaced by those of this rank."""

    def __init__(self, job):
        torch.distributed.init_process_group(job.comm)
        self.model = self.bare = job.model().to(job.device)
        self.model.experts = OwnExperts(self.model.experts, job.rank, job.world_size)
        self.model.register_forward_pre_hook(broadcast_buffers, prepend=True)
        self.own = {id(parameter) for parameter in self.model.experts.parameters()}
        self.world_size = job.world_size
        self.optimizers = job.optimizers(self.model.parameters())

    def backward_of(self, last):
        return nullcontext()

    def val_share(self, job):
        """Return all of them: samples are exchanged, so all ranks need equally many."""
        return range(len(job.val_dataset))

    def save(self, file, others):
        save_parts(self.model, self.optimizers, file, others)

    def load(self, file, others):
        return load_parts(self.model, self.optimizers, file, others)

    def before_step(self):
        """Average over the ranks; an expert has the gradients of all ranks' losses, whose mean is the loss."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                if id(parameter) not in self.own:
                    torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.world_size

    def clip(self, max_norm):
        squares = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                squares[id(parameter) in self.own] += parameter.grad.double().square().sum().cpu()
        experts = squares[1].to(next(self.model.parameters()).device)
        torch.distributed.all_reduce(experts)
        norm = (squares[0] + experts.cpu()).sqrt()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= min(1.0, max_norm / (float(norm) + 1e-6))


class OwnExperts(nn.ModuleDict):
    """The experts of one rank, under the names that they have in the whole model."""

    def __init__(self, experts, rank, world_size):
        shares = torch.arange(len(experts)).tensor_split(world_size)
        super().__init__({str(number): experts[number] for number in shares[rank].tolist()})
        self.shares = [share.tolist() for share in shares]
        self.first = self.shares[rank][0]

    def forward(self, x, gates):
        rows = [gates[:, share].any(1).nonzero().flatten() for share in self.shares]
        sent = [len(one) for one in rows]
        received = torch.empty(len(sent), dtype=torch.int64, device=x.device)
        torch.distributed.all_to_all_single(received, torch.tensor(sent, device=x.device))
        received = received.tolist()
        weights = torch.cat([self._padded(gates[one][:, share]) for one, share in zip(rows, self.shares, strict=True)])
        rows = torch.cat(rows)
        inputs, weights = exchange(x[rows], received, sent), exchange(weights, received, sent)
        outputs = torch.zeros_like(inputs, dtype=weights.dtype)
        for number, expert in self.items():
            place = int(number) - self.first
            own = weights[:, place].nonzero().flatten()
            outputs = outputs.index_add(0, own, (weights[own, place, None] * expert(inputs[own])).to(outputs.dtype))
        return torch.zeros_like(x, dtype=gates.dtype).index_add(0, rows, exchange(outputs, sent, received))

    def _padded(self, gates):
        """Return the gates for the experts of one rank, with as many columns as any rank has experts."""
        return nn.functional.pad(gates, (0, max(map(len, self.shares)) - gates.shape[1]))


def exchange(rows, received, sent):
    """Return the rows that the ranks send to this one, as many as ``received`` says, for ``sent`` ones of its own."""
    return all_to_all_single_autograd(rows.contiguous(), received, sent, torch.distributed.group.WORLD).contiguous()
