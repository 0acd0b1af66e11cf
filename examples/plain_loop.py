"""A plain training loop: a convolutional network on digits, by BalancedMuon and by AdamW.

python examples/plain_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import pathsgd

STEPS, BATCH = 100, 64

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
classes = torch.tensor(data.target)
train_x, test_x, train_y, test_y = images[400:], images[:400], classes[400:], classes[:400]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def train(model, optimizer):
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.05, STEPS)
    for _ in range(STEPS):
        batch = torch.randint(len(train_x), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return F.cross_entropy(model(test_x), test_y).item()


model = make_model()
balanced_muon = train(model, pathsgd.BalancedMuon(model, train_x[:1]))  # the line that differs
model = make_model()
adamw = train(model, torch.optim.AdamW(model.parameters(), lr=3e-2))
print(f"test loss: BalancedMuon {balanced_muon:.3f}, AdamW {adamw:.3f}")
