"""torch 2.13.0: if the GradScaler skips the first step, fused SGD with momentum continues with uninitialised memory.

Prints 0.9 for each implementation if all is right. With the bug, fused SGD prints whatever was in freed memory.
"""

import torch

print("torch", torch.__version__, "- one weight of 1, a gradient of 1 and a rate of 0.1, after a step that overflowed")
for fused in (False, True):
    weight = torch.nn.Parameter(torch.ones(100_000))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    used = [torch.full((100_000,), 7e30) for _ in range(4)]
    weight.grad = torch.full_like(weight, torch.inf)
    del used  # freed memory that the optimizer may get
    scaler.step(optimizer)
    scaler.update()
    weight.grad = torch.full_like(weight, scaler.get_scale())
    scaler.step(optimizer)
    print(f"fused={fused}: the weights are between {weight.min().item():.3g} and {weight.max().item():.3g}")
