"""Networks that this library was developed on: every constant was chosen with some of these in view."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .deep_networks import convnext, efficientnet, gelu_convolutions, mobilenet_v1, mobilenet_v2
from .network import Network


def he_normal(model: nn.Module) -> nn.Module:
    """Normal weights of variance 2 / fan-in before a ReLU, 1 / fan-in in the last layer; zero biases."""
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    for layer in layers:
        gain = 1.0 if layer is layers[-1] else 2**0.5
        nn.init.normal_(layer.weight, std=gain * layer.weight[0].numel() ** -0.5)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return model


def mlp(width: int, depth: int) -> nn.Module:
    """``depth`` hidden layers on flat CIFAR-10 images."""
    widths = [3072, *[width] * depth]
    hidden = [
        layer for fan_in, out in itertools.pairwise(widths) for layer in (nn.Linear(fan_in, out), nn.ReLU())
    ]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def vgg(width: int) -> nn.Module:
    """Six 3x3 convolutions in three stages, each ending in a max pool."""
    layers: list[nn.Module] = []
    channels = 3
    for out in (width, 2 * width, 4 * width):
        layers += [
            nn.Conv2d(channels, out, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1),
            nn.ReLU(),
        ]
        layers.append(nn.MaxPool2d(2))
        channels = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, 10))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut. Without batch norm the branch is halved, so that depth does not
    double the variance."""

    def __init__(self, channels: int, out: int, stride: int, batch_norm: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if batch_norm else nn.Identity
        bias = not batch_norm
        self.branch = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=bias), norm(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=bias), norm(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=bias), norm(out))
        self.scale = 1.0 if batch_norm else 0.5

    def forward(self, x: Tensor) -> Tensor:
        return (self.shortcut(x) + self.scale * self.branch(x)).relu()


def resnet(batch_norm: bool, width: int = 32) -> nn.Module:
    """A stem and four residual blocks."""
    norm = nn.BatchNorm2d if batch_norm else nn.Identity
    stages = ((width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 4 * width, 1))
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=not batch_norm), norm(width), nn.ReLU(),
        *(ResidualBlock(*stage, batch_norm) for stage in stages),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


def resnet_56() -> nn.Module:
    """As for CIFAR-10: three stages of nine blocks."""
    stages = [(16, 16, 1)] * 9 + [(16, 32, 2)] + [(32, 32, 1)] * 8 + [(32, 64, 2)] + [(64, 64, 1)] * 8
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        *(ResidualBlock(*stage, batch_norm=True) for stage in stages),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


