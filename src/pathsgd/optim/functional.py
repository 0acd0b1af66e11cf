"""Path-SGD without state, for torch.func: parameters and gradients in, new parameters out.

Nothing is written in place, so the update can be differentiated (with gamma held fixed), mapped over an
ensemble by ``torch.func.vmap`` and compiled:

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

import torch
from torch import Tensor

from pathsgd.errors import PathError
from pathsgd.geometry.gamma import Gammas, measure_gammas
from pathsgd.geometry.shared_weights import Shared
from pathsgd.graph.path_graph import PathGraph

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
    shared: Shared = "kappa1",
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One step of :class:`pathsgd.PathSGD`: (new parameters, new state).

    Args:
        graph: of the model, by :func:`pathsgd.trace`.
        params: by name, as ``model.named_parameters()`` gives them.
        grads: by the same names; those left out are not moved.
        state: what the last step returned, its momentum; None at first.
        buffers: by name, for models with batch norm or masks.
        lr, p, momentum, nesterov, weight_decay, maximize, shared: as in :class:`pathsgd.PathSGD`.

    >>> import pathsgd
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
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    found = gammas(graph, params, buffers, p, shared=shared)
    moved, kept = dict(params), dict(state or {})
    for name, grad in grads.items():
        gamma = found[name] if graph.parameters[name].normalised else None
        h = -grad if maximize else grad
        h = h if gamma is None else gamma.gradient_to_z(h.to(gamma.arithmetic.dtype))
        if momentum:
            before = kept.get(name)
            kept[name] = h if before is None else momentum * before + h
            h = h + momentum * kept[name] if nesterov else kept[name]
        step = lr * (h if gamma is None else gamma.step_from_z(h))
        weight, dtype = params[name], params[name].dtype
        if weight_decay:
            weight = (weight * (1 - lr * weight_decay)).to(dtype)
        moved[name] = weight - step.to(dtype)
    return moved, kept


def gammas(
    graph: PathGraph, params: Named, buffers: Named | None = None, p: float = 2, *, shared: Shared = "kappa1"
) -> Gammas:
    """gamma of every parameter by name, for rules of your own: with ``gamma = gammas(...)[name]``,
    ``z = gamma.weight_to_z(w)`` and ``h = gamma.gradient_to_z(g)`` do not change under rescalings, and a step dz
    becomes ``gamma.step_from_z(dz)``. Not differentiated.

    Under ``vmap`` and ``torch.compile``, which cannot look at numbers, plain floats are used: enough for
    networks of ordinary depth. Call it once outside, where it looks, if in doubt: its ``.exponents`` says
    whether they were needed.
    """
    graph.check(params)
    tensors = {**params, **(buffers or {})}
    compiling = torch.compiler.is_compiling()
    mapped = not compiling and any(map(_is_mapped, tensors.values()))
    if mapped and shared != "kappa1":
        raise PathError(f"shared={shared!r} cannot be computed under vmap; use 'kappa1'")
    try:
        return measure_gammas(
            graph, tensors, p, exponents=False if mapped or compiling else None, shared=shared
        )
    except KeyError as missing:
        raise PathError(
            f"the model's buffer {missing} is needed: pass buffers=dict(model.named_buffers())"
        ) from None


def _is_mapped(tensor: Tensor) -> bool:
    """Whether vmap is at work on it, at whatever level of nested transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
