"""``pathsgd inspect``: prints what the library measures, changes nothing, answers mistakes in one line."""

from __future__ import annotations

import copy
import importlib
import math
import os
import re
import statistics
import sys

import pytest
import torch
from torch import nn

import pathsgd
import pathsgd_entry_point

MODELS = """
import torch
from torch import nn

print("printed by the user's module")


def mlp(width=8):
    hidden = nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(width, 2))


def conv():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear, self.head = nn.Embedding(7, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, tokens, x):
        return self.head(torch.relu(self.embedding(tokens) + self.linear(x)))


def deep(fill=1e-30):
    layers = [nn.Linear(2, 2, bias=False) for _ in range(40)]
    for layer in layers:
        nn.init.constant_(layer.weight, fill)
    return nn.Sequential(*layers)


class Configuration:
    def __init__(self, width=8):
        self.width = width


class Configured(nn.Linear):
    config_class = Configuration

    def __init__(self, config):
        super().__init__(4, config.width)


def fails():
    raise KeyError("no such\\nwidth")


instance = mlp()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_models", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("user_models", None)


def inspect(capsys, *arguments):
    """The tables, from a run that goes well."""
    capsys.readouterr()
    assert pathsgd_entry_point.main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def tables(printed):
    """The rows below the report of the graph, by their first cell."""
    lines = printed[printed.index("log phi_") :].splitlines()
    return {cells[0]: cells[1:] for line in lines if (cells := re.split(r"  +", line.strip()))}


def refused(capsys, *arguments):
    """The one line of a run that ends in an error."""
    assert pathsgd_entry_point.main(["inspect", *map(str, arguments)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "printed by the user" not in line]
    assert line.startswith("pathsgd: ")
    return line


def user_module():
    """The module that the command imports."""
    sys.path.insert(0, os.getcwd())
    return importlib.import_module("user_models")


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_the_imbalance_is_the_scale_a_unit_was_rescaled_by(folder, capsys, p):
    model = user_module().mlp().double()
    pathsgd.balance(model, p=p, q=p)
    torch.save(model.state_dict(), "balanced.pt")
    pathsgd.rescale(model, None, {("0", 3): 2.0**5, ("2", 0): 2.0**-3, ("2", 1): 2.0**-3})
    sys.modules["user_models"].instance = model
    before = copy.deepcopy(model.state_dict())
    rescaled = tables(inspect(capsys, "user_models:instance", "--p", p, "--input-shape", "1,4"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [rescaled[name][-3:] for name in "024"] == [
        ["0", "0", "+5.00"], ["-3.00", "0", "0"], ["-", "-", "-"]
    ]  # fmt: skip
    balanced = tables(inspect(capsys, "user_models:instance", "--p", p, "--weights", "balanced.pt"))
    assert [balanced[name][-3:] for name in "02"] == [["0", "0", "0"]] * 2
    mu, phi = f"mu_{{{p:g},{p:g}}}", f"log phi_{p:g}"
    assert balanced["ratio"][0] == "1"
    assert rescaled[f"{mu} balanced"] == balanced[f"{mu} balanced"]
    assert rescaled[phi] == balanced[phi]


def test_the_numbers_are_those_of_the_library(folder, capsys):
    user_models = user_module()
    torch.manual_seed(7)
    model = user_models.mlp(width=16)
    found = tables(
        inspect(
            capsys, "user_models:mlp", "--arguments", '{"width": 16}', "--seed", 7, "--p", 1.5,
            "--input-shape", "3,4",
        )
    )  # fmt: skip
    assert float(found["log phi_1.5"][0]) == pytest.approx(pathsgd.path_norm(model, p=1.5, log=True).item())
    mu = torch.cat([p.detach().flatten() for p in model.parameters()]).norm(1.5).item()
    assert float(found["mu_{1.5,1.5}"][0]) == pytest.approx(mu, rel=1e-5)
    norms = torch.linalg.vector_norm(torch.cat([model[0].weight, model[0].bias[:, None]], 1), ord=1.5, dim=1)
    spread = [norms.min().item(), statistics.median(norms.tolist()), norms.max().item()]
    assert list(map(float, found["0"][2:5])) == pytest.approx(spread, rel=1e-3)
    assert [found[name][1] for name in "024"] == ["16", "16", "2"]
    least = pathsgd.balance(model, p=1.5, q=1.5)
    assert float(found["mu_{1.5,1.5} balanced"][0]) == pytest.approx(least, rel=1e-5)


def test_batch_norm(folder, capsys):
    graph = pathsgd.trace(user_module().conv(), torch.zeros(1, 3, 8, 8))
    out = inspect(capsys, "user_models.py:conv", "--input-shape", "2,3,8,8")
    assert out.startswith(f"{graph}\n\nlog phi_2 ")
    assert "printed by the user" not in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert lines["0"][-3:] == ["-", "-", "-"], "units before a batch norm cannot be rescaled"
    assert lines["1"][2:6] == ["6", "1", "1", "1"]


def test_several_regions(folder, capsys):
    model = user_module().encoder()
    graph = pathsgd.trace(model, torch.zeros(1, 5, 8))
    arguments = ("user_models:encoder", "--input-shape", "1,5,8", "--weights", "encoder.pt")
    torch.save(model.state_dict(), "encoder.pt")
    printed = inspect(capsys, *arguments)
    torch.save({"epoch": 3, "state": {"model": model.state_dict(), "order": torch.zeros(1)}}, "encoder.pt")
    assert inspect(capsys, *arguments) == printed, "in a checkpoint as in a file of its own"
    found = tables(printed)
    for k in range(3):
        log_phi = pathsgd.path_norm(model, graph, region=k, log=True).item()
        assert float(found[f"log phi_2 of region {k}"][0]) == pytest.approx(log_phi, rel=1e-5)
    assert found["self_attn"][1] == "24", "queries against keys as well as values"


def test_several_inputs_of_a_class(folder, capsys):
    shapes = ("--input-shape", "1,5", "--input-shape", "1,5,3", "--input-dtype", "int64")
    found = tables(inspect(capsys, "user_models:Tokens", *shapes, "--input-dtype", "float32"))
    assert found["embedding"][-3:] == found["linear"][-3:], "tied units"


def test_a_file_in_a_package_and_one_beside_others(folder, capsys):
    package = folder / "elsewhere" / "user_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "blocks.py").write_text("from torch import nn\nmake = lambda: nn.Sequential(nn.Linear(2, 1))")
    (package / "nets.py").write_text("from .blocks import make")
    (folder / "elsewhere" / "random.py").write_text("from user_package.blocks import make")
    try:
        for file in (package / "nets.py", folder / "elsewhere" / "random.py"):
            assert tables(inspect(capsys, f"{file}:make"))["0"]
    finally:
        for name in [name for name in sys.modules if name.startswith("user_package")]:
            del sys.modules[name]
    assert "elsewhere" not in (sys.modules["random"].__file__ or "")


def test_a_class_that_takes_a_configuration_is_given_one(folder, capsys):
    found = inspect(
        capsys, "user_models:Configured", "--arguments", '{"width": 3}', "--input-shape", "1,4"
    )  # fmt: skip
    assert "weight     3x4" in found


def test_a_model_in_a_file(folder, capsys):
    torch.manual_seed(0)
    model = user_module().mlp()
    torch.save(model, "net.pt")
    torch.save(model.state_dict(), "state.pt")
    torch.export.save(
        torch.export.export(model, (torch.zeros(5, 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)),
        "net.pt2",
    )
    printed = inspect(capsys, "user_models:mlp", "--weights", "state.pt")
    assert tables(inspect(capsys, "net.pt", "--trust")) == tables(printed)
    assert tables(inspect(capsys, "net.pt2", "--trust")) == tables(printed), "with the inputs that it holds"


class Marker:
    """A pickle that runs code when it is read."""

    def __reduce__(self):
        return open, ("read", "w")


@pytest.mark.parametrize("name", ["net.pt", "net.pt2"])
def test_no_file_is_read_without_trust(folder, capsys, name):
    torch.save(Marker(), name)
    assert "give --trust if you trust it" in refused(capsys, name)
    assert not (folder / "read").exists()


def test_a_figure(folder, capsys):
    arguments = ["user_models:instance", "--figure"]
    printed = inspect(capsys, *arguments, "net.png")
    assert printed.endswith(f"\n{pathsgd.inspect(user_module().instance)}\nfigure: net.png\n")
    assert (folder / "net.png").read_bytes().startswith(b"\x89PNG")
    assert "has to end in .png, .svg or .pdf" in refused(capsys, *arguments, "net.xyz")


def test_dead_paths(folder, capsys):
    dead = tables(inspect(capsys, "user_models:deep", "--arguments", '{"fill": 0}'))
    assert (dead["log phi_2"], dead["mu_{2,2}"][0]) == (["-inf"], "0")
    assert "ratio" not in dead
    assert "holds nan or inf" in refused(capsys, "user_models:deep", "--arguments", '{"fill": NaN}')


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["user_models"], ["expected package.module:name"]),
        (["nowhere.at.all:f"], ["there is no module 'nowhere'"]),
        (["user_models:none"], ["there is no 'none' in user_models"]),
        (["user_models:fails"], ["user_models:fails raised KeyError", "user_models.py, line"]),
        (["user_models:mlp", "--arguments", '{"depth": 3}'], ["TypeError", "depth"]),
        (["user_models:instance", "--arguments", '{"width": 3}'], ["is a model already"]),
        (["user_models:mlp", "--input-shape", "1,5"], ["tracing failed", "--input-shape [(1, 5)]"]),
        (["user_models:conv"], ["--input-shape can be left out only for"]),
        (["user_models:mlp", *2 * ["--input-dtype", "int64"]], ["2 --input-dtype for 0"]),
        (["user_models:mlp", "--weights", "missing.pt"], ["No such file", "missing.pt"]),
        (["user_models:mlp", "--weights", "code.pt"], ["without running code (UnpicklingError)"]),
        (["user_models:mlp", "--weights", "checkpoint.pt"], ["does not fit the model", "Missing key"]),
        (["user_models:mlp", "--weights", "other.pt"], ["does not fit the model", "Missing key"]),
        (["other.pt", "--trust"], ["other.pt holds no model but dict", "--weights"]),
        (["broken.pt2", "--trust"], ["reading broken.pt2 raised"]),
        (["missing.pt", "--trust"], ["No such file", "missing.pt"]),
        (["broken.py:f"], ["importing", "broken.py raised SyntaxError"]),
        (["needs:f"], ["importing needs raised ModuleNotFoundError: No module named 'absent_one'"]),
    ],
)  # fmt: skip
def test_what_the_user_got_wrong_is_one_line(folder, capsys, arguments, parts):
    torch.save({"weight": torch.zeros(1)}, "other.pt")
    torch.save({"epoch": 3, "best": {"weight": torch.zeros(1)}}, "checkpoint.pt")
    torch.save(nn.Linear(2, 1), "code.pt")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "broken.pt2").write_text("")
    (folder / "needs.py").write_text("import absent_one\n")
    line = refused(capsys, *arguments)
    for part in parts:
        assert part in line
