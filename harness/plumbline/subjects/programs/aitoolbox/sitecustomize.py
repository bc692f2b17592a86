"""Stands in for what AIToolbox imports and training does not use, where a program runs in an environment without it."""

import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

UNUSED = {
    "boto3": ["boto3"],
    "botocore": ["botocore", "botocore.exceptions"],
    "google": ["google.cloud"],
    "matplotlib": ["matplotlib", "matplotlib.backends.backend_pdf", "matplotlib.pyplot", "matplotlib.style"],
    "seaborn": ["seaborn"],
    "sklearn": ["sklearn.metrics"],
    "tensorboard": ["torch.utils.tensorboard"],
    "wandb": ["wandb"],
}

for needed, modules in UNUSED.items():
    if find_spec(needed) is None:
        sys.modules |= dict.fromkeys(modules, MagicMock())
