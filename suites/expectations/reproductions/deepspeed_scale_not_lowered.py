"""DeepSpeed 0.19.8: with ZeRO and torch_autocast in float16 a step that is skipped does not lower the loss scale.

Run by torchrun --nproc_per_node 1, it prints scales of 65536 after four steps, all of them skipped, for ZeRO's stages 1
to 3; without ZeRO (stage 0) the first step halves the scale, and the others are taken: the weight is no longer 0.
"""

import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles a kernel
deepspeed.init_distributed("gloo")
settings = {"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": True, "dtype": "float16"}}
for stage in range(4):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = settings | {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    scaler = engine.optimizer.torch_autocast_gradscaler if stage else engine.torch_autocast_z0_gradscaler
    scales = []
    for _ in range(4):
        engine.backward(engine(torch.full((1, 1), 1.5)).float().mean())
        engine.step()
        scales.append(scaler.get_scale())
    with deepspeed.zero.GatheredParameters(model.parameters(), enabled=stage == 3):
        print("stage", stage, "scales", scales, "weight", model.weight.item())
