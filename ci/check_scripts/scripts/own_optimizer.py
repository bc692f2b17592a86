"""An optimizer that is not from torch.optim, on a model whose parameters are used in the loss directly.

torchrun --standalone --nproc-per-node 2 own_optimizer.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SignMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_(torch.lerp(momentum, parameter.grad, 0.1).sign_(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - group["beta"])


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(10, 8), nn.Linear(12, 8)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, a, b):
        a, b = (nn.functional.normalize(x, dim=1) for x in (self.left(a), self.right(b)))
        return a @ b.T, self.temperature


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Clip())
    optimizer = SignMomentum(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for step in range(4):
        scores, temperature = model(torch.randn(8, 10), torch.randn(8, 12))
        loss = nn.functional.cross_entropy(scores * temperature.exp(), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
