"""Two stages of torch.distributed.pipelining, GPipe with four micro-batches.

torchrun --standalone --nproc-per-node 2 pipeline_stages.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = (nn.Sequential(nn.Linear(12, 48), nn.ReLU()), nn.Sequential(nn.Linear(48, 4)))[rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in range(5):
        x, y = torch.randn(16, 12), torch.randint(0, 4, (16,))
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses = []
            schedule.step(target=y, losses=losses)
            print(f"step {step} loss {torch.stack(losses).mean().item()!r}", flush=True)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
