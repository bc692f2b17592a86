"""Training with torch's context parallelism: each rank has the whole model, and two pieces of each sequence.

https://docs.pytorch.org/tutorials/prototype/context_parallel.html. Within ``context_parallel`` attention exchanges keys
and values between the ranks. It does so for the kernels of GPUs alone. What else a model does with a whole sequence is
left to its users, so this trains the transformer of the workloads.
"""

from __future__ import annotations

import torch.distributed
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from plumbline.subjects.declare import subject
from plumbline.subjects.handwritten import CAPABILITIES, OneDevice, fit
from plumbline.subjects.torch_fsdp import REFUSED

HEADS = 2


@subject(
    name="torch",
    backends=["cp"],
    precisions={"cuda": ["32", "bf16"]},  # no kernel that exchanges keys computes in float64
    capabilities=[name for name in CAPABILITIES if name not in REFUSED],
    library="torch",
)
def train(job):
    fit(job, Cp(job))


class Cp(OneDevice):
    """The model for the tokens of this rank; gradients are averaged over all ranks."""

    def __init__(self, job):
        torch.cuda.set_device(job.device)
        torch.distributed.init_process_group(job.comm)
        self.mesh = init_device_mesh(job.device.type, tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))["cp"]
        self.model = self.bare = job.model().to(job.device)
        self.model.forward = self.forward
        self.model.attention.forward = self.attention
        self.optimizers = job.optimizers(self.model.parameters())
        self.length = job.dataset[0]["tokens"].shape[0] - 1

    def backward_of(self, last):
        """Leave of the positions those of this rank, and exchange keys and values, in forward and backward."""
        self.places = torch.arange(self.length, device=next(self.model.parameters()).device)
        return context_parallel(self.mesh, buffers=[self.places], buffer_seq_dims=[0], no_restore_buffers={self.places})

    def forward(self, batch):
        """Return the outputs for all tokens, of which this rank computes its own."""
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
        """Return all ranks' parts. All ranks take the same loss of them, so gradients are too large by their number."""
        return all_gather_tensor_autograd(x.contiguous(), dim, self.mesh)

    def before_step(self):
        """Average the gradients: each rank's are those of its own tokens, times the number of ranks."""
        for parameter in self.model.parameters():
            torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)
