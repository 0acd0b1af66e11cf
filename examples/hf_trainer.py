"""Hugging Face Trainer: a small Llama, randomly initialised, on the bytes of a Python module, by BalancedMuon
and by AdamW. Nothing is downloaded.

python examples/hf_trainer.py
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import pathsgd
from pathsgd.huggingface import trainer_optimizer

STEPS, BATCH, LENGTH = 40, 8, 64

text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
dataset = [{"input_ids": row, "labels": row} for row in rows]
test = dataset[::10]
train = [item for k, item in enumerate(dataset) if k % 10]


def run(**optimizer):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, per_device_eval_batch_size=64,
            max_grad_norm=0, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
            **optimizer.pop("arguments", {}),
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test, **optimizer)
        trainer.train()
        return trainer.evaluate()["eval_loss"]


balanced_muon = run(optimizer_cls_and_kwargs=trainer_optimizer(pathsgd.BalancedMuon))
adamw = run(arguments={"learning_rate": 1e-2})
print(f"test loss: BalancedMuon {balanced_muon:.3f}, AdamW {adamw:.3f}")
