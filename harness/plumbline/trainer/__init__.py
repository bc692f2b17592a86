"""A small trainer: one device, dp, ddp, ddp2 and balanced, in 64, 32 and 16 bits, on real or simulated devices.

    from plumbline.trainer import Module, Trainer
    Trainer(gpus=2, distributed_backend="ddp", max_epochs=3).fit(MyModule())

``TrainLoop`` is another interface to it. Read ``loop.py`` first; ``connector.py`` interprets the arguments.
"""

from plumbline.trainer.environments import (
    ClusterEnvironment,
    PlainEnvironment,
    SlurmEnvironment,
    TorchrunEnvironment,
)
from plumbline.trainer.errors import MisconfigurationError, RankError
from plumbline.trainer.module import Module
from plumbline.trainer.train_loop import TrainLoop
from plumbline.trainer.trainer import Trainer

__all__ = [
    "ClusterEnvironment",
    "MisconfigurationError",
    "Module",
    "PlainEnvironment",
    "RankError",
    "SlurmEnvironment",
    "TorchrunEnvironment",
    "TrainLoop",
    "Trainer",
]
