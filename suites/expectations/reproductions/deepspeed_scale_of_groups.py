"""DeepSpeed 0.19.8: with ZeRO and torch_autocast in float16 the loss scale grows between the groups of one step.

Run by torchrun --nproc_per_node 1, it prints with which gradients three parameter groups are stepped: 0.25 each, and in
step 667 the last one's is 0.125. The GradScaler is updated after each group, so it has counted 2000 steps by then, and
doubles its scale before the last group is divided by it.
"""

import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles a kernel
deepspeed.init_distributed("gloo")
model = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(3))
model.forward = lambda x: sum(layer(x).float() for layer in model)
settings = {"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": True, "dtype": "float16"}}
settings |= {"gradient_clipping": 0.0, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
optimizer, seen = torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=1e-4), []
optimizer.register_step_pre_hook(lambda *_: seen.append([g["params"][0].grad.tolist() for g in optimizer.param_groups]))
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
for step in range(1, 670):
    engine.backward(engine(torch.ones(1, 1)).mean() / 4)
    engine.step()
    if step > 665:
        print(f"deepspeed {deepspeed.__version__}, step {step}: gradients of the groups {seen[-3:]}")
