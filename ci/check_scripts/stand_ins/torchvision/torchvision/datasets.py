"""Data sets of seeded pictures: the classes that scripts download with."""

import os

import torch
from torch.utils.data import Dataset


class _Pictures(Dataset):
    """Pictures of noise with a brighter band that depends on the label."""

    size = (3, 32, 32)
    classes = 10

    def __init__(self, root=None, train=True, transform=None, target_transform=None, download=False, **options):
        count = int(os.environ.get("CHECK_SCRIPTS_SAMPLES", "64")) // (1 if train else 2)
        chance = torch.Generator().manual_seed(1 if train else 2)
        labels = torch.arange(count) % self.classes
        pictures = torch.randint(0, 200, (count, *self.size), generator=chance, dtype=torch.uint8)
        for picture, label in zip(pictures, labels.tolist(), strict=True):
            picture[:, label :: self.classes] += 50
        self.data, self.targets = self.stored(pictures), self.labels(labels)
        self.pictures, self.transform, self.target_transform = pictures, transform, target_transform

    def stored(self, pictures):
        """Return the attribute ``data`` in this data set's format."""
        return pictures

    def labels(self, labels):
        """Return the attribute ``targets`` in this data set's format."""
        return labels.tolist()

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture, label = self.pictures[index], int(self.targets[index])
        picture = self.transform(picture) if self.transform else picture
        return picture, self.target_transform(label) if self.target_transform else label


class MNIST(_Pictures):
    """28 × 28 pixels in grey."""

    size = (1, 28, 28)

    def stored(self, pictures):
        """Return a tensor of shape (samples, 28, 28)."""
        return pictures[:, 0]

    def labels(self, labels):
        """Return a tensor."""
        return labels


class FashionMNIST(MNIST):
    """28 × 28 pixels in grey."""


class CIFAR10(_Pictures):
    """32 × 32 pixels in colour."""

    def stored(self, pictures):
        """Return an array of shape (samples, 32, 32, 3)."""
        return pictures.permute(0, 2, 3, 1).numpy()


class CelebA(_Pictures):
    """64 × 64 pixels in colour."""

    size = (3, 64, 64)

    def __init__(self, root=None, split="train", transform=None, **options):
        super().__init__(root, split == "train", transform)


class FakeData(_Pictures):
    """Pictures of the requested size, but at most as many as in the other data sets."""

    def __init__(self, size=1000, image_size=(3, 224, 224), num_classes=10, transform=None, **options):
        self.size, self.classes = tuple(image_size), num_classes
        super().__init__(transform=transform)


class ImageFolder(_Pictures):
    """Pictures of 224 × 224 pixels, whatever the folder holds."""

    size = (3, 224, 224)

    def __init__(self, root, transform=None, **options):
        super().__init__(root, "val" not in str(root), transform)
