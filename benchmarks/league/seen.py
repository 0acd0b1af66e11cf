"""Networks that were looked at while this library was made but chose none of its constants: of torchvision
and transformers, others that people train, and small ones that users reported."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .network import Network
from .seen_tasks import TABLES, half_of_digits


def _stem(channels: int, mode: Literal["fan_in", "fan_out"]) -> nn.Conv2d:
    """What images of 32 x 32 get instead of a convolution that halves them."""
    conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode=mode, nonlinearity="relu")
    return conv


def _torchvision() -> Any:
    """Its models; imported when one is built."""
    return importlib.import_module("torchvision.models")


def resnet18() -> nn.Module:
    model = _torchvision().resnet18(num_classes=10)
    model.conv1, model.maxpool = _stem(64, "fan_out"), nn.Identity()
    return model


def vit() -> nn.Module:
    """Six layers of width 384 over 64 patches and a class token. Its head starts at zero."""
    return _torchvision().VisionTransformer(
        image_size=32, patch_size=4, num_layers=6, num_heads=6, hidden_dim=384, mlp_dim=1536, num_classes=10
    )


def swin() -> nn.Module:
    """Three stages of 16, 8 and 4 patches a side; every other layer shifts its windows of 4."""
    return _torchvision().SwinTransformer(
        patch_size=[2, 2], embed_dim=96, depths=[2, 2, 4], num_heads=[3, 6, 12], window_size=[4, 4],
        stochastic_depth_prob=0.0, num_classes=10,
    )  # fmt: skip


def densenet() -> nn.Module:
    """52 layers in three blocks; each layer of a block adds 16 channels."""
    model = _torchvision().DenseNet(16, (8, 8, 8), 32, num_classes=10)
    model.features.conv0, model.features.pool0 = _stem(32, "fan_in"), nn.Identity()
    return model


def regnet() -> nn.Module:
    """RegNetY-400MF: grouped convolutions with squeeze and excitation."""
    model = _torchvision().regnet_y_400mf(num_classes=10)
    model.stem[0].stride = (1, 1)
    return model


def vgg11() -> nn.Module:
    """Eight convolutions without norms, as torchvision starts them, and two layers that classify."""
    vgg = _torchvision().vgg
    features = vgg.make_layers(vgg.cfgs["A"])
    for layer in features:
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(features, nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class Causal(nn.Module):
    """The logits of a language model of transformers. Its mask has four dimensions: given none, or one of
    another kind, the library looks at values on the GPU, which a CUDA graph cannot."""

    mask: Tensor

    def __init__(self, name: str, context: int, **options: Any) -> None:
        super().__init__()
        library: Any = importlib.import_module("transformers")
        bytes_only = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
        config = library.AutoConfig.for_model(name, **bytes_only, **options)
        self.model = library.AutoModelForCausalLM.from_config(config)
        mask = torch.ones(1, 1, context, context, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x, attention_mask=self.mask, use_cache=False).logits


def llama() -> nn.Module:
    return Causal(
        "llama", 128, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        max_position_embeddings=128,
    )  # fmt: skip


def gpt2() -> nn.Module:
    """Its head is the transposed embedding."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Causal("gpt2", 128, n_embd=384, n_layer=6, n_head=6, n_positions=128, **dropout)


class LSTM(nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(x))[0])


def _zeroed(conv: nn.Conv2d) -> nn.Conv2d:
    """The last of a branch, as diffusion models start it."""
    for parameter in conv.parameters():
        nn.init.zeros_(parameter)
    return conv


class TimedBlock(nn.Module):
    """Two convolutions after group norm and SiLU beside a shortcut; the time is added between them."""

    def __init__(self, channels: int, out: int, timed: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, 1, 1))
        self.time = nn.Linear(timed, out)
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), _zeroed(nn.Conv2d(out, out, 3, 1, 1)))
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(x) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.second(hidden)


