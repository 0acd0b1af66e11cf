"""Lightning: a convolutional network on digits, with all weights in bf16, by BalancedMuon and by AdamW.

python examples/lightning_module.py
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import pathsgd

EPOCHS = 4


class Digits(lightning.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(),
            nn.Linear(32, 10),
        )  # fmt: skip

    def training_step(self, batch):
        images, classes = batch
        return F.cross_entropy(self.net(images), classes)

    def validation_step(self, batch):
        self.log("loss", self.training_step(batch))

    def configure_optimizers(self):
        if self.optimizer == "BalancedMuon":
            # Only the shape of the example matters: it is fp32 here, and the weights are bf16.
            return pathsgd.BalancedMuon(self.net, torch.zeros(1, 1, 8, 8))
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
classes = torch.tensor(data.target)
train, test = TensorDataset(images[400:], classes[400:]), TensorDataset(images[:400], classes[:400])


def run(optimizer, precision="bf16-true"):
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, precision=precision, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Digits(optimizer)
    trainer.fit(module, DataLoader(train, 64, shuffle=True))
    return trainer.validate(module, DataLoader(test, 400), verbose=False)[0]["loss"]


if __name__ == "__main__":
    print(f"test loss: BalancedMuon {run('BalancedMuon'):.3f}, AdamW {run('AdamW'):.3f}")
