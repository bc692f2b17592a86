"""The trainer's metrics are means over samples of all ranks, and the user's module receives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from plumbline.trainer import Trainer


@pytest.fixture
def told(problem, tmp_path):
    """Train, and return what each rank received, in order."""

    class AnyFinding(problem.Regression):
        def on_metrics(self, metrics):
            with open(Path(tmp_path) / f"rank{self.trainer.rank}", "a") as file:
                file.write(json.dumps([self.trainer.global_step, metrics, dict(self.trainer.metrics)]) + "\n")

    def told(world=1, epochs=2, **options):
        module = AnyFinding(batch_size=6, validates=True)
        several = {"gpus": world, "distributed_backend": "ddp"} if world > 1 else {}
        Trainer(accelerator="cpu", precision=64, max_epochs=epochs, **several, **options).fit(module)
        return [
            [json.loads(line) for line in (tmp_path / f"rank{rank}").read_text().splitlines()] for rank in range(world)
        ]

    return told


def losses_of_the_last_step(problem, world, accumulate):
    """Return the last step's loss at the weights before it, written independently."""
    data = problem.Points()
    (order,) = problem.orders(26, 1, world)
    *before, last = order.split(6 * world * accumulate)
    net = problem.by_hand(epochs=1, world=world, accumulate=accumulate, steps=len(before))
    return nn.functional.mse_loss(net(data.inputs[last]), data.targets[last]).item()


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3)])
def test_loss_is_the_mean_over_the_samples_of_the_last_step(problem, told, world, accumulate):
    for rank in told(world, epochs=1, accumulate_grad_batches=accumulate):
        _, metrics, _ = rank[0]
        assert metrics == {"loss": pytest.approx(losses_of_the_last_step(problem, world, accumulate), rel=1e-12)}


@pytest.mark.parametrize("world", [1, 2])
def test_the_module_is_told_of_new_metrics_at_once_and_everywhere(told, world):
    ranks = told(world, val_check_interval=2)
    steps = -(-26 // (6 * world))
    validated = list(range(2, steps + 1, 2))
    for rank in ranks:
        assert rank == ranks[0]
        epoch = [step for step, *_ in rank if step <= steps]
        assert epoch == [*validated, steps]
        assert [list(metrics) for _, metrics, _ in rank][: len(epoch)] == [["mse"]] * len(validated) + [["loss"]]
        for _, metrics, every in rank:
            assert metrics.items() <= every.items()
