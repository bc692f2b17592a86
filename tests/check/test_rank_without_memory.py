"""A rank without memory for a replay does not make the others wait."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce, get_rank

from plumbline.check.function import check_function
from plumbline.check.verdict.verdict import Answer, answer_of


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        whole = part.clone()
        all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class _Parts(nn.Module):
    """A layer of which each rank holds some inputs; rank 1 runs out of memory in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 2, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dtype == torch.float64 and get_rank() == 1:
            raise torch.OutOfMemoryError("no memory is left")
        return _Summed.apply(self.part(inputs.chunk(2, 1)[get_rank()]))


def train() -> float:
    torch.manual_seed(get_rank())
    model = _Parts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        inputs, labels = torch.randn(6, 8, generator=generator), torch.randint(2, (6,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_all_ranks_say_which_of_them_has_no_memory_and_the_training_goes_on() -> None:
    checked = check_function(train, 2, steps=2, timeout=30)  # less than ranks wait for each other
    assert len(set(checked.values)) == 1
    (training,) = checked.trainings
    assert answer_of(training) is Answer.NOT_JUDGED
    (said,) = [one.message for one in training.findings if one.check == "gradients"]
    assert "rank 1: no memory is left to run it again" in said
