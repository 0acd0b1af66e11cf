"""Rescaling-invariant training for PyTorch."""

from pathsgd import functional as functional
from pathsgd.errors import PathError as PathError
from pathsgd.errors import RescaleError as RescaleError
from pathsgd.errors import TraceError as TraceError
from pathsgd.geometry.balance import balance as balance
from pathsgd.geometry.equivalence import Equivalence as Equivalence
from pathsgd.geometry.equivalence import rescaling_equivalent as rescaling_equivalent
from pathsgd.geometry.gamma import gammas as gammas
from pathsgd.geometry.norms import group_norm as group_norm
from pathsgd.geometry.norms import path_norm as path_norm
from pathsgd.geometry.path_vector import path_vector as path_vector
from pathsgd.geometry.rescale import rescale as rescale
from pathsgd.geometry.rescale import unbalance as unbalance
from pathsgd.graph.path_graph import PathGraph as PathGraph
from pathsgd.graph.trace import Inputs as Inputs
from pathsgd.graph.trace import trace as trace
from pathsgd.optim.clip import clip_path_grad_norm_ as clip_path_grad_norm_
from pathsgd.optim.path_adam import PathAdagrad as PathAdagrad
from pathsgd.optim.path_adam import PathAdam as PathAdam
from pathsgd.optim.path_normalized import PathNormalized as PathNormalized
from pathsgd.optim.path_sgd import PathSGD as PathSGD

__version__ = "0.1.0"
