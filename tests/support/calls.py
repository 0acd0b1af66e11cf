"""How often torch is called: on small tensors, and from Python to a GPU, a call costs more than its work."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts the calls of torch, those of detach, which does nothing, and those that make a tensor of
    ``numel`` entries."""

    def __init__(self, numel=None):
        super().__init__()
        self.numel, self.count, self.detached, self.made = numel, 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.count += 1
        self.detached += function is torch.ops.aten.detach.default
        made = found if isinstance(found, (list, tuple)) else [found]
        fresh = not any(own.alias_info is not None for own in function._schema.returns)
        self.made += fresh and any(isinstance(t, torch.Tensor) and t.numel() == self.numel for t in made)
        return found
