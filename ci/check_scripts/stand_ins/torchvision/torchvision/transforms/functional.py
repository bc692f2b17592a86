"""Transforms as functions."""

import torch
import torch.nn.functional as F


def to_tensor(picture):
    """Return a picture as ``float32`` in [0, 1]."""
    return picture.to(torch.float32) / 255


def resize(picture, size, **options):
    """Return a picture with another number of pixels; a single number is used for both sides."""
    size = (size, size) if isinstance(size, int) else tuple(size)
    grown = F.interpolate(picture[None].to(torch.float32), size, mode="bilinear", align_corners=False)[0]
    return grown.round().to(torch.uint8) if picture.dtype == torch.uint8 else grown


def center_crop(picture, size):
    """Return the middle of a picture."""
    height, width = (size, size) if isinstance(size, int) else size
    top, left = (picture.shape[-2] - height) // 2, (picture.shape[-1] - width) // 2
    return picture[..., top : top + height, left : left + width]
