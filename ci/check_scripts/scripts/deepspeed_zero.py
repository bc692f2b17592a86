"""DeepSpeed on the CPU: ZeRO stage 2, accumulation over two batches, clipping, its own engine in place of the loop.

deepspeed --num_accelerators 2 deepspeed_zero.py
"""

import os
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

# A shared-memory kernel would be compiled at the first start, which needs a compiler.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

# DeepSpeed refuses float16 on CPUs, where it is only slow.
type(get_accelerator()).is_fp16_supported = lambda self: True

FLOAT16 = "FLOAT16" in os.environ

SETTINGS = {
    "fp16": {"enabled": FLOAT16, "initial_scale_power": 12},
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": int(os.environ.get("STAGE", "2"))},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
}


def main():
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 3))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
    torch.manual_seed(40 + rank)
    for batch in range(8):
        x = torch.randn(8, 12)
        loss = nn.functional.cross_entropy(engine(x.half() if FLOAT16 else x).float(), x[:, :3].argmax(1))
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} batch {batch} loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
