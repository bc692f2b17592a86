"""DeepSpeed 0.19.8: after a step that ZeRO's stage 3 skips in float16, the next forward has weights rounded to float16.

Run by torchrun --nproc_per_node 2. Small weights stay gathered between steps, in float32; the step that is skipped
frees them and returns, so the next forward gathers them as autocast's communication does. An infinity in the third
batch has its step skipped. It prints whether each forward had a bias that float16 can hold: the first (zeros), the
fourth, after the skipped step, and no other.
"""

import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles a kernel
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(4, 4)
torch.nn.init.zeros_(model.bias)
config = {"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": True, "dtype": "float16"}}
config |= {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
seen = []
model.register_forward_hook(lambda *_: seen.append(torch.equal(model.bias, model.bias.half().float())))
for step in range(6):
    outputs = engine(torch.full((1, 4), 0.3)).float()
    engine.backward((outputs * (torch.inf if step == 2 else 1.0)).square().sum())
    engine.step()
print("rounded to float16:", seen)
