"""The networks of the table, each with inputs, in fp64 and eval mode, with random numbers in every weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import hugging_face, plain

GROUPS = {
    "Decoders": hugging_face.DECODERS,
    "Encoders, encoders with decoders": hugging_face.ENCODERS,
    "Speech and time series": hugging_face.SPEECH_AND_SERIES,
    "Vision": hugging_face.VISION,
    "Layers of torch": plain.LAYERS,
    "Ways to write a forward pass": plain.ODD,
}
FP32 = frozenset({"Mixtral, grouped experts, fp32"})
"""They have an operator without fp64."""
BUILDERS = {name: build for group in GROUPS.values() for name, build in group.items()}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """The model and its inputs."""
    torch.manual_seed(seed)
    model, inputs = BUILDERS[name]()
    dtype = torch.float32 if name in FP32 else torch.float64
    model = model.to(dtype).eval()
    fill_generic(model)
    return model, _cast(inputs, dtype)


@torch.no_grad()
def fill_generic(model: nn.Module) -> None:
    """Weights as no initialisation leaves them: with biases of zero, gains of one or very small matrices a
    wrong symmetry might not change the function."""
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() < 2:
            parameter += 0.2 * noise
        else:
            parameter += noise / (parameter.numel() / parameter.shape[0]) ** 0.5
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer += 0.2 * torch.randn_like(buffer)
        elif name.endswith("running_var"):
            buffer *= torch.rand_like(buffer) + 0.5


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: _cast(x, dtype) for key, x in value.items()}
    if isinstance(value, tuple):
        return tuple(_cast(x, dtype) for x in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
