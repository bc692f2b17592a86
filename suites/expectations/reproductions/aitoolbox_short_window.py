"""AIToolbox 1.8.0: the last window of an epoch is divided by grad_accumulation, not by its own length.

Prints a gradient of 1.0000 after batch 2, which is right, and of 0.6667 after batch 4, which should also be 1.
"""

from importlib.metadata import version

import torch
from aitoolbox.torchtrain.model import TTModel
from aitoolbox.torchtrain.train_loop import TrainLoop


class _Model(TTModel):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def get_loss(self, batch_data, criterion, device):
        return (self.weight * batch_data).mean()  # the gradient of a batch is its mean: 1

    get_predictions = None


print("aitoolbox", version("aitoolbox"), "- 5 batches, each with gradient 1, in windows of 3 and 2")
model = _Model()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
loop = TrainLoop(model, torch.utils.data.DataLoader(torch.ones(5, 1)), None, None, sgd, None, end_auto_eval=False)
sgd.register_step_pre_hook(lambda *_: print(f"after batch {loop.iteration}: gradient {model.weight.grad.item():.4f}"))
loop.fit(num_epochs=1, grad_accumulation=3)
