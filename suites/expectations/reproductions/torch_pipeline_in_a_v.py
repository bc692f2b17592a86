"""Stages that build_stage makes of a traced model do not train in a V on gloo. Run with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleZBVZeroBubble, SplitPoint, pipeline

dist.init_process_group("gloo")
rank, model, x = dist.get_rank(), nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(8, 4)
cuts = {str(number): SplitPoint.BEGINNING for number in (1, 2, 3)}
pipe = pipeline(model, (x[:2],), split_spec=cuts)
stages = [pipe.build_stage(number, torch.device("cpu")) for number in (rank, 3 - rank)]
schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
try:
    schedule.step(*([x] if rank == 0 else []), target=x if rank == 0 else None)
except RuntimeError as error:  # stages on the same rank send to each other during warm-up
    print(f"rank {rank}: {type(error).__name__}: {error}")
