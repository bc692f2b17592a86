"""Lightning's own-trainer example uses its counter of optimizer steps to decide when to step next.

Prints the condition and the weight for six batches in windows of two. The weight moves at the first batch; then the
counter stays 1, which is not a multiple of 2.
"""

import torch

weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)
global_step, grad_accum_steps = 0, 2
for batch_idx in range(6):
    should_optim_step = global_step % grad_accum_steps == 0
    weight.sum().backward()
    if should_optim_step:
        optimizer.step()
        optimizer.zero_grad()
    global_step += int(should_optim_step)
    gradient = 0 if weight.grad is None else weight.grad.item()
    print(f"batch {batch_idx}: steps so far {global_step}, weight {weight.item():g}, gradient kept {gradient:g}")
