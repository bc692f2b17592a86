"""A student and its mean teacher: the teacher is an exponential average of the student and gives the targets.

torchrun --standalone --nproc-per-node 2 ema_teacher.py
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def update_teacher(teacher, student, decay=0.9):
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.mul_(decay).add_(new.detach(), alpha=1 - decay)
    for old, new in zip(teacher.buffers(), student.buffers(), strict=True):
        old.copy_(new)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    student = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 10))
    teacher = copy.deepcopy(student).requires_grad_(False)
    student = DistributedDataParallel(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(50 + rank)
    for step in range(5):
        picture = torch.randn(12, 20)
        one, two = picture + 0.1 * torch.randn_like(picture), picture + 0.1 * torch.randn_like(picture)
        with torch.no_grad():
            target = F.softmax(teacher(two) / 0.5, dim=-1)
        loss = -(target * F.log_softmax(student(one), dim=-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_teacher(teacher, student.module)
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del student
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
