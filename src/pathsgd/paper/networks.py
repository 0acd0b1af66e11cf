"""The networks that are trained and measured: stacks of linear layers as in the paper, and others."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from pathsgd.errors import PathError


def stack(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def conv_net(shape: tuple[int, ...], hidden: tuple[int, ...], classes: int) -> nn.Sequential:
    """Convolutions with pooling, then one linear hidden layer, on flat inputs. ``hidden`` are the channels of
    the convolutions and, last, the units of the linear layer."""
    if len(shape) != 3:
        raise PathError(f"convolutions need images; these inputs have shape {shape}")
    channels, height, width = shape
    layers: list[nn.Module] = [nn.Unflatten(1, shape)]
    for out in hidden[:-1]:
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = out, height // 2, width // 2
    if not height or not width:
        raise PathError(f"images of {shape[1]}x{shape[2]} are too small for {len(hidden) - 1} poolings by 2")
    layers += [nn.Flatten(), nn.Linear(channels * height * width, hidden[-1]), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], classes))


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """The paper's balanced weights: N(0, 1/fan_in), and biases 0."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.zero_()
        else:
            fan_in = math.prod(parameter.shape[1:])
            parameter.normal_(0, 1 / math.sqrt(fan_in), generator=generator)


class Block(nn.Module):
    """conv - norm - relu - conv - norm, added to the input or to its strided projection."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        h += self.shortcut(x)
        return self.relu(h)


class ResNet(nn.Module):
    """Four stages of blocks; ``ResNet()`` has the layers of ResNet-18."""

    def __init__(self, width: int = 64, blocks: tuple[int, ...] = (2, 2, 2, 2), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages, into = [], width
        for stage, count in enumerate(blocks):
            out = width * 2**stage
            for k in range(count):
                stages.append(Block(into, out, 2 if stage and not k else 1))
                into = out
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(into, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.stages(self.stem(x))).flatten(1))


def small_image_resnet(classes: int = 10) -> ResNet:
    """The layers of ResNet-18 with the stem for small images."""
    model = ResNet(classes=classes)
    model.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True))
    return model
