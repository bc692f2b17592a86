"""Ignite 0.5.5: micro-batches are counted across epochs, and the last window is never stepped.

Prints steps after iterations 3, 6 and 9 instead of 3, 5, 8 and 10, and an unused gradient at the end.
"""

import ignite
import torch
from ignite.engine import create_supervised_trainer
from torch.utils.data import DataLoader

model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = create_supervised_trainer(
    model,
    optimizer,
    lambda output, target: output.mean(),
    gradient_accumulation_steps=3,
    prepare_batch=lambda batch, device, non_blocking: (batch, batch),
)
optimizer.register_step_post_hook(lambda *_: print("step after iteration", trainer.state.iteration))
print("ignite", ignite.__version__, "- 5 batches an epoch, 2 epochs, windows of 3")
trainer.run(DataLoader(torch.ones(5, 1)), max_epochs=2)
print(f"at the end a gradient of {model.weight.grad.item():.4f} is left in the weights' .grad, unused")
