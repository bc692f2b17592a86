"""DeepSpeed 0.19.8: in a pipeline without ZeRO, all stages clip their gradients by the first stage's norm.

Run with torchrun --nproc_per_node 2. Prints a gradient of 1 on rank 0 and 0.5 on rank 1. Before clipping, the gradients
are 4 and 2, so the norm is the root of 20. With a limit of 1, they should be 0.8944 and 0.4472.
"""

import sys

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # prevents compiling a kernel
deepspeed.init_distributed("gloo")
layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
for layer, weight in zip(layers, (1.0, 2.0), strict=True):
    torch.nn.init.constant_(layer.weight, weight)
model = PipelineModule(layers, num_stages=2, loss_fn=lambda outputs, labels: (outputs * labels).mean())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
rank = torch.distributed.get_rank()


def show(*_):
    print(f"deepspeed {deepspeed.__version__}, rank {rank}: gradient", *(one.grad.item() for one in model.parameters()))


optimizer.register_step_pre_hook(show)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
engine.train_batch(iter([(torch.ones(1, 1), torch.full((1, 1), 2.0))]))
