"""Path-SGD without state, for torch.func: see :mod:`pathsgd.paths.functional`."""

from pathsgd.paths.functional import gammas as gammas
from pathsgd.paths.functional import path_sgd as path_sgd