class TransformerBlock(nn.Module):
    """Attention and an MLP, each after a layer norm and added to the stream."""

    def __init__(
        self, width: int, heads: int, activation: Callable[[], nn.Module], *, causal: bool, bias: bool
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=bias), activation(), nn.Linear(4 * width, width, bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model of bytes, with ReLU^2 in its MLPs and no biases."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, 4, SquaredReLU, causal=True, bias=False) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))


def gpt(width: int, layers: int = 4) -> nn.Module:
    """Context 128, small embeddings as GPT-2 has them."""
    model = GPT(width, layers, context=128)
    nn.init.normal_(model.tokens.weight, std=0.02)
    return model


def plain_convolutions(channels: int = 32) -> nn.Module:
    """Eight 3x3 convolutions without normalisation or shortcuts, on 8x8 digits."""
    layers: list[nn.Module] = []
    for k in range(8):
        layers += [nn.Conv2d(channels if k else 1, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class RowRNN(nn.Module):
    """Reads a digit row by row; its last state is classified."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, width, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.squeeze(1))[0][:, -1])


class PatchMLP(nn.Module):
    """Two MLPs between layer norms, one over the patches and one over the channels (MLP-Mixer)."""

    def __init__(self, width: int, patches: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.ReLU(), nn.Linear(2 * patches, patches)
        )
        self.over_channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class OnPatches(nn.Module):
    """Cuts an image into patches, embeds them, runs blocks over them and classifies their mean."""

    def __init__(
        self, channels: int, side: int, patch: int, width: int, blocks: list[nn.Module], *, positions: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, patch)
        count = (side // patch) ** 2
        self.positions = nn.Parameter(0.02 * torch.randn(count, width)) if positions else None
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        if self.positions is not None:
            x = x + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def vit(width: int = 48) -> nn.Module:
    """Two blocks over the 16 patches of a digit."""
    blocks: list[nn.Module] = [TransformerBlock(width, 4, nn.ReLU, causal=False, bias=True) for _ in range(2)]
    return OnPatches(1, 8, 2, width, blocks, positions=True)


def mixer(width: int = 128) -> nn.Module:
    """Four blocks over the 64 patches of a CIFAR-10 image."""
    return OnPatches(3, 32, 4, width, [PatchMLP(width, 64) for _ in range(4)], positions=False)


class TorchEncoder(nn.Module):
    """torch's own encoder layers as a model of bytes: a packed matrix of queries, keys and values; GELU."""

    def __init__(self, width: int = 128, layers: int = 3, context: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def _he(build: Callable[..., nn.Module], *arguments: object) -> Callable[[], nn.Module]:
    return lambda: he_normal(build(*arguments))


TUNED_ON: dict[str, Network] = {
    "mlp-512x3": Network("MLP 3 × 512", _he(mlp, 512, 3), "cifar", 2),
    "vgg-48": Network("VGG, 48 channels", _he(vgg, 48), "cifar flipped", 6),
    "resnet-bn": Network("ResNet, batch norm", _he(resnet, True), "cifar flipped", 8),
    "resnet-plain": Network("ResNet without norm", _he(resnet, False), "cifar flipped", 6),
    "mixer-128": Network("MLP-Mixer", mixer, "cifar flipped", 8),
    "gpt-256": Network("GPT, 4 × 256", functools.partial(gpt, 256), "bytes", 11),
    "digits-rnn": Network("nn.RNN, digits", RowRNN, "digits", 2),
    "digits-vit": Network("ViT, digits", vit, "digits", 2),
}
"""The eight that tables show."""

ALSO_TUNED_ON: dict[str, Network] = {
    "mlp-128x3": Network("MLP 3 × 128", _he(mlp, 128, 3), "cifar", 2),
    "mlp-2048x3": Network("MLP 3 × 2048", _he(mlp, 2048, 3), "cifar", 3),
    "mlp-512x10": Network("MLP 10 × 512", _he(mlp, 512, 10), "cifar", 3),
    "mlp-256x30": Network("MLP 30 × 256", functools.partial(mlp, 256, 30), "cifar", 5),
    "vgg-16": Network("VGG, 16 channels", _he(vgg, 16), "cifar flipped", 3),
    "vgg-96": Network("VGG, 96 channels", _he(vgg, 96), "cifar flipped", 12),
    "gpt-64": Network("GPT, 4 × 64", functools.partial(gpt, 64), "bytes", 8),
    "gpt-128": Network("GPT, 4 × 128", functools.partial(gpt, 128), "bytes", 9),
    "gpt-512": Network("GPT, 4 × 512", functools.partial(gpt, 512), "bytes", 18),
    "gpt-48": Network("GPT, 2 × 48", functools.partial(GPT, 48, 2, 64), "short bytes", 2),
    "gpt-128x12": Network("GPT, 12 × 128", functools.partial(gpt, 128, 12), "bytes", 20),
    "encoder-128": Network("nn.TransformerEncoder, GELU", TorchEncoder, "bytes", 8),
    "digits-conv8": Network("eight plain convolutions, digits", plain_convolutions, "digits", 2),
    "gelu-conv9": Network("nine convolutions, GELU", gelu_convolutions, "cifar flipped", 8),
    "resnet-56": Network("ResNet-56, batch norm", resnet_56, "cifar flipped", 12),
    "mobilenet-v1": Network("MobileNetV1, ReLU6", mobilenet_v1, "cifar flipped", 8),
    "mobilenet-v2": Network("MobileNetV2, ReLU6", mobilenet_v2, "cifar flipped", 12),
    "efficientnet": Network("EfficientNet, SiLU", efficientnet, "cifar flipped", 12),
    "convnext": Network("ConvNeXt, GELU", convnext, "cifar flipped", 12),
}
"""Other widths and depths of them, and deep networks that the rules of depth were made for."""
