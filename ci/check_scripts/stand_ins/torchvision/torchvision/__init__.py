"""A stand-in for torchvision, which has no CPU build: seeded pictures, and the functions that scripts use.

A picture is a ``uint8`` tensor of shape (channels, height, width). A data set holds ``CHECK_SCRIPTS_SAMPLES`` of them
(64 by default), so that an epoch is a few optimizer steps.
"""

from torchvision import datasets, models, transforms, utils

__version__ = "0.0"
__all__ = ["datasets", "models", "transforms", "utils"]
