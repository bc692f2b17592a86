"""DeepSpeed 0.19.8: with torch_autocast in float16 the schedule goes on at a skipped step; the scale is not saved.

Run by torchrun --nproc_per_node 1 with a new folder as its argument, it prints a rate of 0.5 after a step that was
skipped, where it should be 1, and a loss scale of 65536 where 32768 was saved.
"""

import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles a kernel
deepspeed.init_distributed("gloo")
settings = {"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": True, "dtype": "float16"}}


def engine_of(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)[0]


engine, other = engine_of(torch.nn.Linear(1, 1)), engine_of(torch.nn.Linear(1, 1))
engine.backward(engine(torch.full((1, 1), 1e4)).float().mean())  # times the scale this is no float16
engine.step()
engine.save_checkpoint(sys.argv[1])
other.load_checkpoint(sys.argv[1])
print("deepspeed", deepspeed.__version__, "- rate", engine.get_lr())
print("scale saved", *(one.torch_autocast_z0_gradscaler.get_scale() for one in (engine, other)), "scale loaded")
