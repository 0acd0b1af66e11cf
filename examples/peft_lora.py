"""peft: LoRA on a small Llama, by BalancedMuon and by AdamW. Nothing is downloaded.

All weights are trained on the bytes of one Python module first; then LoRA, whose matrices B are zero at the
start, adapts the model to another.

python examples/peft_lora.py
"""

import argparse
import copy
import tarfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import pathsgd

STEPS, BATCH, LENGTH = 40, 8, 64


def read(module):
    """Rows for training and for testing."""
    text = torch.frombuffer(bytearray(Path(module.__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out = torch.arange(len(rows)) % 10 == 0
    return rows[~held_out], rows[held_out]


def train(model, optimizer, rows):
    torch.manual_seed(0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.05, STEPS)
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


@torch.no_grad()
def compute_loss(model, rows):
    return model(input_ids=rows, labels=rows).loss.item()


def add_lora(model):
    torch.manual_seed(0)
    return get_peft_model(copy.deepcopy(model), LoraConfig(r=8, target_modules="all-linear"))


config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH,
)  # fmt: skip
example = {"input_ids": torch.zeros(1, LENGTH, dtype=torch.long)}
torch.manual_seed(0)
base = LlamaForCausalLM(config)
train(base, pathsgd.BalancedMuon(base, example), read(argparse)[0])

train_rows, test_rows = read(tarfile)
model = add_lora(base)
balanced_muon = compute_loss(train(model, pathsgd.BalancedMuon(model, example), train_rows), test_rows)
model = add_lora(base)
adamw = compute_loss(train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), train_rows), test_rows)
before = compute_loss(base, test_rows)
print(f"test loss: BalancedMuon {balanced_muon:.3f}, AdamW {adamw:.3f}, before {before:.3f}")
