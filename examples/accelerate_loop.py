"""Accelerate: a convolutional network on digits with accumulated gradients, by BalancedMuon and by AdamW.

python examples/accelerate_loop.py, or accelerate launch examples/accelerate_loop.py on several devices
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import pathsgd

EPOCHS = 4

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
classes = torch.tensor(data.target)
train, test = TensorDataset(images[400:], classes[400:]), (images[:400], classes[:400])


def run(make_optimizer):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train) // 64)
    loader = DataLoader(train, 32, shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    with torch.no_grad():
        x, y = (tensor.to(accelerator.device) for tensor in test)
        return F.cross_entropy(model(x), y).item()


balanced_muon = run(lambda model: pathsgd.BalancedMuon(model, torch.zeros(1, 1, 8, 8)))
adamw = run(lambda model: torch.optim.AdamW(model.parameters(), lr=3e-2))
print(f"test loss: BalancedMuon {balanced_muon:.3f}, AdamW {adamw:.3f}")
