"""Path-SGD without state, for torch.func: see :mod:`pathsgd.optim.functional`."""

from pathsgd.optim.functional import gammas as gammas
from pathsgd.optim.functional import path_sgd as path_sgd
