"""The networks that are trained and timed: stacks of linear layers as in the paper, ResNets and a GPT."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def stack(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_shortcut(into: int, out: int, stride: int) -> nn.Module:
    """The input of a block, or its strided projection if the output has another shape."""
    if stride == 1 and into == out:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class Block(nn.Module):
    """conv - norm - relu - conv - norm, added to the input or to its strided projection."""

    expansion = 1

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = make_shortcut(into, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        h += self.shortcut(x)
        return self.relu(h)


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, the last four times as wide, added to the input or its projection."""

    expansion = 4

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = self.expansion * width
        self.conv1, self.norm1 = nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = make_shortcut(into, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        h = self.relu(self.norm2(self.conv2(h)))
        h = self.norm3(self.conv3(h))
        h += self.shortcut(x)
        return self.relu(h)


class ResNet(nn.Module):
    """Four stages of blocks; ``ResNet()`` has the layers of ResNet-18."""

    def __init__(
        self,
        width: int = 64,
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        classes: int = 1000,
        block: type[Block | Bottleneck] = Block,
    ) -> None:
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
                stages.append(block(into, out, 2 if stage and not k else 1))
                into = block.expansion * out
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


def resnet50() -> ResNet:
    """The layers of ResNet-50."""
    return ResNet(blocks=(3, 4, 6, 3), block=Bottleneck)


class TransformerBlock(nn.Module):
    """Causal attention and an MLP, each after a layer norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """``GPT()`` has the layers of GPT-2 with 124M parameters, ReLU in place of GELU."""

    def __init__(
        self, tokens: int = 50257, width: int = 768, heads: int = 12, blocks: int = 12, context: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.tokens(tokens) + places)))
