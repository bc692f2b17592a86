"""Ignite 0.5.5: resumed within an epoch on one device, a deterministic engine draws another order.

Prints for the training that goes on after iteration 5, in the middle of epoch 2, other samples than without a break.
"""

import ignite
import torch
from ignite.engine import DeterministicEngine, Events
from ignite.utils import manual_seed
from torch.utils.data import DataLoader

saved = {}
for resumed in (False, True):
    manual_seed(7)
    seen = []
    trainer = DeterministicEngine(lambda engine, batch, seen=seen: seen.extend(batch.int().tolist()))
    if resumed:
        trainer.load_state_dict(saved)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda engine: saved.update(engine.state_dict()))
    trainer.run(DataLoader(torch.arange(8.0), batch_size=2, shuffle=True), max_epochs=2)
    print("ignite", ignite.__version__, "- the last samples", "resumed" if resumed else "without a break:", seen[-6:])
