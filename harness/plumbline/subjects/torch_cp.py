"""Training with torch's context parallelism: each rank has the whole model and two pieces of each sequence.

https://docs.pytorch.org/tutorials/prototype/context_parallel.html. Within ``context_parallel``, attention exchanges
keys and values between ranks, on GPUs only. Users must handle all other operations on a whole sequence, so this
supports only the workloads' transformer.
"""

import torch.distributed
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from plumbline.subjects.declare import subject
from plumbline.subjects.torch_base import CAPABILITIES, OneDevice, fit
from plumbline.subjects.torch_fsdp import REFUSED, joined_mesh

HEADS = 2


@subject(
    name="torch",
    backends=["cp"],
    precisions={"cuda": ["32", "bf16"]},  # its kernels do not support float64
    capabilities=CAPABILITIES - REFUSED,
    library="torch",
    devices="own",
)
def train(job):
    fit(job, Cp(job))


class Cp(OneDevice):
    """The model for the tokens of this rank. Gradients are averaged over all ranks."""

    def __init__(self, job):
        self.mesh = joined_mesh(job)["cp"]
        self.model = self.bare = job.model().to(job.device)
        self.model.forward = self.forward
        self.model.attention.forward = self.attention
        self.optimizers = job.optimizers(self.model.parameters())
        self.length = job.dataset[0]["tokens"].shape[0] - 1

    def backward_of(self, last):
        # The context reduces the positions to those of this rank. Attention exchanges keys and values in forward and
        # backward.
        self.places = torch.arange(self.length, device=next(self.model.parameters()).device)
        return context_parallel(self.mesh, buffers=[self.places], buffer_seq_dims=[0], no_restore_buffers={self.places})

    def forward(self, batch):
        model = self.model
        x = model.tokens(batch["tokens"][:, self.places]) + model.places(self.places)
        x = x + model.attention(model.norm_1(x))
        x = x + model.feed(model.norm_2(x))
        return self.gathered(model.head(model.norm_3(x)), 1)[:, self.gathered(self.places, 0).argsort()]

    def attention(self, x):
        layer = self.model.attention
        query, key, value = (
            one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (layer.query, layer.key, layer.value)
        )
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            out = scaled_dot_product_attention(query, key, value, is_causal=True)
        return layer.out(out.transpose(1, 2).flatten(2))

    def gathered(self, x, dim):
        # All ranks compute the same loss from the gathered outputs, and the gather's backward sums their gradients, so
        # gradients are too large by a factor of the number of ranks.
        return all_gather_tensor_autograd(x.contiguous(), dim, self.mesh)

    def before_step(self):
        # Each rank has the gradients of its own tokens, times the number of ranks.
        for parameter in self.model.parameters():
            torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)
