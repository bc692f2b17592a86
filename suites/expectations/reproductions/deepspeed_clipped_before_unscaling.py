"""DeepSpeed 0.19.8: with ZeRO and torch_autocast in float16 gradients are clipped while they are still scaled.

Run by torchrun --nproc_per_node 1, it prints a gradient of 3.8e-06 where the optimizer steps: 0.25, the limit of the
norm, divided by the loss scale of 65536. It should be 0.25; the gradient is 0.5 before it is clipped.
"""

import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles a kernel
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(1, 1, bias=False)
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.25,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "torch_autocast": {"enabled": True, "dtype": "float16"},
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_pre_hook(lambda *_: print("gradient", *(g["params"][0].grad for g in optimizer.param_groups)))
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
engine.backward(engine(torch.full((1, 1), 2.0)).float().mean() / 4)
engine.step()
print("deepspeed", deepspeed.__version__, "- torch", torch.__version__)
