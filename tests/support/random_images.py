"""Blocks on images (batch, channels, height, width), for random networks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .random_blocks import ACTIVATIONS, Block, activate


class Convolution(Block):
    """With groups, stride, batch norm or group norm, transposed."""

    def __init__(self, pick, width):
        super().__init__()
        groups = pick.choice([1, 1, 2, width])
        stride, padding = pick.choice([1, 1, 2]), pick.choice(["zeros", "zeros", "reflect", "circular"])
        make = nn.Conv2d if pick.random() < 0.75 else nn.ConvTranspose2d
        mode = {"padding_mode": padding} if make is nn.Conv2d else {}
        self.conv = make(width, width, 3, stride, 1, groups=groups, bias=pick.random() < 0.6, **mode)
        self.norm_name = pick.choice(
            ["none", "none", "batch norm", "batch norm", "group norm", "channels last"]
        )
        self.norm = {
            "none": nn.Identity(), "batch norm": nn.BatchNorm2d(width), "group norm": nn.GroupNorm(2, width),
            "channels last": nn.LayerNorm(width),
        }[self.norm_name]  # fmt: skip
        self.activation = self.pick_name(pick, ACTIVATIONS)
        self.kind = f"{make.__name__}, {'depthwise' if groups == width else f'{groups} groups'}"

    def forward(self, x):
        x = self.conv(x)
        if self.norm_name == "channels last":
            x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        else:
            x = self.norm(x)
        return ACTIVATIONS[self.activation](x)

    def scales(self, ledger, ids):
        out = ledger.conv(self.conv, ids, self.kind)
        if self.norm_name != "none":
            out = ledger.gain(self.norm, out, f"gain of {self.norm_name}")
        return activate(ledger, out, self.activation)


class SqueezeExcite(Block):
    """x * gate(mean(x)): a sigmoid holds the gate, a relu lets it scale."""

    def __init__(self, pick, width):
        super().__init__()
        self.enter, self.down, self.up = nn.Conv2d(width, width, 1), nn.Linear(width, 3), nn.Linear(3, width)
        self.activation = pick.choice(["sigmoid", "relu"])

    def forward(self, x):
        x = F.relu(self.enter(x))
        gate = ACTIVATIONS[self.activation](self.up(F.relu(self.down(x.mean((2, 3))))))
        return x * gate[:, :, None, None]

    def scales(self, ledger, ids):
        kind = f"squeeze-excite: {self.activation}"
        ids = ledger.conv(self.enter, ids, kind)
        hidden = ledger.linear(self.down, ledger.tie_along(ids, 2, 3)[..., 0, 0], "dense")
        gate = activate(ledger, ledger.linear(self.up, hidden, kind), self.activation)
        return ledger.multiply(ids, gate[:, :, None, None])


class GatedConvolution(Block):
    """As in NAFNet: halves of the channels are multiplied."""

    def __init__(self, pick, width):
        super().__init__()
        self.both, self.down = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(width, width, 3, padding=1)
        self.activation = self.pick_name(pick, ACTIVATIONS)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, 1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)

    def scales(self, ledger, ids):
        gate, up = ledger.conv(self.both, ids, f"product of channels: {self.activation}").chunk(2, 1)
        return ledger.conv(self.down, ledger.multiply(activate(ledger, gate, self.activation), up), "dense")


OVER_IMAGE = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "lp_pool2d": lambda x: F.lp_pool2d(x.abs() + 0.1 * x.abs(), 2, 2),
    "interpolate nearest": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate bilinear": lambda x: F.interpolate(x, size=5, mode="bilinear"),
    "interpolate bicubic": lambda x: F.interpolate(x, size=5, mode="bicubic"),
    "pad": lambda x: F.pad(x, (1, 0, 0, 1)),
    "pad reflect": lambda x: F.pad(x, (1, 1, 0, 0), mode="reflect"),
    "roll over places": lambda x: torch.roll(x, (1, -1), (2, 3)),
    "rotate": lambda x: x.rot90(1, (2, 3)),
    "blur": lambda x: F.conv2d(x, torch.ones(x.shape[1], 1, 2, 2).double() / 4, groups=x.shape[1]),
    "cumsum over places": lambda x: x.cumsum(-1),
    "fractional slices": lambda x: x[:, :, ::2, 1:],
    "unfold and fold": lambda x: F.fold(F.unfold(x, 2), x.shape[-2:], 2),
}


class OverImage(Block):
    """Operators that keep the channels."""

    def __init__(self, pick, width):
        super().__init__()
        self.kind = self.pick_name(pick, OVER_IMAGE)

    def forward(self, x):
        return OVER_IMAGE[self.kind](x)

    def scales(self, ledger, ids):
        with torch.no_grad():
            shape = self(torch.zeros(ids.shape, dtype=torch.float64)).shape
        return ledger.tie_along(ledger.mark(ids, self.kind), 2, 3).expand(shape)


SHUFFLES = {
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[:, :, :2, :2], 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "roll of channels": lambda x: x.roll(1, 1),
    "space to channels": lambda x: torch.cat([x[:, :, ::2, :2], x[:, :, ::2, :2].flip(1)], 1),
    "windows": lambda x: x[:, :, :2, :2].unflatten(3, (1, 2)).permute(0, 1, 3, 2, 4).flatten(2, 3),
}


class Shuffles(Block):
    """Operators that move channels, done to the scales by the same call; then a convolution."""

    def __init__(self, pick, width):
        super().__init__()
        self.kind = self.pick_name(pick, SHUFFLES)
        channels = self.move(torch.zeros(1, width, 4, 4)).shape[1]
        self.enter, self.conv = nn.Conv2d(width, width, 1), nn.Conv2d(channels, width, 1)
        self.scale = nn.Parameter(torch.rand(width, 1, 1))

    def move(self, x):
        return SHUFFLES[self.kind](x)

    def forward(self, x):
        return self.conv(self.move(F.relu(self.enter(x)))) * self.scale

    def scales(self, ledger, ids):
        ids = ledger.mark(ledger.conv(self.enter, ids, "dense"), self.kind)
        out = ledger.conv(self.conv, self.move(ids.double()).long(), "dense")
        head = ledger.fresh("learned scale", self.scale.numel())
        ledger.parameter(self.scale, head[:, None, None], out[0, :, :1, :1])
        return head[:, None, None].expand(out.shape)


class ImageResidual(Block):
    def __init__(self, pick, width):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.norm = nn.BatchNorm2d(width) if pick.random() < 0.5 else None
        self.activation = self.pick_name(pick, ACTIVATIONS)

    def forward(self, x):
        y = self.second(ACTIVATIONS[self.activation](self.first(x)))
        return F.relu(x + (y if self.norm is None else self.norm(y)))

    def scales(self, ledger, ids):
        y = activate(ledger, ledger.conv(self.first, ids, "dense"), self.activation)
        y = ledger.conv(self.second, y, "dense")
        if self.norm is not None:
            y = ledger.gain(self.norm, y, "gain of batch norm")
        return ledger.tie(ids, y)


BLOCKS = [
    Convolution,
    Convolution,
    Convolution,
    SqueezeExcite,
    GatedConvolution,
    OverImage,
    Shuffles,
    ImageResidual,
]
