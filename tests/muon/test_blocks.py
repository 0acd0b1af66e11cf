"""Blocks: which parts of parameters take a step together, are orthogonalised, and turn."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd.muon.blocks import find_blocks


def blocks_of(model, *shape, tokens=False):
    torch.manual_seed(0)
    example = torch.zeros(2, *shape, dtype=torch.int64) if tokens else torch.randn(2, *shape)
    return find_blocks(pathsgd.trace(model, example))


def rows(blocks):
    return [(block.start, block.length) for block in blocks]


class PackedAttention(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=bias), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_packed_projection_falls_into_queries_keys_and_values():
    by_name = blocks_of(PackedAttention(), 5, 8)
    assert rows(by_name["qkv.weight"]) == rows(by_name["qkv.bias"]) == [(0, 8), (8, 8), (16, 8)]
    for weight, bias in zip(by_name["qkv.weight"], by_name["qkv.bias"], strict=True):
        assert weight.family == bias.family
        assert (weight.turns, weight.orthogonal) == (True, True)
        assert (bias.turns, bias.orthogonal) == (False, False)
    assert len({block.family for block in by_name["qkv.weight"]}) == 3
    assert rows(by_name["out.weight"]) == [(0, 8)]


def test_in_proj_of_multihead_attention():
    by_name = blocks_of(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 5, 8)
    weight, bias = by_name["self_attn.in_proj_weight"], by_name["self_attn.in_proj_bias"]
    assert rows(weight) == rows(bias) == [(0, 8), (8, 8), (16, 8)]
    assert [block.family for block in weight] == [block.family for block in bias]


def test_their_views_are_the_rows_themselves():
    model = PackedAttention()
    block = blocks_of(model, 5, 8)["qkv.weight"][1]
    view = block.of(model.qkv.weight.detach())
    assert torch.equal(view, model.qkv.weight[8:16])
    assert view.data_ptr() == model.qkv.weight[8:].data_ptr()
    assert block.numel == view.numel() == 64


class Transposed(nn.Module):
    """As in GPT-2's Conv1D: x @ W + b, queries, keys and values in the columns."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 24)), nn.Parameter(torch.zeros(24))
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (x @ self.w + self.b).split(8, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v))


def test_a_transposed_matrix_falls_apart_along_its_columns():
    by_name = blocks_of(Transposed(), 5, 8)
    assert [block.axis for block in by_name["w"]] == [1, 1, 1]
    assert rows(by_name["w"]) == rows(by_name["b"]) == [(0, 8), (8, 8), (16, 8)]
    w = torch.randn(8, 24)
    assert torch.equal(by_name["w"][2].of(w), w[:, 16:])
    assert [block.family for block in by_name["w"]] == [block.family for block in by_name["b"]]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


def test_a_gated_mlp_falls_into_gate_and_value():
    by_name = blocks_of(Gated(), 6)
    assert rows(by_name["up.weight"]) == rows(by_name["up.bias"]) == [(0, 8), (8, 8)]


def test_what_is_read_whole_is_one_block():
    by_name = blocks_of(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), 6)
    assert all(len(blocks) == 1 for blocks in by_name.values())


class Network(nn.Module):
    """An embedding, a depthwise, a grouped and a plain convolution, a norm, a last layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.depthwise, self.grouped = nn.Conv1d(8, 8, 3, groups=8), nn.Conv1d(8, 8, 3, groups=2)
        self.plain, self.norm, self.head = nn.Conv1d(8, 6, 3), nn.LayerNorm(6), nn.Linear(6, 11)

    def forward(self, tokens):
        x = self.depthwise(self.table(tokens).mT).relu()
        x = self.plain(self.grouped(x).relu()).relu()
        return self.head(self.norm(x.mT))


def test_what_is_orthogonalised_and_what_turns():
    by_name = blocks_of(Network(), 12, tokens=True)
    assert {name for name, (block,) in by_name.items() if block.orthogonal} == {
        "grouped.weight",
        "plain.weight",
    }
    assert {name for name, (block,) in by_name.items() if block.turns} == {
        "table.weight", "depthwise.weight", "grouped.weight", "plain.weight", "head.weight",
    }  # fmt: skip


def test_a_bias_is_in_the_family_of_its_layer():
    by_name = blocks_of(Network(), 12, tokens=True)
    family = {name: block.family for name, (block,) in by_name.items()}
    for layer in ("depthwise", "grouped", "plain", "head"):
        assert family[f"{layer}.weight"] == family[f"{layer}.bias"]
    assert len({family[f"{layer}.weight"] for layer in ("depthwise", "grouped", "plain", "head")}) == 4


def test_layers_of_one_region_share_its_growth():
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
    by_name = blocks_of(nn.Sequential(*layers), 4)
    assert {block.share for (block,) in by_name.values()} == {3}
    # A softmax ends the region of the first two.
    by_name = blocks_of(nn.Sequential(*layers[:3], nn.Softmax(1), layers[4]), 4)
    assert [by_name[f"{k}.weight"][0].share for k in (0, 2, 4)] == [2, 2, 1]


class Residual(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


def test_growth_is_shared_by_the_layers_that_lie_in_sequence():
    """Of a region: a GELU ends one. A sum counts as the mean of its summands."""

    def shares(model):
        return [block.share for own in blocks_of(model, 6).values() for block in own if block.turns]

    def layer():
        return nn.Linear(6, 6)

    assert shares(nn.Sequential(layer(), nn.ReLU(), layer(), nn.BatchNorm1d(6), nn.ReLU(), layer())) == 3 * [
        3
    ]
    assert shares(nn.Sequential(layer(), nn.ReLU(), layer(), nn.GELU(), layer())) == [2, 2, 1]
    blocks = [Residual(nn.Sequential(layer(), nn.ReLU(), layer())) for _ in range(3)]
    assert shares(nn.Sequential(layer(), *blocks)) == 7 * [4]


def test_blocks_are_found_in_time_linear_in_their_number(monkeypatch):
    """Who reads what is asked once, not for each layer: of 330 blocks that took 5 of 7.5 s."""
    calls = []
    readers = pathsgd.PathGraph.readers
    monkeypatch.setattr(pathsgd.PathGraph, "readers", lambda graph: calls.append(1) or readers(graph))

    def count(depth):
        calls.clear()
        blocks_of(nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)]), 4)
        return len(calls)

    assert count(2) == count(6)
