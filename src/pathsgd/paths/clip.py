"""Gradient clipping that a rescaling does not notice."""

from __future__ import annotations

import torch
from torch import Tensor

from pathsgd.paths.path_normalized import PathNormalized
from pathsgd.paths.path_sgd import PathSGD
from pathsgd.sharding import Shard, local_part, place_gradients, reduce_over_ranks, shards_of


@torch.no_grad()
def clip_path_grad_norm_(
    optimizer: PathSGD | PathNormalized, max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clips the gradients of the optimizer's parameters by their dual path norm ``sqrt(sum g^2 / gamma)``.

    In place, like :func:`torch.nn.utils.clip_grad_norm_`, whose raw norm is not invariant. Parameters
    that are not path-normalised count with gamma = 1.

    Args:
        optimizer: the optimizer whose gradients are clipped; it knows their gammas.
        max_norm: the largest norm that gradients are left with.
        error_if_nonfinite: whether a norm of nan or inf is an error.

    Returns:
        The norm before clipping.

    Raises:
        TypeError: the optimizer knows no paths.
        RuntimeError: a gradient is sparse, or the norm is not finite and that is an error.

    Example:
        >>> import pathsgd
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = pathsgd.PathSGD(model)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> before = clip_path_grad_norm_(optimizer, 0.1)
        >>> clip_path_grad_norm_(optimizer, 1.0).item()
        0.1
    """
    if not isinstance(optimizer, (PathSGD, PathNormalized)):
        raise TypeError(
            f"clip_path_grad_norm_ needs a PathSGD or PathNormalized, which know the paths; got "
            f"{type(optimizer).__name__}"
        )
    parts: list[Tensor] = []
    grads: list[Tensor] = []
    shards: list[tuple[Shard, ...]] = []
    for group in optimizer.param_groups:
        p = group["p"] if isinstance(optimizer, PathSGD) else optimizer.p
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        place_gradients(params)
        for parameter, gamma in zip(params, optimizer.gammas.select(params, p, keep=True), strict=True):
            grad = parameter.grad
            if grad.is_sparse:
                raise RuntimeError("clip_path_grad_norm_ does not support sparse gradients")
            h = grad if gamma is None else gamma.gradient_to_z(grad)
            parts.append(torch.linalg.vector_norm(local_part(h)))
            grads.append(local_part(grad))
            shards.append(shards_of(grad))
    if not grads:
        return torch.tensor(0.0)
    norms = torch.stack([part.to(parts[0]) for part in parts])
    if any(shards):
        norms = reduce_over_ranks(norms.square(), shards).sqrt()
    total = torch.linalg.vector_norm(norms)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of the gradients is {total.item()}, so it cannot be clipped; "
            "to scale them by it all the same, set error_if_nonfinite=False"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad))
    return total
