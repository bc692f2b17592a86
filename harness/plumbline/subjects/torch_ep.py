"""Training with expert parallelism: each rank holds some of the experts, and samples are sent to their experts.

torch has no module for expert parallelism. As in libraries for it, all_to_all_single exchanges the samples. The other
parameters are trained as with DistributedDataParallel: each rank holds all of them, and their gradients are averaged.
"""

import torch.distributed
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from plumbline.subjects.declare import subject
from plumbline.subjects.torch_base import CAPABILITIES, OneDevice, fit, scale_gradients
from plumbline.subjects.torch_fsdp import broadcast_buffers, load_parts, save_parts

# No float16: GradScaler checks only the gradients of its own rank, and ranks have different experts.
PRECISIONS = ["64", "32", "bf16", "bf16-true"]
REFUSED = {"sparse-gradients", "unused-parameters", "several-optimizers"}


@subject(name="torch", backends=["ep"], precisions=PRECISIONS, capabilities=CAPABILITIES - REFUSED, library="torch")
def train(job):
    fit(job, Ep(job))


class Ep(OneDevice):
    """The model with only this rank's experts."""

    def __init__(self, job):
        torch.distributed.init_process_group(job.comm)
        self.model = self.bare = job.model().to(job.device)
        self.model.experts = OwnExperts(self.model.experts, job.rank, job.world_size)
        self.model.register_forward_pre_hook(broadcast_buffers, prepend=True)
        self.own = {id(parameter) for parameter in self.model.experts.parameters()}
        self.world_size = job.world_size
        self.optimizers = job.optimizers(self.model.parameters())

    def val_share(self, job):
        return range(len(job.val_dataset))  # samples are exchanged, so all ranks need the same number

    def save(self, file, others):
        save_parts(self.model, self.optimizers, file, others)

    def load(self, file, others):
        return load_parts(self.model, self.optimizers, file, others)

    def before_step(self):
        # An expert's gradients are already summed over the losses of all ranks.
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
        scale_gradients(self.model.parameters(), (squares[0] + experts.cpu()).sqrt(), max_norm)


class OwnExperts(nn.ModuleDict):
    """The experts of one rank, under their names in the whole model."""

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
        shares = [gates[one][:, share] for one, share in zip(rows, self.shares, strict=True)]
        columns = max(map(len, self.shares))  # all ranks need the same number
        weights = torch.cat([nn.functional.pad(share, (0, columns - share.shape[1])) for share in shares])
        rows = torch.cat(rows)
        inputs, weights = exchange(x[rows], received, sent), exchange(weights, received, sent)
        outputs = torch.zeros_like(inputs, dtype=weights.dtype)
        for number, expert in self.items():
            place = int(number) - self.first
            own = weights[:, place].nonzero().flatten()
            outputs = outputs.index_add(0, own, (weights[own, place, None] * expert(inputs[own])).to(outputs.dtype))
        return torch.zeros_like(x, dtype=gates.dtype).index_add(0, rows, exchange(outputs, sent, received))


def exchange(rows, received, sent):
    """Exchange rows between ranks. ``received`` and ``sent`` are the numbers of rows from and to each rank."""
    return all_to_all_single_autograd(rows.contiguous(), received, sent, torch.distributed.group.WORLD).contiguous()
