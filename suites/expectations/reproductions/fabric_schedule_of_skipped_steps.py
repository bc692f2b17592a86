"""Fabric 2.6.6: in float16, the optimizer does not show a loop that its step was skipped.

Prints the same return value for a step that was taken and for one that was skipped because its gradient is infinite. A
loop that steps its scheduler after each of them halves the rate twice.
"""

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

half = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1.0))
fabric = Fabric(accelerator="cpu", devices=1, plugins=[half])
layer = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(layer.weight)
model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
print("lightning", lightning.__version__, "- the second gradient is infinite: weight and rate should both stay")
for factor in (1.0, float("inf")):
    fabric.backward(model(torch.ones(1, 1)).sum() * factor)
    answer = optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step() returned {answer}, weight {layer.weight.item():.3f}, rate now {optimizer.param_groups[0]['lr']:.3f}")
