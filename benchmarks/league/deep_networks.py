"""Deep networks with other activations than ReLU and with other norms, small, for images of 32 x 32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Activation = Callable[[], nn.Module]


def conv(
    channels: int, out: int, size: int, act: Activation | None, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution, a batch norm and an activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
    ]
    return [*layers, act()] if act else layers


class Residual(nn.Module):
    """``x + branch(x)``."""

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Excitation(nn.Module):
    """Squeeze and excitation: every channel times a gate that is computed from the means of all."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = channels // 4
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, hidden, 1), nn.SiLU(),
            nn.Conv2d(hidden, channels, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


Stage = tuple[int, int, int]  # channels, blocks, stride of the first


def inverted_residuals(
    channels: int, stages: list[Stage], expand: int, act: Activation, *, gated: bool
) -> tuple[list[nn.Module], int]:
    """Expand by a 1x1 convolution, a depthwise one, and back without an activation; beside a shortcut where
    the shape stays."""
    layers: list[nn.Module] = []
    for out, blocks, first in stages:
        for k in range(blocks):
            stride, wide = (1 if k else first), expand * channels
            block = [
                *conv(channels, wide, 1, act),
                *conv(wide, wide, 3, act, stride, groups=wide),
                *([Excitation(wide)] if gated else []),
                *conv(wide, out, 1, None),
            ]
            layers += [Residual(*block)] if stride == 1 and channels == out else block
            channels = out
    return layers, channels


def head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


def mobilenet_v1() -> nn.Module:
    """MobileNetV1 of width 0.25: 27 convolutions in sequence, every second one depthwise, ReLU6."""
    act = nn.ReLU6
    layers, channels = conv(3, 8, 3, act), 8
    stages = [(16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *[(128, 1)] * 5, (256, 1), (256, 1)]
    for out, stride in stages:
        layers += [*conv(channels, channels, 3, act, stride, groups=channels), *conv(channels, out, 1, act)]
        channels = out
    return nn.Sequential(*layers, *head(channels))


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 of width 0.35: 52 convolutions, ReLU6."""
    act = nn.ReLU6
    stages = [(8, 2, 2), (16, 3, 2), (24, 4, 1), (32, 3, 1), (56, 3, 1), (112, 1, 1)]
    layers, channels = inverted_residuals(8, stages, 6, act, gated=False)
    stem = [*conv(3, 16, 3, act, stride=2), *conv(16, 16, 3, act, groups=16), *conv(16, 8, 1, None)]
    return nn.Sequential(*stem, *layers, *conv(channels, 448, 1, act), *head(448))


def efficientnet() -> nn.Module:
    """A small EfficientNet: SiLU, squeeze and excitation."""
    act = nn.SiLU
    stages = [(16, 1, 1), (24, 2, 2), (40, 2, 1), (64, 3, 2), (96, 3, 1)]
    layers, channels = inverted_residuals(16, stages, 4, act, gated=True)
    return nn.Sequential(*conv(3, 16, 3, act), *layers, *conv(channels, 256, 1, act), *head(256))


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scale(nn.Module):
    """Every channel times a weight, at first a small one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def convnext() -> nn.Module:
    """A small ConvNeXt: depthwise 7x7 convolutions, layer norm, GELU, branches that start near 0."""
    layers: list[nn.Module] = []
    channels = 3
    for out, blocks in ((32, 3), (64, 6), (128, 3)):
        layers += [ChannelNorm(channels)] if layers else []
        layers.append(nn.Conv2d(channels, out, 2, 2))
        layers += [
            Residual(
                nn.Conv2d(out, out, 7, padding=3, groups=out), ChannelNorm(out),
                nn.Conv2d(out, 4 * out, 1), nn.GELU(), nn.Conv2d(4 * out, out, 1), Scale(out),
            )
            for _ in range(blocks)
        ]  # fmt: skip
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), ChannelNorm(channels), *head(channels)[1:])


def gelu_convolutions() -> nn.Module:
    """Nine 3x3 convolutions in three stages, GELU, no norm."""
    layers: list[nn.Module] = []
    channels = 3
    for out in (32, 64, 128):
        for _ in range(3):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.GELU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *head(channels))
