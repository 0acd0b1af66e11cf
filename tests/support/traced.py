"""What tests of the tracer share."""

from __future__ import annotations

from torch import nn


def normalised(graph):
    return {name for name, info in graph.parameters.items() if info.normalised}


class Apply(nn.Module):
    """Linear - function - Linear."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.b(self.function(self.a(x)))
