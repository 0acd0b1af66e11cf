"""State dicts: reads one into a model without running code, and writes that of its balanced equivalent."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd import PathError, PathGraph, balance
from pathsgd.console.files import write_atomically
from pathsgd.console.user_code import describe

WRAPPERS = ("state_dict", "model_state_dict", "model", "state")
"""Where checkpoints keep a model's state dict."""


def load_weights(model: nn.Module, file: Path) -> None:
    """Loads the state dict in ``file``, or in the checkpoint it is; all of it has to fit."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise  # says which file and why
    except Exception as error:
        # A damaged file fails in as many ways as there are formats, and none of them is a bug here.
        raise PathError(
            f"{file} holds no state dict that can be read without running code ({type(error).__name__})"
        ) from error
    state = _unwrap(state)
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        keys = f" with {', '.join(map(repr, list(state)[:4]))}" if isinstance(state, Mapping) else ""
        raise PathError(
            f"{file} holds no state dict but a {type(state).__name__}{keys}; save model.state_dict()"
        )
    try:
        model.load_state_dict(state)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        reason = lines[0] if lines else describe(error)
        reason = reason if len(reason) <= 160 else f"{reason[:160]} ..."
        raise PathError(f"the state dict in {file} does not fit the model: {reason}") from error


def _unwrap(state: Any) -> Any:
    inner = next((state[k] for k in WRAPPERS if k in state), None) if isinstance(state, Mapping) else None
    return _unwrap(inner) if isinstance(inner, Mapping) else state


def save_balanced(model: nn.Module, graph: PathGraph, p: float, file: Path) -> None:
    """Writes the state dict of a copy of least ``mu_{p,inf}``. The model itself stays as it is."""
    balanced = copy.deepcopy(model)
    balance(balanced, graph, p, math.inf)
    content = io.BytesIO()
    torch.save(balanced.state_dict(), content)
    write_atomically(file, content.getvalue())
