"""The graph of a model that cannot be traced: no paths, and what its modules say of their parameters."""

from __future__ import annotations

from torch import nn

from pathsgd.graph.path_graph import ParameterInfo, ParameterStatus, PathGraph, remember_model


def describe_untraced(model: nn.Module, reason: str) -> PathGraph:
    """A graph without paths: steps are relative to the weights themselves."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def find_roles(name: str, p: nn.Parameter) -> tuple[str, ...]:
        if id(p) in embeddings:
            return ("embedding",)
        is_matrix = p.dim() >= 2 and "weight" in name.rpartition(".")[2]  # as torch calls them
        return ("weight",) if is_matrix else ()

    parameters = {
        name: ParameterInfo(
            name, tuple(p.shape), p.requires_grad, ParameterStatus.OUTSIDE,
            "outside: the model could not be traced", find_roles(name, p),
        )
        for name, p in model.named_parameters()
    }  # fmt: skip
    graph = PathGraph(type(model).__name__, (), {}, (), (), parameters, (reason,))
    graph.folded  # noqa: B018  as trace does
    remember_model(graph, model)
    return graph
