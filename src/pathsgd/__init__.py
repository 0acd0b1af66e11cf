"""Rescaling-invariant training for PyTorch."""

from pathsgd import functional
from pathsgd.balancing.balance import balance
from pathsgd.balancing.equivalence import Equivalence, rescaling_equivalent
from pathsgd.balancing.group_norm import group_norm
from pathsgd.balancing.imbalance import Imbalance, imbalance
from pathsgd.balancing.rescale import rescale, unbalance
from pathsgd.errors import DataDependentError, PathError, RescaleError, TraceError
from pathsgd.geometry.gamma import Gamma, Gammas, gammas
from pathsgd.geometry.path_norm import path_norm
from pathsgd.geometry.path_vector import path_vector
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.structure import ParameterInfo, ParameterStatus
from pathsgd.graph.trace import Inputs, trace
from pathsgd.muon.balanced_muon import BalancedMuon
from pathsgd.paths.clip import clip_path_grad_norm_
from pathsgd.paths.path_normalized import PathNormalized
from pathsgd.paths.path_sgd import PathSGD
from pathsgd.uses.comparison import Comparison, compare
from pathsgd.uses.inspection import Inspection, inspect
from pathsgd.uses.path_importance import path_importance
from pathsgd.uses.replace_relu6 import ClippedReLU, replace_relu6

__version__ = "0.2.0"

__all__ = [  # noqa: RUF022
    # what is a unit, a path, a region
    "trace", "Inputs", "PathGraph", "ParameterInfo", "ParameterStatus",
    # numbers on paths
    "path_norm", "group_norm", "path_vector", "gammas", "Gamma", "Gammas", "path_importance",
    # rescaling
    "rescale", "unbalance", "balance", "imbalance", "Imbalance", "rescaling_equivalent", "Equivalence",
    "replace_relu6", "ClippedReLU",
    # a look at a network, and at its training
    "inspect", "Inspection", "compare", "Comparison",
    # training
    "BalancedMuon", "PathSGD", "PathNormalized", "clip_path_grad_norm_", "functional",
    # errors
    "PathError", "TraceError", "DataDependentError", "RescaleError",
]  # fmt: skip
