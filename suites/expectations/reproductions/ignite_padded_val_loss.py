"""Ignite 0.5.5, two ranks: a loss over auto_dataloader counts the samples that fill up the ranks' shares.

Run with torchrun --nproc_per_node 2. Prints 2.5 for samples with losses 4, 1 and 1; the first one fills up the second
rank's share.
"""

import ignite
import ignite.distributed as idist
import torch
from ignite.engine import create_supervised_evaluator
from ignite.metrics import Loss


def _both(batch, device, non_blocking):
    return batch, batch


def _evaluate(local_rank):
    evaluator = create_supervised_evaluator(torch.nn.Identity(), prepare_batch=_both)
    Loss(lambda output, target: output.mean()).attach(evaluator, "loss")
    loader = idist.auto_dataloader(torch.tensor([[4.0], [1.0], [1.0]]), batch_size=2, shuffle=False)
    print("ignite", ignite.__version__, "- mean loss 2; it reports", evaluator.run(loader).metrics["loss"])


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(_evaluate)
