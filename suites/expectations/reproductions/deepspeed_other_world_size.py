"""DeepSpeed 0.19.8: a ZeRO checkpoint of two ranks cannot be loaded on another number of ranks.

Run with torchrun --nproc_per_node 2, and then with torchrun --nproc_per_node 3 and the same folder as its argument. The
second run raises ZeRORuntimeException.
"""

import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # prevents compiling a kernel
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
settings |= {"zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
print("deepspeed", deepspeed.__version__, "- ranks:", torch.distributed.get_world_size())
if torch.distributed.get_world_size() == 2:
    engine.save_checkpoint(sys.argv[1])
else:
    engine.load_checkpoint(sys.argv[1])
