"""DeepSpeed 0.19.8: micro-batches are counted across epochs, and the last window is never stepped.

Run with torchrun --nproc_per_node 1. Prints 1 step after 5 batches and 3 after 10, instead of 2 and 4. The second step
uses the last two batches of one epoch and the first of the next; its gradient is also 1.
"""

import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # prevents compiling a kernel
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(1, 1, bias=False)
settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3, "gradient_clipping": 0.0}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_pre_hook(lambda *_: print(f"a step with gradient {model.weight.grad.item():.4f}"))
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
print("deepspeed", deepspeed.__version__, "- 5 batches an epoch, each with gradient 1, in windows of 3 and 2")
for epoch in range(2):
    for batch in torch.ones(5, 1, 1):
        engine.backward(engine(batch).mean())
        engine.step()
    print(f"after epoch {epoch}: {engine.global_steps} steps")
