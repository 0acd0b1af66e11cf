"""Modules of the unseen networks that no other package has."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Logits(nn.Module):
    """A model of the transformers library, called with tensors and returning nothing but scores."""

    def __init__(self, model: nn.Module, *inputs: str) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.model(**dict(zip(self.inputs, tensors, strict=True))).logits


class GRU(nn.Module):
    """torch's own GRU as a model of bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.tokens(x))[0])


class GCN(nn.Module):
    """Two graph convolutions (Kipf and Welling), each after a dropout; weights as Glorot's, biases zero."""

    def __init__(self, features: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, classes)
        self.dropout = dropout
        for layer in (self.first, self.second):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        x = F.dropout(features, self.dropout, self.training)
        x = F.relu(adjacency @ F.linear(x, self.first.weight) + self.first.bias)
        x = F.dropout(x, self.dropout, self.training)
        return adjacency @ F.linear(x, self.second.weight) + self.second.bias


def table_mlp(columns: int, dropout: float) -> nn.Module:
    """Batch norm, ReLU and dropout after layers of 256 and 128; one score."""
    layers: list[nn.Module] = []
    for fan_in, out in itertools.pairwise((columns, 256, 128)):
        layers += [nn.Linear(fan_in, out), nn.BatchNorm1d(out), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(128, 1))


class ActorCritic(nn.Module):
    """A policy and a value with no weights in common, initialised as in CleanRL."""

    def __init__(self, state: int = 4, actions: int = 2, width: int = 64) -> None:
        super().__init__()
        self.actor = self._tanh_mlp(state, width, actions, gain=0.01)
        self.critic = self._tanh_mlp(state, width, 1, gain=1.0)

    def _tanh_mlp(self, fan_in: int, width: int, out: int, gain: float) -> nn.Module:
        layers = [nn.Linear(fan_in, width), nn.Linear(width, width), nn.Linear(width, out)]
        for layer, own in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
            nn.init.orthogonal_(layer.weight, own)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.actor(x), self.critic(x)], 1)


class VAE(nn.Module):
    """Four convolutions of stride 2 down to 2x2, a code, and transposed ones back, with batch norm and leaky
    ReLU: the VAE of PyTorch-VAE without its fifth stage, for images of 32x32."""

    def __init__(self, code: int = 128, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        down: list[nn.Module] = []
        for fan_in, out in itertools.pairwise((3, *widths)):
            down += [nn.Conv2d(fan_in, out, 3, 2, 1), nn.BatchNorm2d(out), nn.LeakyReLU()]
        self.encoder = nn.Sequential(*down, nn.Flatten())
        self.mean, self.log_variance = (nn.Linear(4 * widths[-1], code) for _ in range(2))
        up: list[nn.Module] = [nn.Linear(code, 4 * widths[-1]), nn.Unflatten(1, (widths[-1], 2, 2))]
        for fan_in, out in itertools.pairwise((*widths[::-1], widths[0])):
            up += [
                nn.ConvTranspose2d(fan_in, out, 3, 2, 1, output_padding=1),
                nn.BatchNorm2d(out),
                nn.LeakyReLU(),
            ]
        self.decoder = nn.Sequential(*up, nn.Conv2d(widths[0], 3, 3, padding=1))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.encoder(x)
        mean, log_variance = self.mean(x), self.log_variance(x)
        return self.decoder(mean + (0.5 * log_variance).exp() * noise), mean, log_variance
