"""A stand-in for timm, which needs torchvision: the layers of a vision transformer, under the names of its modules."""
