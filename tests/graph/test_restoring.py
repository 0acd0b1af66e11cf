"""Nothing of a model is different after a trace, failed or not: the same objects, in the same order."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import pathsgd
from support.holder import Cache, Holder, assert_same, contents, trace


class FrozenDict(OrderedDict):
    """A read-only mapping whose items are attributes as well, as the configurations of diffusers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
        self.frozen = True

    def refuse(self, *_, **__):
        raise TypeError("read only")

    __delitem__ = setdefault = pop = popitem = update = clear = move_to_end = __ior__ = refuse

    def __setitem__(self, key, value):
        self.refuse() if "frozen" in self.__dict__ else super().__setitem__(key, value)

    def __setattr__(self, name, value):
        self.refuse() if "frozen" in self.__dict__ else super().__setattr__(name, value)


@dataclasses.dataclass(frozen=True)
class Frozen:
    sizes: list
    options: dict


class Slots:
    __slots__ = ("cache", "length", "unset")

    def __init__(self):
        self.cache, self.length = [torch.ones(2)], 1


class InheritedSlots(Slots):
    __slots__ = ("__private",)

    def __init__(self):
        super().__init__()
        self.__private = {}

    def write(self, y):
        self.__private["y"] = y
        self.__private = None


class Configuration:
    """Attributes that are entries of a dict inside, each with a link to its parent, as in OmegaConf."""

    def __init__(self, parent=None, **entries):
        self.__dict__["_parent"] = parent
        self.__dict__["_content"] = {
            k: Configuration(self, **v) if isinstance(v, dict) else v for k, v in entries.items()
        }

    def __getattr__(self, name):
        content = self.__dict__.get("_content", {})
        if name not in content:
            raise AttributeError(name)
        return content[name]

    def __setattr__(self, name, value):
        self._content[name] = value


def read_only(held):
    """Reads, as nearly all models do."""
    return held, lambda model, y: len(model.held.sizes)


def frozen_dict_written_regardless():
    def write(model, y):
        OrderedDict.__setitem__(model.held, "y", y)
        OrderedDict.move_to_end(model.held, "sizes")
        model.held.__dict__["sizes"] = y

    return FrozenDict(sizes=(1, 2), names=["a"]), write


def dict_of_lists():
    def write(model, y):
        model.held["layers"][0].append(y)
        model.held["layers"].append([y])
        model.held["seen"].add(y)
        model.held["recent"].append(y)
        model.held["by_name"]["new"].append(y)
        model.held["pair"][1].clear()

    return {
        "layers": [[torch.ones(1)], []],
        "seen": {"first"},
        "recent": deque([1, 2], maxlen=2),
        "by_name": defaultdict(list, old=[1]),
        "pair": (1, {"a": 2}),
    }, write


def object_in_the_cache():
    return [Cache()], lambda model, y: model.held[0].write(y)


def replaced_dict_of_an_object():
    def write(model, y):
        model.held.__dict__ = {"keys": y}

    return Cache(), write


def slots():
    def write(model, y):
        model.held.cache.append(y)
        model.held.unset = y
        del model.held.length

    return Slots(), write


def inherited_slots():
    return InheritedSlots(), lambda model, y: model.held.write(y)


def configuration():
    def write(model, y):
        model.held.model.width = y
        model.held.sizes = y
        model.held.model.layers.append(y)

    return Configuration(sizes=[1], model={"width": 3, "layers": [4]}), write


def order_of_an_ordered_dict():
    def write(model, y):
        model.held.move_to_end("a")
        model.held["b"] = model.held.pop("b")

    return OrderedDict(a=1, b=2, c=3), write


def namespace():
    def write(model, y):
        model.held.sizes.append(y)
        model.held.new = y

    return types.SimpleNamespace(sizes=[1]), write


def order_of_a_dict():
    def write(model, y):
        model.held["a"] = model.held.pop("a")

    return {"a": 1, "b": 2}, write


def new_attribute():
    def write(model, y):
        model.fresh = model.a.fresh = y
        model.register_buffer("state", y)

    return None, write


def replaced_attribute():
    def write(model, y):
        model.last = model.held = y

    return [1], write


def deleted_attribute():
    def write(model, y):
        del model.held
        del model.last

    return [1], write


def unregistered_module():
    def write(model, y):
        model.held[0].cache = y

    return [nn.Linear(2, 2)], write


