"""State dicts: read into the model without running code, and written of its balanced equivalent."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd.console.files import write_atomically
from pathsgd.errors import PathError
from pathsgd.geometry.rescale import apply_scales
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.unit_classes import unit_classes_of
from pathsgd.inspect.target import said

WRAPPINGS = ("state_dict", "model_state_dict", "model", "state")
"""Where checkpoints keep a model's state dict."""


def load_weights(model: nn.Module, file: Path) -> None:
    """Puts the state dict in ``file``, or in the checkpoint it is, into the model; all of it has to fit."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise  # says which file and why
    except Exception as error:
        # A damaged file fails in as many ways as there are formats, and none of them is a bug here.
        raise PathError(
            f"{file} holds no state dict that can be read without running code ({type(error).__name__})"
        ) from error
    state = _unwrapped(state)
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        keys = f" with {', '.join(map(repr, list(state)[:4]))}" if isinstance(state, Mapping) else ""
        raise PathError(
            f"{file} holds no state dict but a {type(state).__name__}{keys}; save model.state_dict()"
        )
    try:
        model.load_state_dict(state)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        reason = lines[0] if lines else said(error)
        reason = reason if len(reason) <= 160 else f"{reason[:160]} ..."
        raise PathError(f"the state dict in {file} does not fit the model: {reason}") from error


def _unwrapped(state: Any) -> Any:
    inner = next((state[k] for k in WRAPPINGS if k in state), None) if isinstance(state, Mapping) else None
    return _unwrapped(inner) if isinstance(inner, Mapping) else state


def save_balanced(model: nn.Module, graph: PathGraph, scales: Tensor, file: Path) -> None:
    """Writes the model's state dict with its units rescaled. The model itself stays as it is."""
    tensors = graph.tensors(model)
    copies = {name: tensors[name].detach().clone() for name in graph.parameters}
    apply_scales(graph, copies, unit_classes_of(graph), scales)
    # By identity, since a state dict may hold one parameter under several names.
    rescaled = {id(tensors[name]): copy for name, copy in copies.items()}
    state = model.state_dict(keep_vars=True)
    for key, value in state.items():
        state[key] = rescaled.get(id(value), _detached(value))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(file, buffer.getvalue())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
