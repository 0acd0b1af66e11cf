"""Path-SGD without state, for torch.func: parameters and gradients in, new parameters out.

Nothing is written in place, so the update can be differentiated (in reverse mode, with gamma held fixed),
mapped over an ensemble by ``torch.func.vmap`` and compiled:

    graph = pathsgd.trace(model, example_input)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = None
    for x, y in batches:
        grads = torch.func.grad(loss)(params, buffers, x, y)
        params, state = pathsgd.functional.path_sgd(
            graph, params, grads, state, buffers=buffers, lr=1e-3, momentum=0.9
        )
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pathsgd._torch import is_capturing, is_transforming
from pathsgd.errors import PathError
from pathsgd.geometry.gamma import Gammas, measure_gammas
from pathsgd.graph.path_graph import PathGraph
from pathsgd.paths.rule import find_step

Named = Mapping[str, Tensor]


def path_sgd(
    graph: PathGraph,
    params: Named,
    grads: Named,
    state: Named | None = None,
    *,
    buffers: Named | None = None,
    lr: float | Tensor,
    p: float = 2,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One step of :class:`pathsgd.PathSGD`.

    Args:
        graph: of the model, by :func:`pathsgd.trace`.
        params: by name, as ``model.named_parameters()`` gives them.
        grads: by the same names; those left out are not moved.
        state: what the last step returned, its momentum; None at first.
        buffers: by name, for models with masks.
        lr: step size.
        p: the order of the path norm.
        momentum: momentum factor, on the gradient in invariant coordinates.
        nesterov: Nesterov momentum.
        weight_decay: decoupled weight decay.
        maximize: maximize the objective instead of minimizing it.

    Returns:
        The new parameters and the new state, by name.

    Raises:
        PathError: a name or a shape is not that of the graph, or a buffer is missing.

    Example:
        >>> import pathsgd, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> graph, params = pathsgd.trace(model), dict(model.named_parameters())
        >>> def loss(params, x):
        ...     return torch.func.functional_call(model, params, (x,)).pow(2).mean()
        >>> x = torch.ones(4, 2)
        >>> for _ in range(10):
        ...     params, _ = path_sgd(graph, params, torch.func.grad(loss)(params, x), lr=0.01)
        >>> bool(loss(params, x) < loss(dict(model.named_parameters()), x))
        True
    """
    for name in grads:
        if name not in params:
            raise PathError(f"there is a gradient for {name!r} but no such parameter")
        if name not in graph.parameters:
            raise PathError(f"the graph knows no parameter {name!r}: trace the model again, or leave it out")
    graph = graph.in_training
    measured = gammas(graph, params, buffers, p)
    moved, kept = dict(params), dict(state or {})
    for name, grad in grads.items():
        gamma = measured[name] if graph.parameters[name].normalised else None
        moved[name], buffer = find_step(
            params[name], grad, kept.get(name), gamma, lr=lr, momentum=momentum, nesterov=nesterov,
            weight_decay=weight_decay, maximize=maximize,
        )  # fmt: skip
        if buffer is not None:
            kept[name] = buffer
    return moved, kept


def gammas(graph: PathGraph, params: Named, buffers: Named | None = None, p: float = 2) -> Gammas:
    """gamma of every parameter, for update rules of your own. Not differentiated.

    With ``gamma = gammas(...)[name]``, ``z = gamma.weight_to_z(w)`` and ``h = gamma.gradient_to_z(g)`` do not
    change under rescalings, and a step dz becomes ``gamma.step_from_z(dz)``. Under ``vmap`` and
    ``torch.compile``, which cannot look at values, the range of path weights is not checked.

    Args:
        graph: of the model, by :func:`pathsgd.trace`.
        params: by name, as ``model.named_parameters()`` gives them.
        buffers: by name, for models with batch norm or masks.
        p: the order of the path norm.

    Returns:
        A mapping from the parameters' names to their :class:`pathsgd.Gamma`.

    Raises:
        PathError: a name or a shape is not that of the graph, or a buffer is missing.

    Example:
        >>> import pathsgd, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> found = gammas(pathsgd.trace(model), dict(model.named_parameters()))
        >>> found["0.weight"].dense().shape
        torch.Size([8, 2])
    """
    graph.check(params)
    tensors = {**params, **(buffers or {})}
    try:
        return measure_gammas(
            graph, tensors, p, centered=True if is_capturing() or is_transforming() else None
        )
    except KeyError as missing:
        raise PathError(
            f"the model's buffer {missing} is needed: pass buffers=dict(model.named_buffers())"
        ) from None