def lazy_attribute_of_torch():
    prior = MultivariateNormal(torch.zeros(2), scale_tril=torch.eye(2), validate_args=False)
    return prior, lambda model, y: model.held.covariance_matrix


def attribute_of_a_tensor():
    def write(model, y):
        model.held.tag = y

    return torch.ones(2), write


def sparse_tensor():
    def write(model, y):
        model.held[0] = y

    return [torch.eye(2).to_sparse()], write


CASES = {
    "frozen dict": lambda: read_only(FrozenDict(sizes=(1, 2), names=["a"])),
    "frozen dataclass": lambda: read_only(Frozen([1], {"a": [2]})),
    **{
        case.__name__: case
        for case in (
            frozen_dict_written_regardless, dict_of_lists, object_in_the_cache, replaced_dict_of_an_object,
            slots, inherited_slots, configuration, namespace, order_of_an_ordered_dict, order_of_a_dict,
            new_attribute,
            replaced_attribute, deleted_attribute, unregistered_module, lazy_attribute_of_torch,
            attribute_of_a_tensor, sparse_tensor,
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_the_forward_wrote_is_put_back(case, fails):
    held, write = CASES[case]()
    before = contents(held)
    model = trace(held, write, fails)
    assert model.held is held
    assert_same(contents(held), before)


@pytest.mark.parametrize("fails", [False, True])
def test_a_frozen_dataclass_and_a_frozen_dict_keep_what_is_written_inside(fails):
    for held in (Frozen([1], {"a": 2}), FrozenDict(sizes=[1], options={"a": 2})):
        trace(held, lambda model, y: (model.held.sizes.append(y), model.held.options.clear()), fails)
        assert (held.sizes, held.options) == ([1], {"a": 2})


@pytest.mark.parametrize("fails", [False, True])
def test_contents_are_equal_and_not_only_the_same(fails):
    frozen, _ = CASES["frozen dict"]()
    trace(frozen, lambda model, y: None, fails)
    assert frozen == FrozenDict(sizes=(1, 2), names=["a"])
    assert (frozen.sizes, frozen.frozen) == ((1, 2), True)
    nested, write = dict_of_lists()
    trace(nested, write, fails)
    assert nested == dict_of_lists()[0]
    ordered, write = order_of_an_ordered_dict()
    trace(ordered, write, fails)
    assert list(ordered) == list(reversed([*reversed(ordered)])) == ["a", "b", "c"]
    holder, write = slots()
    trace(holder, write, fails)
    assert holder.length == 1
    assert not hasattr(holder, "unset")
    model = trace(*new_attribute(), fails)
    assert not any(hasattr(x, name) for x in (model, model.a) for name in ("fresh", "state"))


class Guarded(dict):
    """Counts every call of a method of its own."""

    calls = 0

    def count(self, *_, **__):
        Guarded.calls += 1
        raise RuntimeError

    __iter__ = __len__ = __eq__ = __contains__ = __getitem__ = __setitem__ = clear = copy = count
    keys = values = items = update = pop = count
    attribute = property(count)
    __hash__ = None


@pytest.mark.parametrize("fails", [False, True])
def test_code_of_the_user_is_not_run(fails):
    held = Guarded(a=[1])
    model = Holder([held], lambda model, y: dict.__setitem__(model.held[0], "b", y), fails)
    with contextlib.suppress(pathsgd.TraceError):
        pathsgd.trace(model, torch.randn(2, 4))
    assert Guarded.calls == 0
    assert list(dict.items(held)) == [("a", [1])]


@pytest.mark.parametrize(
    "write",
    [lambda held: held.add_(1), lambda held: held.data.mul_(3), lambda held: setattr(held, "data", held + 1)],
)
@pytest.mark.parametrize("fails", [False, True])
def test_values_of_a_tensor_that_is_no_buffer(write, fails):
    """Export writes to such a tensor itself, and refuses most such models after that."""
    held = [torch.tensor([1.0, float("nan")]), nn.Parameter(torch.ones(2))]
    expected, addresses = [x.detach().clone() for x in held], [x.data_ptr() for x in held]

    def write_all(model, y):
        with torch.no_grad():
            for tensor in model.held:
                write(tensor)

    model = Holder(held, write_all, fails)
    with contextlib.suppress(pathsgd.TraceError, NotImplementedError):
        pathsgd.trace(model, torch.randn(2, 4))
    torch.testing.assert_close(held, expected, rtol=0, atol=0, equal_nan=True)
    assert [x.data_ptr() for x in held] == addresses
