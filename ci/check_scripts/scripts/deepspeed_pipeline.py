"""DeepSpeed's pipeline engine: two stages, each on two ranks, and two micro-batches a step.

deepspeed --num_accelerators 4 deepspeed_pipeline.py

Set DTYPE=bfloat16 to train in bfloat16 with clipped gradients.
"""

import os
import sys
from itertools import pairwise

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

# A shared-memory kernel would be compiled at the first start, which needs a compiler.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

IN_16_BITS = os.environ.get("DTYPE") == "bfloat16"
DTYPE = torch.bfloat16 if IN_16_BITS else torch.float32
SETTINGS = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": IN_16_BITS},
    "gradient_clipping": 0.02 if IN_16_BITS else 0.0,
}


def batches(rank):
    draws = torch.Generator().manual_seed(40 + rank)
    while True:
        yield torch.randn(8, 16, generator=draws).to(DTYPE), torch.randn(8, 4, generator=draws).to(DTYPE)


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    sizes = (16, 32, 32, 16, 4)
    linear = [LayerSpec(nn.Linear, size, then) for size, then in pairwise(sizes)]
    layers = [layer for one in linear for layer in (one, LayerSpec(nn.GELU))][:-1]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=SETTINGS)
    data = batches(engine.grid.get_data_parallel_rank())
    for step in range(5):
        loss = engine.train_batch(data)
        print(f"rank {torch.distributed.get_rank()} step {step} loss {float(loss)!r}", flush=True)


if __name__ == "__main__":
    main()
