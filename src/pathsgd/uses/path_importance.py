"""The share of a network's paths that runs through every weight: what pruning by paths goes by."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pathsgd.balancing.balance import balance
from pathsgd.errors import PathError
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.geometry.path_norm import path_norm
from pathsgd.graph.path_graph import PathGraph, unwrap
from pathsgd.graph.structure import ParameterStatus
from pathsgd.graph.trace import Example, trace


@torch.no_grad()
def path_importance(
    model: nn.Module, example_input: Example | PathGraph | None = None, p: float = 2
) -> dict[tuple[nn.Module, str], Tensor]:
    """The importance of every weight for the path norm, which no rescaling changes: for pruning.

    ``importance(e) = (|w_e| sqrt(gamma_e) / phi)^p``, with phi_p and gamma_p of the region of the weight: the
    share of ``phi^p`` that is lost when the weight is set to zero. Those of all weights of a layer that all
    paths cross sum to one, whatever its width, so that layers can be compared. For p = 1 it orders weights as
    SynFlow does (Tanaka et al. 2020), and as path-magnitude pruning (Gonon et al. 2024).

    Queries and keys, or the two factors of a gate, are rescaled across the ends of regions: of networks that
    have such units it is the importance in the balanced equivalent.

    Magnitude pruning prunes other weights of a network whose units have been rescaled. With these it is the
    same ones: exactly, if all factors are powers of two and p is 1 or 2; else up to weights whose importance
    is the same to rounding.

    Args:
        model: the module to measure.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        p: the order of the norm, from 1; finite.

    Returns:
        By module and name of its parameter, in the form that ``torch.nn.utils.prune`` takes, a tensor of the
        parameter's shape in fp64. Vectors (biases, norms) are left out, and so is what is on no path.

    Raises:
        TraceError: the model cannot be traced.
        PathError: p is invalid, or path weights are out of the range of fp64.

    Example:
        >>> from torch.nn.utils import prune
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> scores = path_importance(model)
        >>> prune.global_unstructured(
        ...     list(scores), prune.L1Unstructured, importance_scores=scores, amount=0.5
        ... )
        >>> sum(int((module.weight == 0).sum()) for module, _ in scores)
        24
    """
    graph = trace(model, example_input)
    model = unwrap(model)
    measured = model
    if graph.passed:  # rescalings cross the ends of regions there, which changes the norms of both
        try:
            measured = copy.deepcopy(model)
        except RuntimeError as error:  # torch's pruning leaves tensors that it cannot copy
            raise PathError(
                f"the model cannot be copied: {error}; call prune.remove(module, name) on what was pruned"
            ) from error
        balance(measured, graph)
    tensors = graph.tensors(measured)
    gammas = measure_gammas(graph, tensors, p)
    number = {region: k for k, region in enumerate(graph.parameter_regions())}
    log_phi = [float(path_norm(measured, graph, p, log=True, region=k)) for k in range(len(number))]
    importance = {}
    for name, info in graph.parameters.items():
        if len(info.shape) < 2 or info.status is ParameterStatus.OUTSIDE or not info.regions:
            continue
        logs = torch.tensor([log_phi[number[region]] for region in info.regions], dtype=torch.float64)
        z = gammas[name].weight_to_z(tensors[name].double())  # the same bits after powers of two
        share = torch.where(z == 0, 0, (p * z.abs().log() - (p * logs).logsumexp(0)).exp())
        path, _, attribute = name.rpartition(".")
        owner, pruned = model.get_submodule(path), attribute.removesuffix("_orig")
        # What was pruned before is stored under another name, beside its mask.
        importance[owner, pruned if hasattr(owner, f"{pruned}_mask") else attribute] = share
    return importance
