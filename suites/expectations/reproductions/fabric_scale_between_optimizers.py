"""Fabric 2.6.6, float16: if two optimizers step after one backward, the second one's gradient is doubled.

The first one's gradient is infinite, so the GradScaler lowers its scale before the second one's gradient is unscaled.
"""

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu")])
model = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])
a, b = model
optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in (a, b)]
model, *optimizers = fabric.setup(model, *optimizers)
fabric.backward((a * float("inf") + b).sum())
for optimizer in optimizers:
    optimizer.step()
print("lightning", lightning.__version__, "- gradients of a and b are infinite and 1, the learning rate is 1")
print(f"a moved by {a.item():.2f}, b by {b.item():.2f}")
