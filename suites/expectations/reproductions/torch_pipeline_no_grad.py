"""A traced pipeline loses the operations that a model runs under no_grad. Run with python; needs no process group."""

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline


class Remembering(nn.Module):
    """Two layers; a buffer stores the first one's bias at the last forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("latest", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.latest.copy_(self.first.bias)
        return self.last(self.first(x))


try:
    pipe = pipeline(Remembering(), (torch.randn(2, 4),), split_spec={"last": SplitPoint.BEGINNING})
    print("the first stage returns", pipe.get_stage_module(0)(torch.randn(2, 4)).shape)
except (AttributeError, RuntimeError) as error:  # the block and the first stage are both called submod_…
    print(f"{type(error).__name__}: {error}")
