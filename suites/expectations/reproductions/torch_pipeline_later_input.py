"""An input that only a later stage uses does not reach it. Run with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline


class Scaled(nn.Module):
    """Two layers; a column of the batch scales the second one's output."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.last(self.first(x)) * scale


dist.init_process_group("gloo")
inputs = torch.randn(4, 4), torch.randn(4, 1)
pipe = pipeline(Scaled(), inputs, split_spec={"last": SplitPoint.BEGINNING})
schedule = ScheduleGPipe(pipe.build_stage(dist.get_rank(), torch.device("cpu")), 2)
try:
    schedule.step(*([torch.cat((inputs[0], inputs[0]))] if dist.get_rank() == 0 else []))
except Exception as error:
    print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
