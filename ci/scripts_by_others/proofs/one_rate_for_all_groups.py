"""nanoGPT sets one learning rate in all parameter groups before each step, even if they had different ones.

Prints the rates of two groups before and after its two lines.
"""

import torch

weight, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.AdamW([{"params": [weight], "lr": 0.01}, {"params": [bias], "lr": 0.002}])
lr = optimizer.param_groups[0]["lr"]
print("as made:", [group["lr"] for group in optimizer.param_groups])
for param_group in optimizer.param_groups:
    param_group["lr"] = lr
print("at the step:", [group["lr"] for group in optimizer.param_groups])
