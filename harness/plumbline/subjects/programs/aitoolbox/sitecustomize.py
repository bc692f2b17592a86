"""Stands in for modules that AIToolbox imports and training does not use, where they are not installed."""

import sys
from importlib import import_module
from unittest.mock import MagicMock

for name in (
    *("boto3", "botocore", "botocore.exceptions", "google.cloud", "google.cloud.storage", "matplotlib"),
    *("matplotlib.backends.backend_pdf", "matplotlib.pyplot", "matplotlib.style", "seaborn", "sklearn.metrics"),
    *("torch.utils.tensorboard", "wandb"),
):
    try:
        import_module(name)
    except ImportError:
        sys.modules[name] = MagicMock()
