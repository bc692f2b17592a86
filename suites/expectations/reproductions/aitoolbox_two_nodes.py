"""AIToolbox 1.8.0: with ddp every node starts the ranks of all nodes, and all ranks draw the same random numbers.

There are two nodes with a rank each. Node 0 does not wait for node 1: it starts rank 1 as well, and both print the same
number.
"""

from importlib.metadata import version

import torch
from aitoolbox.torchtrain.model import TTModel
from aitoolbox.torchtrain.train_loop import TrainLoop


class _Model(TTModel):
    def forward(self, batch_data):
        print(f"rank {torch.distributed.get_rank()} is here, and draws {torch.rand(()).item():.4f}", flush=True)
        return (self.weight * batch_data).mean()

    def get_loss(self, batch_data, criterion, device):
        return self(batch_data)

    get_predictions = get_loss


if __name__ == "__main__":
    print("aitoolbox", version("aitoolbox"), "- node 0 of 2, with 1 rank; node 1 is not started")
    model, loader = _Model(), torch.utils.data.DataLoader(torch.ones(2, 1))
    model.weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainLoop(model, loader, None, None, sgd, None, end_auto_eval=False, gpu_mode="ddp")
    loop.fit(num_epochs=1, num_nodes=2, node_rank=0, num_gpus=1, backend="gloo", on_gpu=False)
