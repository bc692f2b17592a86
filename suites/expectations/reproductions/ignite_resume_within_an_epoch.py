"""Ignite 0.5.5: resumed within an epoch on one device without workers, a deterministic engine draws another order.

Training resumes after iteration 5, in the middle of epoch 2. It prints other samples than the uninterrupted training. A
loader with a worker draws the same samples, because it draws the indices of its first batches at once.
"""

import ignite
import torch
from ignite.engine import DeterministicEngine, Events
from ignite.utils import manual_seed
from torch.utils.data import DataLoader


def train(num_workers, state=None):
    manual_seed(7)
    seen, saved = [], {}
    trainer = DeterministicEngine(lambda engine, batch: seen.extend(batch.int().tolist()))
    if state is not None:
        trainer.load_state_dict(state)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda engine: saved.update(engine.state_dict()))
    trainer.run(DataLoader(torch.arange(8.0), 2, shuffle=True, num_workers=num_workers), max_epochs=2)
    return seen[-6:], saved


if __name__ == "__main__":
    for workers in (0, 1):
        whole, saved = train(workers)
        resumed, _ = train(workers, saved)
        print(f"ignite {ignite.__version__}, num_workers={workers}: without a break", whole, "resumed", resumed)
