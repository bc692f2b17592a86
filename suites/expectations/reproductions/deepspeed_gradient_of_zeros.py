"""DeepSpeed 0.19.8: a parameter that no loss depends on gets a gradient of zeros, so weight decay changes it.

Run with torchrun --nproc_per_node 1. Prints 0.95 for the unused weight; in a hand-written loop it stays 1.
"""

import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # prevents compiling a kernel
deepspeed.init_distributed("gloo")
model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in ("used", "unused")})
model.forward = model["used"].forward
for weight in model.parameters():
    torch.nn.init.ones_(weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
engine.backward(engine(torch.ones(1, 1)).mean())
engine.step()
print("deepspeed", deepspeed.__version__, *(f"- {name}: {layer.weight.item():.2f}" for name, layer in model.items()))
