"""Uses an installed pathsgd: balances a network, trains it, and looks at it by the program.

Runs on the interpreter of the environment that is checked, in a folder without sources of pathsgd.
"""

import copy
import importlib.metadata
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch  # warns where there is no numpy
from torch import nn

warnings.simplefilter("error")

import pathsgd  # noqa: E402

MODEL = """
from torch import nn


def make():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
"""

assert Path(pathsgd.__file__).is_relative_to(sys.prefix), f"imported from {pathsgd.__file__}"
assert importlib.metadata.version("pathsgd") == pathsgd.__version__

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
rescaled = copy.deepcopy(network)
x, y = torch.randn(32, 8), torch.randint(3, (32,))
pathsgd.unbalance(rescaled, x, powers_of_two=True)
assert pathsgd.imbalance(rescaled, x).ratio > 2
pathsgd.balance(network, x)
pathsgd.balance(rescaled, x)
assert all(map(torch.equal, network.parameters(), rescaled.parameters())), "one network after balance"

optimizer = pathsgd.BalancedMuon(network, x)
losses = []
for _ in range(10):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(network(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "model.py").write_text(MODEL, encoding="utf-8")
    program = Path(sys.executable).with_name("pathsgd")
    command = [program, "inspect", "model.py:make", "--input-shape", "1,8"]
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
assert printed.returncode == 0, printed.stderr
assert "16 units can be rescaled" in printed.stdout, printed.stdout
