"""A stand-in for timm, which needs torchvision: the layers of a vision transformer, under the names of its modules."""

__version__ = "0.3.2"  # the version that MAE requires
