"""``pathsgd inspect``: what it prints is what the library measures, it changes nothing, and whatever is wrong
with what the user gave ends in one line."""

from __future__ import annotations

import copy
import importlib
import json
import math
import statistics
import sys

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import cli
from pathsgd.graph.unit_classes import unit_classes_of
from pathsgd.inspect import inspect_command as command

MODELS = """
import torch
from torch import nn

print("printed by the user's module")
number = 3


def mlp(width=8, bias=True):
    return nn.Sequential(nn.Linear(4, width, bias), nn.ReLU(), nn.Linear(width, width, bias), nn.ReLU(),
                         nn.Linear(width, 2, bias))


def embedding():
    return nn.Sequential(nn.Embedding(9, 4), nn.ReLU(), nn.Linear(4, 2))


def conv():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens, x):
        return self.head(torch.relu(self.embedding(tokens) + self.linear(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2, bias=False)
        self.same = self.head

    def forward(self, x):
        return self.head(torch.relu(self.b(torch.relu(self.a(x)))))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


class zoo:
    small = mlp


class Sigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * torch.sigmoid(self.w)


instance = mlp()


def fails():
    raise KeyError("no such\\nwidth")


def leaves():
    raise SystemExit(2)


def not_a_model():
    return [1]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_models", raising=False)
    yield tmp_path
    sys.modules.pop("user_models", None)


def inspect(capsys, *arguments):
    """The tables, from a run that goes well."""
    capsys.readouterr()
    assert cli.main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def inspect_json(capsys, *arguments):
    def refused(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(inspect(capsys, *arguments, "--json"), parse_constant=refused)


def refused(capsys, *arguments):
    """The one line of a run that ends in an error."""
    assert cli.main(["inspect", *map(str, arguments)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "printed by the user" not in line]
    assert line.startswith("pathsgd: ")
    return line


def layer(found, *owners):
    (one,) = [layer for layer in found["layers"] if tuple(layer["owners"]) == owners]
    return one


def user_module():
    """What the command will find under this name."""
    sys.path.insert(0, ".")
    try:
        importlib.invalidate_caches()
        return importlib.import_module("user_models")
    finally:
        sys.path.remove(".")


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_the_imbalance_is_the_scale_a_unit_was_rescaled_by(folder, capsys, p):
    model = user_module().mlp().double()
    pathsgd.balance(model, p=p, q=math.inf)
    torch.save(model.state_dict(), "balanced.pt")
    wild = {("0", 3): 2.0**5, ("2", 0): 2.0**-3, ("2", 1): 2.0**-3}
    pathsgd.rescale(model, None, wild)
    sys.modules["user_models"].instance = model
    rescaled = inspect_json(capsys, "user_models:instance", "--p", p)
    assert layer(rescaled, "0")["imbalance"] == pytest.approx(
        {"smallest": 0, "median": 0, "largest": 5}, abs=1e-6
    )
    assert layer(rescaled, "2")["imbalance"] == pytest.approx(
        {"smallest": -3, "median": 0, "largest": 0}, abs=1e-6
    )
    assert layer(rescaled, "4")["imbalance"] is None
    shown = inspect(capsys, "user_models:instance", "--p", p, "--input-shape", "1,4")
    assert next(line for line in shown.splitlines() if line.startswith("0 ")).split()[-3:] == [
        "0",
        "0",
        "+5.00",
    ]
    balanced = inspect_json(capsys, "user_models:instance", "--p", p, "--weights", "balanced.pt")
    assert all(
        abs(number) < 1e-6 for one in balanced["layers"] for number in (one["imbalance"] or {}).values()
    )
    assert balanced["ratio"] == pytest.approx(1)
    assert rescaled["mu_balanced"] == pytest.approx(balanced["mu"])
    assert rescaled["phi"][0]["log_phi"] == pytest.approx(balanced["phi"][0]["log_phi"])


def test_the_numbers_are_those_of_the_library(folder, capsys):
    user_models = user_module()
    torch.manual_seed(7)
    model = user_models.mlp(width=16)
    found = inspect_json(
        capsys, "user_models:mlp", "--arguments", '{"width": 16}', "--seed", 7, "--p", 1.5,
        "--input-shape", "3,4",
    )  # fmt: skip
    log_phi = pathsgd.path_norm(model, p=1.5, log=True).item()
    assert found["phi"] == [{"region": 0, "log_phi": log_phi, "phi": pytest.approx(math.exp(log_phi))}]
    assert found["mu"] == pathsgd.group_norm(model, p=1.5).item()
    norms = torch.linalg.vector_norm(torch.cat([model[0].weight, model[0].bias[:, None]], 1), ord=1.5, dim=1)
    assert layer(found, "0")["norm"] == pytest.approx(
        {
            "smallest": norms.min().item(),
            "median": statistics.median(norms.flatten().tolist()),
            "largest": norms.max().item(),
        }
    )
    assert (layer(found, "0")["units"], layer(found, "0")["rescalable"]) == (16, 16)
    assert (layer(found, "4")["units"], layer(found, "4")["rescalable"]) == (2, 0)
    assert found["mu_balanced"] == pytest.approx(pathsgd.balance(model, p=1.5, q=math.inf))
    assert found["ratio"] == found["mu"] / found["mu_balanced"]
    assert found["inputs"] == [{"shape": [3, 4], "dtype": "float32"}]
    assert [one["name"] for one in found["parameters"]] == list(dict(model.named_parameters()))


def test_batch_norm(folder, capsys):
    model = user_module().conv()
    graph = pathsgd.trace(model, torch.zeros(1, 3, 8, 8))
    out = inspect(capsys, "user_models.py:conv", "--input-shape", "2,3,8,8")
    assert out.startswith(f"{graph}\n\nlog phi_2 ")
    assert "printed by the user" not in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert lines["0"][-3:] == ["-", "-", "-"], "units before a batch norm cannot be rescaled"
    assert lines["1"][1:5] == ["6", "1", "1", "1"]
    assert "-" not in lines["1"][-3:]


def test_several_regions(folder, capsys):
    model = user_module().encoder()
    graph = pathsgd.trace(model, torch.zeros(1, 5, 8))
    arguments = ("user_models:encoder", "--input-shape", "1,5,8", "--weights", "encoder.pt")
    torch.save(model.state_dict(), "encoder.pt")
    found = inspect_json(capsys, *arguments)
    torch.save({"epoch": 3, "state": {"model": model.state_dict(), "order": torch.zeros(1)}}, "encoder.pt")
    assert inspect_json(capsys, *arguments) == found, "in a checkpoint as in a file of its own"
    logs = [pathsgd.path_norm(model, graph, region=k, log=True).item() for k in range(3)]
    assert [(one["region"], one["log_phi"]) for one in found["phi"]] == list(enumerate(logs))
    assert {"region": 0, "at": "norm1", "reason": "layer_norm is not positively homogeneous"} in found["ends"]
    (fallback,) = [one for one in found["parameters"] if one["name"] == "norm2.weight"]
    assert (fallback["path_normalised"], fallback["status"]) == (False, "alone")
    assert "gamma = 1" in fallback["reason"]
    values = layer(found, "self_attn")
    assert (values["units"], values["rescalable"]) == (24, 8), (
        "the values can be rescaled, queries and keys not"
    )
    known = unit_classes_of(graph).owners
    assert all(owner in known for one in found["layers"] for owner in one["owners"])
    one = inspect(capsys, *arguments, "--region", 1)
    assert "log phi_2 of region 1" in one
    assert "linear1" in one.partition("log phi")[2]
    assert "self_attn" not in one.partition("log phi")[2]
    assert "no region 9" in refused(capsys, *arguments, "--region", 9)


def test_several_inputs_a_class_and_a_dotted_name(folder, capsys):
    shapes = ("--input-shape", "1,5", "--input-shape", "1,5,3", "--input-dtype", "int64")
    found = inspect_json(capsys, "user_models:Tokens", *shapes, "--input-dtype", "float32")
    assert layer(found, "embedding")["imbalance"] == layer(found, "linear")["imbalance"], "tied units"
    assert [one["dtype"] for one in found["inputs"]] == ["int64", "float32"]
    assert "3 --input-dtype for 2" in refused(
        capsys, "user_models:Tokens", *shapes, "--input-dtype", "int8", "--input-dtype", "int8"
    )
    assert layer(inspect_json(capsys, "user_models:zoo.small"), "2")["units"] == 8


def test_a_file_in_a_package_and_one_beside_others(folder, capsys):
    package = folder / "elsewhere" / "user_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "blocks.py").write_text("from torch import nn\nmake = lambda: nn.Sequential(nn.Linear(2, 1))")
    (package / "nets.py").write_text("from .blocks import make")
    (folder / "elsewhere" / "random.py").write_text("from user_package.blocks import make")
    before = list(sys.path)
    try:
        for file in (package / "nets.py", folder / "elsewhere" / "random.py"):
            found = inspect_json(capsys, f"{file}:make")
            assert [one["owners"] for one in found["layers"]] == [["0"]]
    finally:
        for name in [name for name in sys.modules if name.startswith("user_package")]:
            del sys.modules[name]
    assert sys.path == before
    assert "elsewhere" not in (sys.modules["random"].__file__ or "")


def test_the_model_stays_as_it_is(folder, capsys):
    model = user_module().instance
    pathsgd.unbalance(model, generator=torch.Generator().manual_seed(0))
    before = copy.deepcopy(model.state_dict())
    parameters = [id(parameter) for parameter in model.parameters()]
    inspect(capsys, "user_models:instance", "--save-balanced", "balanced.pt")
    assert sys.modules["user_models"].instance is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "shape"), [("mlp", "1,4"), ("conv", "1,3,8,8"), ("Tied", "1,4")])
def test_balanced_weights_compute_the_same_and_are_balanced(folder, capsys, name, shape):
    model = getattr(user_module(), name)().eval()
    x = torch.randn(3, *map(int, shape.split(",")[1:]))
    pathsgd.unbalance(model, x, generator=torch.Generator().manual_seed(0))
    torch.save(model.state_dict(), "wild.pt")
    target = (f"user_models:{name}", "--input-shape", shape)
    out = inspect(capsys, *target, "--weights", "wild.pt", "--save-balanced", "balanced.pt")
    assert out.endswith("balanced weights written to balanced.pt\n")
    assert sorted(path.suffix for path in folder.glob("*.pt*")) == [".pt", ".pt"]
    expected = model(x)
    model.load_state_dict(torch.load("balanced.pt", weights_only=True))
    torch.testing.assert_close(model(x), expected)
    found = inspect_json(capsys, *target, "--weights", "balanced.pt")
    assert all(abs(number) < 1e-4 for one in found["layers"] for number in (one["imbalance"] or {}).values())


def test_beyond_floats_dead_paths_and_no_paths(folder, capsys):
    (folder / "odd.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def deep(fill=1e-30):\n"
        "    layers = [nn.Linear(2, 2, bias=False) for _ in range(40)]\n"
        "    for layer in layers:\n        nn.init.constant_(layer.weight, fill)\n"
        "    return nn.Sequential(*layers)\n"
    )
    assert "beyond floats" in inspect(capsys, "odd.py:deep")
    dead = inspect_json(capsys, "odd.py:deep", "--arguments", '{"fill": 0}')
    assert dead["phi"] == [{"region": 0, "log_phi": None, "phi": 0.0}]
    assert (dead["mu"], dead["ratio"]) == (0, None)
    out = inspect(capsys, "user_models:Sigmoid", "--input-shape", "1,4")
    assert "no parameter lies on a path" in out
    assert "No layer has weights on paths." in out
    assert "holds nan or inf" in refused(capsys, "odd.py:deep", "--arguments", '{"fill": NaN}')


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["user_models"], ["expected package.module:name"]),
        (["no/such/folder:f"], ["neither a module"]),
        (["nowhere.at.all:f"], ["there is no module 'nowhere'"]),
        (["missing.py:f"], ["there is no file missing.py"]),
        (["user_models:none"], ["there is no 'none' in user_models"]),
        (["user_models:zoo.none"], ["there is no 'none' in user_models.zoo"]),
        (["user_models:number"], ["is a int, not a model"]),
        (["user_models:not_a_model"], ["returned a list, not an nn.Module"]),
        (["user_models:fails"], ["user_models:fails raised KeyError", "user_models.py, line"]),
        (["user_models:leaves"], ["raised SystemExit: 2"]),
        (["user_models:mlp", "--arguments", '{"depth": 3}'], ["TypeError", "depth"]),
        (["user_models:mlp", "--arguments", "{width: 3}"], ["is no JSON"]),
        (["user_models:mlp", "--arguments", "[3]"], ["no JSON object"]),
        (["user_models:instance", "--arguments", '{"width": 3}'], ["is a model already"]),
        (["user_models:mlp", "--input-shape", "1,x"], ["Invalid --input-shape: '1,x'"]),
        (["user_models:mlp", "--input-shape", "1,0"], ["Invalid --input-shape"]),
        (["user_models:mlp", "--input-shape", f"1,{10**30}"], ["do not fit in memory"]),
        (["user_models:mlp", "--input-shape", "1,5"], ["tracing failed", "--input-shape [(1, 5)]"]),
        (["user_models:embedding", "--input-shape", "1,5"], ["indices", "--input-dtype int64"]),
        (["user_models:conv"], ["--input-shape can be left out only for"]),
        (["user_models:Branches", "--input-shape", "1,4"], ["control flow or its sizes depend on values"]),
        (["user_models:mlp", "--input-shape", "1,4", "--input-dtype", "nn"], ["Invalid --input-dtype: 'nn'"]),
        (["user_models:mlp", "--input-dtype", "int64"], ["1 --input-dtype for 0"]),
        (["user_models:mlp", "--batch-dim", "x"], ["Invalid --batch-dim"]),
        (["user_models:mlp", "--p", "0.5"], ["Invalid p: 0.5"]),
        (["user_models:mlp", "--device", "abacus"], ["device 'abacus' cannot be used"]),
        (["user_models:mlp", "--weights", "missing.pt"], ["No such file", "missing.pt"]),
        (["user_models:mlp", "--weights", "user_models.py"], ["holds no state dict that can be read"]),
        (["user_models:mlp", "--weights", "code.pt"], ["without running code (UnpicklingError)"]),
        (["user_models:mlp", "--weights", "checkpoint.pt"], ["but a dict with 'epoch', 'best'"]),
        (["user_models:mlp", "--weights", "other.pt"], ["does not fit the model", "Missing key"]),
        (["user_models:mlp", "--save-balanced", "user_models.py/x.pt"], ["pathsgd: user_models.py/x.pt: "]),
        (["user_models:mlp", "--save-balanced", "taken"], ["pathsgd: taken: Is a directory"]),
        (["broken.py:f"], ["importing", "broken.py raised SyntaxError"]),
        (["needs:f"], ["importing needs raised ModuleNotFoundError: No module named 'absent_one'"]),
    ],
)  # fmt: skip
def test_what_the_user_got_wrong_is_one_line(folder, capsys, arguments, parts):
    torch.save({"weight": torch.zeros(1)}, "other.pt")
    torch.save({"epoch": 3, "best": {"weight": torch.zeros(1)}}, "checkpoint.pt")
    torch.save(nn.Linear(2, 1), "code.pt")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "taken").mkdir()
    (folder / "needs.py").write_text("import absent_one\n")
    line = refused(capsys, *arguments)
    for part in parts:
        assert part in line


def test_a_bug_of_our_own_keeps_its_traceback(folder, monkeypatch):
    def bug(*arguments):
        raise RuntimeError("ours")

    monkeypatch.setattr(command, "imbalance", bug)
    with pytest.raises(RuntimeError, match="ours"):
        cli.main(["inspect", "user_models:mlp"])


def test_the_help_has_the_formula_and_two_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "-log2 of the factor" in shown
    assert "runs the code in it" in shown
    assert shown.count("\n  pathsgd inspect ") == 2
