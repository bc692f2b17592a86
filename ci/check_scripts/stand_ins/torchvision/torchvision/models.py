"""Residual networks under the names that scripts use, with fewer and narrower layers than the originals."""

import torch.nn.functional as F
from torch import nn

FIRST, WIDTH = 64, 16  # scripts that replace the first convolution expect this number of channels


class _Block(nn.Module):
    """Two convolutions with batch normalisation, and a shortcut around them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.downsample = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, pictures):
        """Return features of shape (batch, channels, height, width)."""
        hidden = F.relu(self.bn1(self.conv1(pictures)), inplace=True)
        return F.relu(self.bn2(self.conv2(hidden)) + self.downsample(pictures))


class ResNet(nn.Module):
    """Three stages of one block each."""

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, FIRST, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(FIRST)
        self.layer1 = _Block(FIRST, WIDTH, 1)
        self.layer2 = _Block(WIDTH, WIDTH, 2)
        self.layer3 = _Block(WIDTH, WIDTH, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(WIDTH, num_classes)

    def forward(self, pictures):
        """Return scores of shape (batch, classes)."""
        hidden = F.max_pool2d(F.relu(self.bn1(self.conv1(pictures))), 2)
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        return self.fc(self.avgpool(hidden).flatten(1))


def resnet18(weights=None, pretrained=False, num_classes=1000, **options):
    """Return a residual network."""
    return ResNet(num_classes)


resnet34 = resnet50 = resnet18
vgg16 = VGG16_Weights = None  # torchmetrics imports them
