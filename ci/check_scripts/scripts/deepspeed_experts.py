"""DeepSpeed's mixture of experts on four ranks: two hold the same experts, ZeRO shards the states of all layers.

deepspeed --num_accelerators 4 deepspeed_experts.py
"""

import sys

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

# A shared-memory kernel would be compiled at the first start, which needs a compiler.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

SETTINGS = {
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        expert = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.experts = MoE(16, expert, num_experts=4, ep_size=2, capacity_factor=2.0)

    def forward(self, x):
        hidden = self.first(x)
        mixed, balance, _ = self.experts(hidden)
        return self.last(hidden + mixed), balance


def main():
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # each rank draws its own experts; the engine broadcasts the other layers
    model = Experts().bfloat16()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=SETTINGS)
    draws = torch.Generator().manual_seed(40 + rank)
    for batch in range(6):
        x, y = torch.randn(8, 16, generator=draws), torch.randn(8, 4, generator=draws)
        outputs, balance = engine(x.bfloat16())
        loss = nn.functional.mse_loss(outputs.float(), y) + 0.01 * balance.float()
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} batch {batch} loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
