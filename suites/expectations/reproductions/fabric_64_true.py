"""Fabric 2.6.6: with precision="64-true", a float64 model's outputs are cast to float32, and so is the loss.

Prints a relative error of the gradient of about 1e-8; in float64, it is about 1e-16.
"""

import lightning
import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
torch.manual_seed(0)
model, x = torch.nn.Linear(4, 2).double(), torch.randn(8, 4, dtype=torch.float64)
(right,) = torch.autograd.grad(model(x).square().mean(), model.weight)
output = fabric.setup(model)(x)
(got,) = torch.autograd.grad(output.square().mean(), model.weight)
print("lightning", lightning.__version__, "- weight", model.weight.dtype, "output", output.dtype)
print(f"relative error of the gradient {((got - right).norm() / right.norm()).item():.1e}, float64's epsilon 2.2e-16")