class PixelAttention(nn.Module):
    """Attention between all pixels, added to them."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), _zeroed(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1))
        q, k, v = qkv.transpose(3, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(x.shape)
        return x + self.out(mixed)


class UNet(nn.Module):
    """Predicts noise: three resolutions down and up, with attention at the lowest."""

    frequencies: Tensor

    def __init__(self, width: int = 64, timed: int = 256) -> None:
        super().__init__()
        a, b, c = width, 2 * width, 3 * width
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, math.log(1000), width // 2)))
        self.time = nn.Sequential(nn.Linear(width, timed), nn.SiLU(), nn.Linear(timed, timed), nn.SiLU())
        self.stem = nn.Conv2d(3, a, 3, padding=1)
        self.down = nn.ModuleList([TimedBlock(a, a, timed), TimedBlock(a, b, timed)])
        self.shrink = nn.ModuleList([nn.Conv2d(n, n, 3, 2, 1) for n in (a, b)])
        self.low = nn.ModuleList([TimedBlock(b, c, timed), TimedBlock(c, c, timed)])
        self.attention = PixelAttention(c)
        self.grow = nn.ModuleList(
            [nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(n, n, 3, padding=1)) for n in (c, b)]
        )
        self.up = nn.ModuleList([TimedBlock(c + b, b, timed), TimedBlock(b + a, a, timed)])
        self.head = nn.Sequential(nn.GroupNorm(8, a), nn.SiLU(), _zeroed(nn.Conv2d(a, 3, 3, padding=1)))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.stem(x)
        kept = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            kept.append(x)
            x = shrink(x)
        x = self.low[1](self.attention(self.low[0](x, time)), time)
        for block, grow in zip(self.up, self.grow, strict=True):
            x = block(torch.cat([grow(x), kept.pop()], 1), time)
        return self.head(x)


class Sine(nn.Module):
    """``sin(30 (W x + b))``, with the weights that SIREN starts from."""

    def __init__(self, fan_in: int, out: int, bound: float) -> None:
        super().__init__()
        self.linear = nn.Linear(fan_in, out)
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return (30 * self.linear(x)).sin()


def siren(width: int = 256) -> nn.Module:
    """A colour from a place: a first layer, three hidden ones and a last."""
    bound = math.sqrt(6 / width) / 30
    hidden = [Sine(width, width, bound) for _ in range(3)]
    last = nn.Linear(width, 3)
    nn.init.uniform_(last.weight, -bound, bound)
    return nn.Sequential(Sine(2, width, 1 / 2), *hidden, last)


class Recommender(nn.Module):
    """A row of every table, side by side, and an MLP; tables start as DLRM has them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        tables = [nn.Embedding(size, width) for size in TABLES]
        for table in tables:
            nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)
        self.tables = nn.ModuleList(tables)
        self.mlp = mlp(len(TABLES) * width, 128, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = [table(ids) for table, ids in zip(self.tables, x.unbind(1), strict=True)]
        return self.mlp(torch.cat(rows, 1)).squeeze(1)


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def small_cnn(classes: int = 10, channels: int = 32) -> nn.Sequential:
    """Three convolutions with batch norm, for digits."""
    layers: list[nn.Module] = []
    for k in range(3):
        layers += [
            nn.Conv2d(channels if k else 1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@functools.cache
def _trained_on_half() -> dict[str, Tensor]:
    """The weights of ``small_cnn`` that has learned the digits 0 to 4, without those of its head."""
    task = half_of_digits("cpu", 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = small_cnn(classes=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in task.batches(model, torch.Generator().manual_seed(0), steps=100):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return {name: w.detach() for name, w in model[:-1].state_dict().items()}


def fine_tuned() -> nn.Module:
    """It begins where the training on other digits ended, with a new head."""
    model = small_cnn(classes=5)
    model.load_state_dict(_trained_on_half(), strict=False)
    return model


SEEN: dict[str, Network] = {
    "resnet18": Network("ResNet-18, torchvision", resnet18, "cifar flipped", 12),
    "vit": Network("ViT, torchvision", vit, "cifar flipped", 15),
    "swin": Network("Swin, torchvision", swin, "cifar flipped", 15),
    "densenet": Network("DenseNet, torchvision", densenet, "cifar flipped", 14),
    "regnet": Network("RegNetY, torchvision", regnet, "cifar flipped", 14),
    "vgg11": Network("VGG-11 without norm, torchvision", vgg11, "cifar flipped", 5),
    "llama": Network("Llama, transformers", llama, "bytes", 16),
    "gpt2": Network("GPT-2, transformers", gpt2, "bytes", 15),
    "lstm": Network("LSTM, bytes", LSTM, "bytes", 12),
    "unet": Network("diffusion U-Net", UNet, "denoising", 14),
    "siren": Network("SIREN, one picture", siren, "picture", 4),
    "recommender": Network("recommender, 20 tables", Recommender, "clicks", 4),
    "fine-tune": Network("fine-tuned CNN, digits", fine_tuned, "digits from 5", 2),
    "small-cnn-no-schedule": Network(
        "CNN, digits, 100 steps, no schedule", small_cnn, "digits, 100 steps", 1, schedule="none"
    ),
    "digits-30-steps": Network(
        "MLP, digits, 30 steps", functools.partial(mlp, 64, 256, 256, 10), "digits, 30 steps", 1
    ),
    "small-table": Network("MLP, table of 569 rows", functools.partial(mlp, 30, 64, 64, 2), "table", 2),
}
