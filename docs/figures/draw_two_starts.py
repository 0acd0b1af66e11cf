"""Draws docs/figures/two-starts.png: GPT-2 in small and its rescaled copy, trained by SGD, AdamW and Muon, by
the last two after ``balance``, and by BalancedMuon. Rates are the best from the usual start.

Run it from the root of the repository: PYTHONPATH=. python docs/figures/draw_two_starts.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import pathsgd
from benchmarks.league.baselines import Muon

STEPS, LENGTH = 300, 64


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_embd=64, n_layer=2, n_head=2, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def read_rows() -> list[torch.Tensor]:
    """Pieces of the text of Python's standard library, of which every tenth is held out."""
    folder = Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-d]*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return list(tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH))


def as_batch(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack(rows), "labels": torch.stack(rows)}


def by(kind: Any, *rates: float) -> tuple[Any, tuple[float, ...]]:
    return lambda model, graph, rate: kind(model.parameters(), rate), rates


def balance(model: nn.Module, graph: pathsgd.PathGraph) -> nn.Module:
    pathsgd.balance(model, graph)
    return model


# Muon takes the matrices inside, AdamW the rest.
METHODS = {
    "SGD": by(torch.optim.SGD, 0.03, 0.1, 0.3),
    "AdamW": by(torch.optim.AdamW, 3e-4, 1e-3, 3e-3),
    "Muon": (lambda model, graph, rate: Muon(model, rate, rest_lr=1e-3), (3e-3, 1e-2, 3e-2)),
    "balance + AdamW": (
        lambda model, graph, rate: torch.optim.AdamW(balance(model, graph).parameters(), rate),
        (3e-4, 1e-3, 3e-3),
    ),
    "balance + Muon": (
        lambda model, graph, rate: Muon(balance(model, graph), rate, rest_lr=1e-3),
        (3e-3, 1e-2, 3e-2),
    ),
    "BalancedMuon": (lambda model, graph, rate: pathsgd.BalancedMuon(model, graph), (None,)),
}


def draw(path: Path, steps: int = STEPS) -> pathsgd.Comparison:
    rows = read_rows()
    train = [row for k, row in enumerate(rows) if k % 10]
    loader = torch.utils.data.DataLoader(train, 16, shuffle=True, drop_last=True, collate_fn=as_batch)  # type: ignore[arg-type]
    valid = [as_batch(rows[::10][:500])]
    found = pathsgd.compare(make_model(), loader, valid, methods=METHODS, steps=steps, rescaled=True)
    found.draw().savefig(path, dpi=100)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(draw(Path(__file__).with_name("two-starts.png")))
