"""The transforms that scripts use, on pictures as ``datasets`` has them."""

import torch
import torch.nn.functional as F

from torchvision.transforms.functional import center_crop, resize, to_tensor


class Compose:
    """One transform after the other."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, picture):
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class Lambda:
    """A function as a transform."""

    def __init__(self, function):
        self.function = function

    def __call__(self, picture):
        return self.function(picture)


class ToTensor:
    """``uint8`` to ``float32`` in [0, 1]."""

    def __call__(self, picture):
        return to_tensor(picture)


class Normalize:
    """Subtract a mean and divide by a deviation, channel by channel."""

    def __init__(self, mean, std, inplace=False):
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, picture):
        return (picture - self.mean) / self.std


class Resize:
    """Another number of pixels."""

    def __init__(self, size, **options):
        self.size = size

    def __call__(self, picture):
        return resize(picture, self.size)


class CenterCrop:
    """The middle of a picture."""

    def __init__(self, size):
        self.size = size

    def __call__(self, picture):
        return center_crop(picture, self.size)


class RandomHorizontalFlip:
    """Half of the pictures are mirrored."""

    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, picture):
        return picture.flip(-1) if torch.rand(()) < self.p else picture


class Pad:
    """A black frame."""

    def __init__(self, padding, **options):
        self.padding = padding

    def __call__(self, picture):
        return F.pad(picture, [self.padding] * 4)


class RandomCrop:
    """A part at a random place."""

    def __init__(self, size, padding=0, **options):
        self.size, self.pad = size if isinstance(size, int) else size[0], Pad(padding)

    def __call__(self, picture):
        picture = self.pad(picture)
        top, left = (int(torch.randint(0, extent - self.size + 1, ())) for extent in picture.shape[-2:])
        return picture[..., top : top + self.size, left : left + self.size]


class RandomResizedCrop(RandomCrop):
    """A part at a random place, resized."""

    def __call__(self, picture):
        return super().__call__(resize(picture, self.size + 8))
